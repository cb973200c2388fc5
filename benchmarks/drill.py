"""The reliability drill: kills, hostile files and requests, bad input, long runs. Exits with 1 on any loss.

    python benchmarks/drill.py                     # everything, half an hour on two cores
    python benchmarks/drill.py --reduced           # what continuous integration runs
    python benchmarks/drill.py --only kills soak --device cuda --kills 20 --tasks 60 --seconds 30

A part that was requested and could not run also counts as a loss. See docs/reliability.md.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from bad_input import CASES, documented
from bad_input import attempt as try_bad_input
from boovae.cli.terminal import print_rows
from boovae.data import load_stream
from boovae.errors import BoovaeError, InputError
from boovae.methods import resolve
from boovae.runs.environment import source_commit
from boovae.runs.train import train
from fuzz_requests import fuzz_server
from hostile_files import SETTINGS, bombs, try_files
from kills import RUNS, kill_bench, kill_training
from soak import METHODS as SOAKED
from soak import Soak, soak
from two_at_once import two_at_once


@dataclass(frozen=True)
class Plan:
    """How much to try, and on which device."""

    kills: int
    runs: tuple[str, ...]
    bench_kills: int
    races: int
    files: int
    requests: int
    tasks: int
    soaked: tuple[str, ...]
    device: str = "cpu"
    compile: Literal["auto", "on", "off"] = "auto"
    seed: int = 0
    seconds: float = math.inf


FULL = Plan(
    kills=60,
    runs=tuple(RUNS),
    bench_kills=6,
    races=8,
    files=400,
    requests=10_000,
    tasks=200,
    soaked=tuple(SOAKED),
)
REDUCED = Plan(
    kills=4,
    runs=("boo+distill", "ewc"),
    bench_kills=0,
    races=2,
    files=25,
    requests=300,
    tasks=16,
    soaked=("boo+distill",),
)


@dataclass
class Sheet:
    """The rows of the table so far, and all losses."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def add(self, what: str, tried: str, result: str, losses: Sequence[str] = ()) -> None:
        """Add a row to the table."""
        self.rows.append((what, tried, f"{result}, {len(losses)} LOST" if losses else result))
        self.losses += losses
        print(f"{what}: {tried}; {self.rows[-1][2]}", file=sys.stderr, flush=True)


def drill(plan: Plan, folder: Path, only: Sequence[str] = ()) -> Sheet:
    """Run all parts, or those in `only`, in folders under `folder`."""
    os.environ.setdefault("BOOVAE_CACHE", str(folder / "cache"))
    sheet = Sheet()
    for name, part in PARTS.items():
        if not only or name in only:
            part(sheet, plan, folder)
    return sheet


def _kills(sheet: Sheet, plan: Plan, folder: Path) -> None:
    runs = {name: RUNS[name] for name in plan.runs}
    how: dict[str, Any] = {"device": plan.device, "compile": plan.compile, "seed": plan.seed, "seconds": plan.seconds}
    tally = kill_training(folder / "kills", plan.kills, runs, **how)
    where = ", ".join(f"{count} {moment}" for moment, count in tally.kills.most_common())
    untried = [] if tally.kills else ["no run was killed"]
    sheet.add("kills survived", f"{tally.kills.total()} ({where})", f"{len(runs)} methods", untried)
    sheet.add("resumed runs", str(tally.identical + len(tally.losses)), f"{tally.identical} identical", tally.losses)


def _bench(sheet: Sheet, plan: Plan, folder: Path) -> None:
    if plan.bench_kills:
        tally = kill_bench(folder / "bench", plan.bench_kills, seed=plan.seed, seconds=plan.seconds)
        tried = f"{tally.identical + len(tally.losses)} ({tally.kills.total()} kills)"
        sheet.add("resumed benches", tried, f"{tally.identical} identical", tally.losses)


def _races(sheet: Sheet, plan: Plan, folder: Path) -> None:
    outcome = two_at_once(folder / "races", plan.races, plan.seed)
    tried = ", ".join(f"{count} {name}" for name, count in outcome.tried.items())
    tried = f"{outcome.tried.total()} ({tried}; one of the two killed in {outcome.killed})"
    sheet.add("two processes at once", tried, f"{outcome.good} good files", outcome.losses)


def _files(sheet: Sheet, plan: Plan, folder: Path) -> None:
    outcome = alone(try_files, folder / "files", plan.files, plan.seed)
    if isinstance(outcome, str):
        sheet.add("corrupted files", "", "", [f"the process that reads them died: {outcome}"])
    else:
        result = f"{outcome.refused} refused, {outcome.harmless} harmless, {len(outcome.crashes)} crashed"
        tried = ", ".join(f"{count} {kind}" for kind, count in outcome.tried.items())
        sheet.add("corrupted files", f"{outcome.tried.total()} ({tried})", result, outcome.crashes)
    found = alone(_refused_bombs, folder / "bombs")
    losses = [found] if isinstance(found, str) else [f"{name} was not refused: {how}" for name, how in found if how]
    sheet.add("decompression bombs", str(len(found)), f"{len(found) - len(losses)} refused", losses)


def _refused_bombs(folder: Path) -> list[tuple[str, str]]:
    results = []
    for name, read in bombs(folder).items():
        try:
            read()
            results.append((name, "it was read"))
        except BoovaeError:
            results.append((name, ""))
        except Exception as error:
            results.append((name, f"{type(error).__name__}: {error}"))
    return results


def _bad_input(sheet: Sheet, plan: Plan, folder: Path) -> None:
    losses, as_documented = [], Counter[bool]()
    for number, (name, expected) in enumerate(documented().items()):
        problem = try_bad_input(CASES[name], expected, folder / "input" / str(number))
        losses += [f"{name}: {problem}"] if problem else []
        as_documented[expected.refused] += not problem
    result = f"{as_documented[True]} clear errors, {as_documented[False]} taken as documented"
    sheet.add("bad inputs", str(len(documented())), result, losses)


def _requests(sheet: Sheet, plan: Plan, folder: Path) -> None:
    settings = resolve({"method": "boo+distill"}, common=SETTINGS)
    run = train(settings, load_stream("digits", limit=SETTINGS["limit"]), folder / "served", metrics=("nll",))
    try:
        tried, statuses, failures = fuzz_server(run, plan.requests, plan.seed, plan.device)
    except InputError as error:  # a package is missing
        sheet.add("fuzzed requests", "none", "not tried", [f"fuzzed requests: {error}; --only leaves a part out"])
        return
    answers = ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))
    sheet.add("fuzzed requests", f"{tried:,} ({answers})", f"{len(failures)} failures", failures)


def _long_runs(sheet: Sheet, plan: Plan, folder: Path) -> None:
    for method in plan.soaked:
        result: Soak | str = alone(soak, method, plan.tasks, plan.device, plan.compile, plan.seconds)
        if isinstance(result, str):
            sheet.add(f"{method}", f"{plan.tasks} tasks", "", [f"{method}: the process died: {result}"])
            continue
        growth = f"leak {result.leak / 1024:+.1f} KiB per task, {result.resident[-1] / 2**20:,.0f} MiB in the end"
        if plan.device != "cpu":
            on_gpu = f"{result.device_leak / 1024:+.1f} KiB per task, {result.device[-1] / 2**20:,.1f} MiB in the end"
            growth += f"; on the GPU {on_gpu}"
        pace = f"the last tasks took {result.growth:.1f} times as long as the first"
        losses = [result.problem] if result.problem else []
        sheet.add(f"{method}, tasks in sequence", str(result.tasks), f"{growth}; {pace}", losses)


PARTS: dict[str, Callable[[Sheet, Plan, Path], None]] = {
    "kills": _kills,
    "bench": _bench,
    "races": _races,
    "files": _files,
    "input": _bad_input,
    "requests": _requests,
    "soak": _long_runs,
}


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a separate process and return its result; if the process dies, its exit code as text."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return f"exit code {process.exitcode}"
    finally:
        process.join()


def _answer(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    sender.send(function(*arguments))


def planned(words: Sequence[str] | None = None) -> tuple[Plan, argparse.Namespace]:
    """Return the plan that the command line asks for, and its arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--reduced", action="store_true", help="what continuous integration runs: about a minute")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=(), help="parts to run; all if not given")
    parser.add_argument("--runs", nargs="+", choices=RUNS, help="which runs to kill")
    parser.add_argument("--soaked", nargs="+", choices=SOAKED, help="methods that learn many tasks in sequence")
    for name, help in {
        "kills": "of training runs, in total",
        "bench-kills": "of the bench",
        "races": "of two processes, for each thing they compete for",
        "files": "of each kind",
        "requests": "to the server",
        "tasks": "in sequence",
    }.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=help)
    parser.add_argument("--seconds", type=float, help="after this time, no run is killed and no soak starts a task")
    parser.add_argument("--device", help="cpu or cuda, for the runs that are killed, served and soaked")
    parser.add_argument("--compile", choices=("auto", "on", "off"), help="compile the training step of kills and soak")
    parser.add_argument("--seed", type=int, help="of the kills and of the damage")
    parser.add_argument("--keep", type=Path, help="a new folder for all files; a temporary one if not given")
    arguments = parser.parse_args(words)
    plan = REDUCED if arguments.reduced else FULL
    changes = {name: value for name, value in vars(arguments).items() if hasattr(plan, name) and value is not None}
    changes |= {name: tuple(changes[name]) for name in ("runs", "soaked") if name in changes}
    return replace(plan, **changes), arguments


def main() -> None:
    """Run the drill and print its table."""
    plan, arguments = planned()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        sheet = drill(plan, Path(temporary) if arguments.keep is None else arguments.keep, arguments.only)
    print_rows(("what", "tried", "result"), sheet.rows)
    seconds = time.monotonic() - began
    where = f"on {plan.device}, seed {plan.seed}, commit {source_commit()}"
    print(f"{len(sheet.losses)} losses in {seconds:.0f} s {where}")
    for loss in sheet.losses:
        print(loss)
    raise SystemExit(1 if sheet.losses else 0)


if __name__ == "__main__":
    main()
