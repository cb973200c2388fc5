"""The commands, one function per verb. Nothing heavy is imported before a verb runs: `--help` answers at once."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from boovae.cli.arguments import (
    Bench,
    Datasets,
    Eval,
    Export,
    Extend,
    Inspect,
    LatentMap,
    Methods,
    Replay,
    Report,
    Sample,
    Serve,
    Toy,
    Train,
    Tune,
    command_line,
)
from boovae.cli.terminal import grouped, print_components, print_rows, print_table, spread
from boovae.config import Settings, folder_name
from boovae.errors import InputError, RunError

if TYPE_CHECKING:
    from boovae.report.record import RunRecord
    from boovae.runs.run import Run
    from boovae.training.trainer import Trainer


def train(arguments: Train, settings: Settings) -> None:
    """Train, resume, evaluate, report."""
    from boovae.runs.data import load_data
    from boovae.runs.progress import make_display
    from boovae.runs.train import train as run_train

    if arguments.detect_tasks:
        from boovae.estimator.detection import detected

        settings = detected(
            settings,
            arguments.out if arguments.resume != "never" else None,
            data_dir=arguments.data_dir,
            device=arguments.device,
            first=arguments.detect_first,
            quiet=arguments.quiet,
        )
    stream = load_data(settings, arguments.data_dir)
    out = arguments.out or Path("runs") / folder_name(settings)
    run_train(
        settings,
        stream,
        out,
        device=arguments.device,
        compile=arguments.compile,
        resume=arguments.resume,
        metrics=arguments.metric,
        log=arguments.log,
        features=arguments.features,
        data_dir=arguments.data_dir,
        display=make_display(quiet=arguments.quiet),
        command=command_line(),
    )
    _conclude(out, arguments)


def extend(arguments: Extend) -> None:
    """Learn one more task, evaluate, report."""
    from boovae.runs.extend import extend as run_extend
    from boovae.runs.progress import make_display

    run_extend(
        arguments.run,
        arguments.data,
        name=arguments.name,
        data_dir=arguments.data_dir,
        device=arguments.device,
        compile=arguments.compile,
        metrics=arguments.metric,
        log=arguments.log,
        features=arguments.features,
        display=make_display(quiet=arguments.quiet),
        command=command_line(),
    )
    _conclude(arguments.run, arguments)


def tune(arguments: Tune, settings: Settings) -> None:
    """Choose a setting on validation data."""
    from boovae.replicas.devices import choose_device
    from boovae.runs.data import load_data
    from boovae.runs.progress import make_display
    from boovae.runs.tune import best, edge, read_recipe, search, write_recipe

    read_recipe(arguments.recipe)  # one that cannot take the winner is refused before anything is trained
    if settings.training.replicas != Settings().training.replicas:
        print("--replicas has no say in tune: --seeds-each is how many seeds every value has", file=sys.stderr)
    with closing(make_display(quiet=arguments.json)) as display:
        trials = search(
            settings,
            load_data(settings, arguments.data_dir),
            arguments.setting,
            arguments.values,
            seeds=arguments.seeds_each,
            device=choose_device(arguments.device),
            compile=arguments.compile,
            display=display,
        )
    winner = best(trials)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(trial) for trial in trials]))
    else:
        rows = [(f"{trial.value:g}", spread(trial.nll), "best" if trial is winner else "") for trial in trials]
        print_rows((winner.setting, "NLL on validation images", ""), rows)
    if warning := edge(trials, winner):
        print(warning, file=sys.stderr)
    if arguments.recipe is not None:
        write_recipe(arguments.recipe, settings.method, winner)


def evaluate(arguments: Eval) -> None:
    """Measure a model again."""
    from boovae.metrics.evaluation import evaluation_event
    from boovae.metrics.features import check_names
    from boovae.metrics.measure import SampleNetworks, sample_networks
    from boovae.metrics.measure import evaluate as measure
    from boovae.metrics.metric import check_metrics
    from boovae.runs.data import learned_images
    from boovae.runs.progress import make_display
    from boovae.runs.train import load_trainer

    check_names(arguments.features)
    check_metrics(arguments.metric)
    display = make_display(quiet=arguments.quiet)
    run, trainer = load_trainer(arguments.run, arguments.device, display)
    with run:
        past = learned_images(run.settings, run.head(), run.events("extend"), arguments.data_dir)
        tasks = past.tasks[: trainer.tasks_done]
        if not any(tasks):
            why = "; ".join(dict.fromkeys(past.missing.values())) or "no task is finished yet"
            raise InputError(f"no image that {arguments.run} has learned is at hand: {why}")
        changed = {name: value for name in ("samples", "generated") if (value := getattr(arguments, name)) is not None}
        trainer.settings = trainer.settings.changed(**changed)
        if past.missing:
            display.note(past.explain())
        networks = SampleNetworks()
        if past.stream is not None:
            options = (arguments.metric, display.note, arguments.features, arguments.data_dir)
            networks = sample_networks(past.stream, trainer, *options)
        evaluation = measure(
            trainer,
            tasks,
            networks.classifier,
            run.evaluations[: trainer.tasks_done - 1],
            metrics=arguments.metric,
            references=networks.references,
            progress=display.evaluating,
        )
    if arguments.json:
        print(json.dumps(evaluation_event(evaluation)))
    else:
        print_table([evaluation])


def sample(arguments: Sample) -> None:
    """Draw images."""
    from boovae.runs.train import SAMPLE_FILES, load_trainer, save_samples

    if arguments.out.suffix not in SAMPLE_FILES:
        raise InputError(f"{{out}} {arguments.out}: samples become a picture (name it .png) or an array (.npy)")
    run, trainer = load_trainer(arguments.run, arguments.device)
    with run:
        if arguments.n < 1:
            raise InputError(f"{{n}} is {arguments.n}; it must be at least 1")
        task = _chosen(run, trainer, arguments.task, arguments.replica)
        save_samples(trainer, arguments.out, task, arguments.n, arguments.replica, arguments.seed)
    print(arguments.out)


def inspect(arguments: Inspect) -> None:
    """Show the components; drop some if asked to."""
    from boovae.runs.inspection import components, prune_run, require_components, save_gallery, task_names
    from boovae.runs.train import load_trainer

    run, trainer = load_trainer(arguments.run, arguments.device)
    with run:
        require_components(trainer)
        task = _chosen(run, trainer, arguments.task, arguments.replica)
        tasks = range(trainer.tasks_done) if task is None else [task]
        events = [] if arguments.prune is None else prune_run(run, trainer, arguments.prune, tasks)
        found = [component for component in components(trainer, arguments.replica) if component.task in tasks]
        names = task_names(run)
        save_gallery(arguments.out, found, trainer, names)
    if arguments.json:
        listed = [component.numbers(names) for component in found]
        print(json.dumps({"replica": arguments.replica, "components": listed, "pruned": events}))
    else:
        print_components(found, names)
    print(f"gallery: {arguments.out}", file=sys.stderr)
    if arguments.prune is not None:
        print(f"pruned: {sum(sum(event['dropped']) for event in events)} components, all replicas", file=sys.stderr)
    if events:
        from boovae.runs.record import read_record

        _report(arguments.run, read_record(arguments.run), quiet=False)


def export(arguments: Export) -> None:
    """Write the model for elsewhere."""
    from boovae.runs.export import export as write
    from boovae.runs.train import load_trainer

    run, trainer = load_trainer(arguments.run, "cpu")
    with run:
        task = _chosen(run, trainer, arguments.task, arguments.replica)
        folder = arguments.out or run.files.export(arguments.format)
        paths = write(trainer, run.head(), folder, arguments.format, replica=arguments.replica, task=task)
    for path in paths:
        print(path)


def report(arguments: Report) -> None:
    """Write the page."""
    from boovae.report import write_csv
    from boovae.runs.record import read_record

    if not arguments.runs:
        raise InputError("name at least one run folder: boovae report RUN")
    if arguments.csv is not None and len(arguments.runs) > 1:
        raise InputError("{csv} takes the numbers of one run; name one run folder")
    records = [read_record(folder) for folder in arguments.runs]
    print(write_page(records, arguments.runs, arguments.out))
    if arguments.csv is not None:
        print(write_csv(records[0], arguments.csv))


def write_page(records: Sequence[RunRecord], folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page about one run or several, with what to know before reading them and the paper's numbers.

    That of one run goes into its folder unless `out` says otherwise.
    """
    from boovae.bench.published import for_reports
    from boovae.report import write_report
    from boovae.runs.folder import RunFolder
    from boovae.runs.warnings import find_warnings

    if out is None and len(folders) > 1:
        raise InputError("several runs need a file to write to: {out=compare.html}")
    out = out or RunFolder(folders[0]).report
    warnings = [[warning.text for warning in find_warnings(record)] for record in records]
    return write_report(records, out, warnings=warnings, published=for_reports())


def serve(arguments: Serve) -> None:
    """Open the page; the run folder is free again once the model is in memory."""
    from boovae.serve import require_server
    from boovae.serve import serve as run_server

    require_server()
    from boovae.runs.train import load_trainer
    from boovae.serve.play import Player

    run, trainer = load_trainer(arguments.run, arguments.device)
    with run:
        _chosen(run, trainer, None, arguments.replica)
        player = Player(run, trainer, arguments.replica, arguments.samples)
    run_server(player, arguments.host, arguments.port)


def datasets(arguments: Datasets) -> None:
    """List the datasets."""
    from boovae.data import DATASETS, PATH_FORMS, pack_dataset

    if arguments.pack is not None:
        print(pack_dataset(arguments.pack, arguments.out, arguments.data_dir))
        return
    rows = []
    for name, info in DATASETS.items():
        here = str(info.where(arguments.data_dir)) if info.is_present(arguments.data_dir) else "not here"
        rows.append((name, info.description, info.licence, "embedded" if info.embedded else here))
    rows += [(name, text, "", "yours") for name, text in PATH_FORMS.items()]
    print_rows(("dataset", "what", "licence", "on this disk"), rows)


def methods(arguments: Methods) -> None:
    """List the methods."""
    from boovae.methods import METHODS, import_outside

    import_outside()
    print_rows(("method", "what it does"), [(name, method.summary) for name, method in METHODS.items()])


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

    rows = run(arguments.out, arguments, device=arguments.device, command=command_line())
    if arguments.json:
        print(json.dumps(rows))
        return
    head = ("target", "objective", "components", "KL to the mixture", "KL from the mixture")
    last = {row["target"]: row["components"] for row in rows}
    shown = [row for row in rows if row["components"] in (1, last[row["target"]])]
    print_rows(head, grouped(shown, head[:3], ("kl_target_mixture", "kl_mixture_target"), digits=3))
    print(f"figure: {arguments.out / 'toy.png'}", file=sys.stderr)


def latent_map(arguments: LatentMap, settings: Settings) -> None:
    """Draw priors and aggregated posteriors."""
    from boovae.experiments.latent_map import run

    rows = run(
        settings,
        arguments.out,
        data_dir=arguments.data_dir,
        device=arguments.device,
        compile=arguments.compile,
        quiet=arguments.quiet,
        command=command_line(),
    )
    if arguments.json:
        print(json.dumps(rows))
        return
    print_rows(("method", "tasks seen", "KL to the prior"), grouped(rows, ("method", "tasks_seen"), ("kl",), digits=3))
    print(f"figure: {arguments.out / 'latent_map.png'}", file=sys.stderr)


def replay(arguments: Replay, settings: Settings) -> None:
    """Teach classifiers with generated images."""
    from boovae.experiments.replay import run

    rows = run(
        settings,
        arguments.out,
        arguments,
        data_dir=arguments.data_dir,
        device=arguments.device,
        compile=arguments.compile,
        quiet=arguments.quiet,
        command=command_line(),
    )
    if arguments.json:
        print(json.dumps(rows))
        return
    head = ("curve", "tasks seen", "task-incremental", "class-incremental")
    seen = max(row["tasks_seen"] for row in rows)
    last = [row for row in rows if row["tasks_seen"] == seen]
    values = ("task_incremental", "class_incremental")
    print_rows(head, grouped(last, ("curve", "tasks_seen"), values, digits=4))
    print(f"figure: {arguments.out / 'replay.png'}", file=sys.stderr)


def _chosen(run: Run, trainer: Trainer, task: str | None, replica: int) -> int | None:
    """Return the number of the task that is meant; refuse a task or a replica that the run does not have."""
    from boovae.runs.inspection import task_names

    if not 0 <= replica < len(trainer.replicas):
        raise InputError(f"{{replica}} is {replica}; this run has replicas 0 to {len(trainer.replicas) - 1}")
    if task is None:
        return None
    names = {number: name for number, name in task_names(run).items() if number < trainer.tasks_done}
    found = [number for number, name in names.items() if task in (str(number), name)]
    if not found:
        listed = ", ".join(f"{number} “{name}”" for number, name in names.items())
        raise InputError(f"{{task}} is {task}; this run has learned tasks 0 to {trainer.tasks_done - 1}: {listed}")
    return int(task) if task.isdecimal() and int(task) in found else found[-1]


def _conclude(folder: Path, arguments: Train | Extend) -> None:
    """Print what a run has come to, and write its report."""
    from boovae.metrics.evaluation import evaluation_event
    from boovae.runs.record import read_record
    from boovae.runs.warnings import find_warnings

    record = read_record(folder)
    try:
        if arguments.json:
            print(json.dumps(evaluation_event(record.evaluations[-1])), flush=True)
        else:
            print_table(record.evaluations)
        if not arguments.quiet:
            for warning in find_warnings(record):  # what to know before reading the numbers, and what helps
                print(f"warning: {warning.text}", file=sys.stderr)
    finally:  # whether or not anybody reads the numbers
        _report(folder, record, quiet=arguments.quiet)


def _report(folder: Path, record: RunRecord, *, quiet: bool) -> None:
    try:
        said = f"report: {write_page([record], [folder])}"
    except ModuleNotFoundError as error:  # the run is whole; a machine that trains may lack what pages are made with
        quiet, said = False, f"no report: {error.name} is not installed here; elsewhere: boovae report {folder}"
    if not quiet:
        print(said, file=sys.stderr)
