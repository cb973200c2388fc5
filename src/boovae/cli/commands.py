"""The commands, one function per verb. Nothing heavy is imported before a verb runs: `--help` answers at once."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boovae.cli import arguments as kinds
from boovae.cli.arguments import command_line
from boovae.cli.terminal import Rows, grouped, print_components, print_rows, print_table, spread
from boovae.config import Section, Settings, folder_name
from boovae.errors import InputError, RunError

if TYPE_CHECKING:
    from boovae.metrics.evaluation import Evaluation
    from boovae.report.run_record import RunRecord
    from boovae.runs.progress import Display
    from boovae.runs.run import Run
    from boovae.training.trainer import Trainer


def train(arguments: kinds.Train, settings: Settings) -> None:
    """Train, resume, evaluate, report."""
    from boovae.runs.data import load_data
    from boovae.runs.train import train as run_train

    if arguments.detect_tasks:
        from boovae.estimator.detection import with_found_borders

        resumed = arguments.out if arguments.resume != "never" else None
        settings = _called(with_found_borders, arguments, settings, resumed, first=arguments.detect_first)
    stream = load_data(settings, arguments.data_dir)
    out = arguments.out or Path("runs") / folder_name(settings)
    with _display(quiet=arguments.quiet) as display:
        _called(run_train, arguments, settings, stream, out=out, metrics=arguments.metric, display=display)
    _conclude(out, arguments)


def extend(arguments: kinds.Extend) -> None:
    """Learn one more task, evaluate, report."""
    from boovae.runs.extend import extend as run_extend

    with _display(quiet=arguments.quiet) as display:
        _called(run_extend, arguments, arguments.run, metrics=arguments.metric, display=display)
    _conclude(arguments.run, arguments)


def tune(arguments: kinds.Tune, settings: Settings) -> None:
    """Choose a setting on validation data."""
    from boovae.replicas.devices import choose_device
    from boovae.runs.data import load_data
    from boovae.runs.tune import best, edge, read_recipe, search, write_recipe

    read_recipe(arguments.recipe)  # one that cannot take the winner is refused before anything is trained
    if settings.training.replicas != Settings().training.replicas:
        print("tune ignores --replicas: --seeds-each is the number of seeds of every value", file=sys.stderr)
    seeds, device = arguments.seeds_each, choose_device(arguments.device)
    with _display(quiet=arguments.json) as display:
        stream = load_data(settings, arguments.data_dir)
        trials = _called(search, arguments, settings, stream, seeds=seeds, device=device, display=display)
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


def measure(arguments: kinds.Eval) -> None:
    """Evaluate a model again."""
    from boovae.runs.evaluate import evaluate_run

    with _display(quiet=arguments.quiet) as display:
        evaluation = _called(evaluate_run, arguments, arguments.run, metrics=arguments.metric, display=display)
    _print_numbers([evaluation], as_json=arguments.json)


def sample(arguments: kinds.Sample) -> None:
    """Sample images."""
    from boovae.runs.train import SAMPLE_FILES, save_samples

    if arguments.out.suffix not in SAMPLE_FILES:
        raise InputError(f"{{out}} {arguments.out}: samples are written as a picture (.png) or an array (.npy)")
    with _opened(arguments, arguments.device, arguments.task) as (_, trainer, task):
        save_samples(trainer, arguments.out, task, arguments.n, arguments.replica, arguments.seed)
    print(arguments.out)


def inspect(arguments: kinds.Inspect) -> None:
    """Show the components; drop some if asked to."""
    from boovae.runs.inspection import components, prune_run, require_components, save_gallery, task_names

    with _opened(arguments, arguments.device, arguments.task) as (run, trainer, task):
        require_components(trainer)
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
        from boovae.runs.reading import read_record

        _report(arguments.run, read_record(arguments.run), quiet=False)


def export(arguments: kinds.Export) -> None:
    """Export the model."""
    from boovae.runs.export import export as write
    from boovae.runs.folder import RunFolder

    folder = arguments.out or RunFolder(arguments.run).export(arguments.format)
    with _opened(arguments, "cpu", arguments.task) as (run, trainer, task):
        paths = write(trainer, run.head(), folder, arguments.format, replica=arguments.replica, task=task)
    for path in paths:
        print(path)


def report(arguments: kinds.Report) -> None:
    """Write the report."""
    from boovae.report.matrices import write_csv
    from boovae.runs.reading import read_record

    if not arguments.runs:
        raise InputError("name at least one run folder: boovae report RUN")
    if arguments.csv is not None and len(arguments.runs) > 1:
        raise InputError("{csv} takes the numbers of one run; name one run folder")
    records = [read_record(folder) for folder in arguments.runs]
    print(write_page(records, arguments.runs, arguments.out))
    if arguments.csv is not None:
        print(write_csv(records[0], arguments.csv))


def write_page(records: Sequence[RunRecord], folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write a report about one run or several, with warnings and the paper's numbers.

    The report of one run goes into its folder unless `out` names another file.
    """
    from boovae.bench.published import for_reports
    from boovae.report.page import write_report
    from boovae.runs.folder import RunFolder
    from boovae.runs.warnings import find_warnings

    if out is None and len(folders) > 1:
        raise InputError("a report about several runs needs a file to write to: {out=compare.html}")
    out = out or RunFolder(folders[0]).report
    warnings = [[warning.text for warning in find_warnings(record)] for record in records]
    return write_report(records, out, warnings=warnings, published=for_reports())


def serve(arguments: kinds.Serve) -> None:
    """Serve the page; the run folder is unlocked once the model is in memory."""
    try:
        from boovae.serve.app import serve as run_server
        from boovae.serve.play import Player
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed: pip install 'boovae[serve]'") from None
    with _opened(arguments, arguments.device) as (run, trainer, _):
        player = Player(run, trainer, arguments.replica, arguments.samples)
    run_server(player, arguments.host, arguments.port)


def datasets(arguments: kinds.Datasets) -> None:
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


def methods(arguments: kinds.Methods) -> None:
    """List the methods."""
    from boovae.methods import METHODS, import_outside

    import_outside()
    print_rows(("method", "what it does"), [(name, method.summary) for name, method in METHODS.items()])


def bench(arguments: kinds.Bench) -> None:
    """Run a study and write its tables and figures."""
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


def toy(arguments: kinds.Toy) -> None:
    """Boost mixtures on two-dimensional densities."""
    from boovae.experiments.toy import run

    rows = _called(run, arguments, options=arguments)
    last = {row["target"]: row["components"] for row in rows}
    shown = [row for row in rows if row["components"] in (1, last[row["target"]])]
    numbers = {"kl_target_mixture": "KL to the mixture", "kl_mixture_target": "KL from the mixture"}
    _show_experiment(arguments, rows, shown, ("target", "objective", "components"), numbers, "toy.png")


def latent_map(arguments: kinds.LatentMap, settings: Settings) -> None:
    """Draw priors and aggregated posteriors."""
    from boovae.experiments.latent_map import run

    rows = _called(run, arguments, settings)
    _show_experiment(arguments, rows, rows, ("method", "tasks_seen"), {"kl": "KL to the prior"}, "latent_map.png")


def replay(arguments: kinds.Replay, settings: Settings) -> None:
    """Train classifiers on generated images."""
    from boovae.experiments.replay_classifier import run

    rows = _called(run, arguments, settings, options=arguments)
    seen = max(row["tasks_seen"] for row in rows)
    last = [row for row in rows if row["tasks_seen"] == seen]
    numbers = {"task_incremental": "task-incremental", "class_incremental": "class-incremental"}
    _show_experiment(arguments, rows, last, ("curve", "tasks_seen"), numbers, "replay.png", digits=4)


# --- shared by several commands -------------------------------------------------------------------------------------


def _called(function: Callable[..., Any], arguments: Section, *given: Any, **named: Any) -> Any:
    """Call a function with `given`, `named` and the command's arguments whose names it has as parameters.

    A new flag is declared and used under the same name, and passed on here.
    """
    offered = vars(arguments) | {"command": command_line()}
    takes = list(signature(function).parameters)[len(given) :]
    return function(*given, **{name: value for name, value in offered.items() if name in takes} | named)


@contextmanager
def _display(*, quiet: bool) -> Iterator[Display]:
    """Show progress; restore the screen however the work ends."""
    from boovae.runs.progress import make_display

    with closing(make_display(quiet=quiet)) as display:
        yield display


@contextmanager
def _opened(
    arguments: kinds.OfReplica, device: str, task: str | None = None
) -> Iterator[tuple[Run, Trainer, int | None]]:
    """Open a run with its model, and find the number of the task, if one was named."""
    from boovae.runs.train import load_trainer

    run, trainer = load_trainer(arguments.run, device)
    with run:
        last = len(trainer.replicas) - 1
        if arguments.replica > last:
            raise InputError(f"{{replica}} is {arguments.replica}; this run has replicas 0 to {last}")
        yield run, trainer, None if task is None else _task_number(run, trainer, task)


def _task_number(run: Run, trainer: Trainer, task: str) -> int:
    """Return the number of a task given by name or number; refuse one that the run does not have."""
    from boovae.runs.inspection import task_names

    names = {number: name for number, name in task_names(run).items() if number < trainer.tasks_done}
    found = [number for number, name in names.items() if task in (str(number), name)]
    if not found:
        listed = ", ".join(f"{number} “{name}”" for number, name in names.items())
        raise InputError(f"{{task}} is {task}; this run has learned tasks 0 to {trainer.tasks_done - 1}: {listed}")
    return int(task) if task.isdecimal() and int(task) in found else found[-1]


def _show_experiment(
    arguments: Any, rows: Rows, shown: Rows, keys: Sequence[str], numbers: dict[str, str], figure: str, digits: int = 3
) -> None:
    """Print all rows as JSON, or some as a table: `keys` name a row, `numbers` are titles by name."""
    if arguments.json:
        print(json.dumps(rows))
        return
    titles = [*(key.replace("_", " ") for key in keys), *numbers.values()]
    print_rows(titles, grouped(shown, keys, list(numbers), digits=digits))
    print(f"figure: {arguments.out / figure}", file=sys.stderr)


def _print_numbers(evaluations: Sequence[Evaluation], *, as_json: bool) -> None:
    """Print the last evaluation as JSON, or all of them as a table."""
    from boovae.metrics.schema import to_json

    if as_json:
        print(json.dumps(to_json(evaluations[-1])), flush=True)
    else:
        print_table(evaluations)


def _conclude(folder: Path, arguments: kinds.Train | kinds.Extend) -> None:
    """Print the results and warnings of a run, and write its report."""
    from boovae.runs.reading import read_record
    from boovae.runs.warnings import find_warnings

    record = read_record(folder)
    try:
        _print_numbers(record.evaluations, as_json=arguments.json)
        if not arguments.quiet:
            for warning in find_warnings(record):  # to read with the numbers
                print(f"warning: {warning.text}", file=sys.stderr)
    finally:  # also if the reader of stdout has gone
        _report(folder, record, quiet=arguments.quiet)


def _report(folder: Path, record: RunRecord, *, quiet: bool) -> None:
    try:
        said = f"report: {write_page([record], [folder])}"
    except ModuleNotFoundError as error:  # the run is complete; a training machine may lack the report's packages
        quiet, said = False, f"no report: {error.name} is not installed here; elsewhere: boovae report {folder}"
    if not quiet:
        print(said, file=sys.stderr)
