"""The commands of the experiments, one function per verb; like the command line, they import nothing heavy at first."""

from __future__ import annotations

import dataclasses
import json
import sys

from boovae.cli.arguments import Bench, LatentMap, Replay, Toy, command_line, settings_of
from boovae.cli.terminal import grouped, print_rows
from boovae.errors import RunError


def bench(arguments: Bench) -> None:
    """Run a study, write its tables and figures."""
    from boovae.bench.studies import bench as run_bench

    outcome = run_bench(arguments, command_line())
    left_out = [title for title in outcome.missing if title not in outcome.failed]
    if left_out and not arguments.quiet:
        print(f"not finished, so left out: {', '.join(left_out)}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(outcome)))
    else:
        if outcome.findings:
            print_rows(("what", "where it stands"), list(outcome.findings.items()))
        if len(outcome.missing) < outcome.cells:
            print(f"results: {outcome.results}")
    if outcome.failed:
        failed = "\n".join(f"  {title}: {error}" for title, error in outcome.failed.items())
        others = "; the others are finished" if len(outcome.failed) < outcome.cells else ", so there are no tables"
        raise RunError(f"{len(outcome.failed)} of {outcome.cells} cells failed{others}:\n{failed}")


def toy(arguments: Toy) -> None:
    """Boost on densities that can be seen."""
    from boovae.experiments.toy import run

    rows = run(arguments, command_line())
    if arguments.json:
        print(json.dumps(rows))
        return
    head = ("target", "objective", "components", "KL to the mixture", "KL from the mixture")
    last = {row["target"]: row["components"] for row in rows}
    shown = [row for row in rows if row["components"] in (1, last[row["target"]])]
    print_rows(head, grouped(shown, head[:3], ("kl_target_mixture", "kl_mixture_target"), digits=3))
    print(f"figure: {arguments.out / 'toy.png'}", file=sys.stderr)


def latent_map(arguments: LatentMap) -> None:
    """Draw priors and aggregated posteriors."""
    from boovae.experiments.latent_map import run

    rows = run(settings_of(arguments), arguments, command_line())
    if arguments.json:
        print(json.dumps(rows))
        return
    print_rows(("method", "tasks seen", "KL to the prior"), grouped(rows, ("method", "tasks_seen"), ("kl",), digits=3))
    print(f"figure: {arguments.out / 'latent_map.png'}", file=sys.stderr)


def replay(arguments: Replay) -> None:
    """Teach classifiers with generated images."""
    from boovae.experiments.replay import run

    rows = run(settings_of(arguments), arguments, command_line())
    if arguments.json:
        print(json.dumps(rows))
        return
    head = ("curve", "tasks seen", "task-incremental", "class-incremental")
    seen = max(row["tasks_seen"] for row in rows)
    last = [row for row in rows if row["tasks_seen"] == seen]
    values = ("task_incremental", "class_incremental")
    print_rows(head, grouped(last, ("curve", "tasks_seen"), values, digits=4))
    print(f"figure: {arguments.out / 'replay.png'}", file=sys.stderr)
