"""The command line: one function per verb. Nothing heavy is imported before a verb runs: `--help` answers at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

import boovae
from boovae.config import Settings, resolve, to_toml
from boovae.errors import BoovaeError, InputError, RunError, unknown_name

if TYPE_CHECKING:
    from boovae.inspect import Component
    from boovae.training.trainer import Trainer

Device = Annotated[str, tyro.conf.arg(metavar="auto|cpu|cuda")]


@dataclass(frozen=True)
class Train(Settings):
    """Learn the tasks of a dataset one after another; writes a run folder with a report."""

    out: Path | None = None
    """Run folder; runs/DATASET-METHOD-HASH if not given."""
    config: Path | None = None
    """TOML file with settings; flags win over it."""
    preset: Literal["paper"] | None = None
    """Settings that reproduce the paper's; the file and flags win over it."""
    data_dir: Path | None = None
    """Where the datasets lie; else BOOVAE_DATA, then the cache."""
    resume: Literal["auto", "always", "never"] = "auto"
    """Continue a run that was stopped: if there is one, in any case, or never."""
    device: Device = "auto"
    """Where to train."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training step (torch.compile): faster steps after some ten seconds."""
    metric: tuple[Literal["nll", "diversity", "frechet"], ...] = ("nll", "diversity", "frechet")
    """What to measure after each task."""
    quiet: bool = False
    """Show nothing but the result."""
    json: bool = False
    """Print the last evaluation as JSON."""


@dataclass(frozen=True)
class Extend:
    """Learn one more task from a run's checkpoint alone; the old data need not be there."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    data: str | None = None
    """Images of the new task: folder:PATH, npz:PATH or a dataset; if not given, the next task of the run's own."""
    name: str | None = None
    """What to call the task; as its file, folder or dataset if not given."""
    data_dir: Path | None = None
    """Where the datasets lie; else BOOVAE_DATA, then the cache."""
    device: Device = "auto"
    """Where to train."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training step (torch.compile); auto: as the run was trained."""
    metric: tuple[Literal["nll", "diversity", "frechet"], ...] = ("nll", "diversity", "frechet")
    """What to measure after the task."""
    quiet: bool = False
    """Show nothing but the result."""
    json: bool = False
    """Print the last evaluation as JSON."""


@dataclass(frozen=True)
class Eval:
    """Measure a run's model again, for example with more samples."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    samples: int | None = None
    """Importance samples per test image; as in training if not given."""
    generated: int | None = None
    """Generated images for diversity and Fréchet distance; as in training if not given."""
    metric: tuple[Literal["nll", "diversity", "frechet"], ...] = ("nll", "diversity", "frechet")
    """What to measure."""
    data_dir: Path | None = None
    """Where the datasets lie; else BOOVAE_DATA, then the cache."""
    device: Device = "auto"
    """Where to compute."""
    quiet: bool = False
    """Show nothing but the result."""
    json: bool = False
    """Print the evaluation as JSON."""


@dataclass(frozen=True)
class Sample:
    """Draw images from a run's model into a PNG file."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    out: Path = Path("samples.png")
    """The picture to write."""
    n: int = 64
    """How many images."""
    task: int | None = None
    """Only from this task's part of the prior (counting from 0)."""
    replica: int = 0
    """Which replica draws."""
    device: Device = "auto"
    """Where to compute."""


@dataclass(frozen=True)
class Inspect:
    """Show every stored component of a run: its pictures, its weight, and what dropping it would cost."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    out: Path = Path("components.png")
    """The picture to write: a row of pseudo-inputs per task, beneath it what the decoder makes of them."""
    replica: int = 0
    """Which replica to look at."""
    task: int | None = None
    """Only the components of this task (counting from 0)."""
    prune: float | None = None
    """Drop components that cost less than this many nats to drop, in all replicas, and keep the run without them."""
    device: Device = "auto"
    """Where to compute."""
    json: bool = False
    """Print the numbers as JSON."""


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about one run, or about several side by side."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    out: Path | None = None
    """The page to write; RUN/report.html if not given (one run)."""
    csv: Path | None = None
    """Also write the numbers of a run, every seed, task and metric, to this file."""


@dataclass(frozen=True)
class Datasets:
    """List the datasets: what they are, where they come from, whether they are on this disk."""

    data_dir: Path | None = None
    """Where the datasets lie; else BOOVAE_DATA, then the cache."""


@dataclass(frozen=True)
class Methods:
    """List the continual-learning methods."""


def train(arguments: Train) -> None:
    """Train, resume, evaluate, report."""
    from boovae.progress import make_display
    from boovae.recall import load_data
    from boovae.run import train as run_train

    settings = _settings(arguments)
    stream = load_data(settings, arguments.data_dir)
    out = arguments.out or _default_folder(settings)
    run_train(
        settings,
        stream,
        out,
        device=arguments.device,
        compile=arguments.compile,
        resume=arguments.resume,
        metrics=arguments.metric,
        display=make_display(quiet=arguments.quiet),
        command=_command(),
    )
    _conclude(out, arguments)


def extend(arguments: Extend) -> None:
    """Learn one more task, evaluate, report."""
    from boovae.extend import extend as run_extend
    from boovae.progress import make_display

    run_extend(
        arguments.run,
        arguments.data,
        name=arguments.name,
        data_dir=arguments.data_dir,
        device=arguments.device,
        compile=arguments.compile,
        metrics=arguments.metric,
        display=make_display(quiet=arguments.quiet),
        command=_command(),
    )
    _conclude(arguments.run, arguments)


def evaluate(arguments: Eval) -> None:
    """Measure a model again."""
    from boovae.metrics.evaluation import evaluate as measure
    from boovae.progress import make_display
    from boovae.recall import recall
    from boovae.run import judge, load_trainer

    display = make_display(quiet=arguments.quiet)
    run, trainer = load_trainer(arguments.run, arguments.device, display)
    with run:
        past = recall(run.settings, run.events("run")[0], run.events("extend"), arguments.data_dir)
        tasks = past.tasks[: trainer.tasks_done]
        if not any(tasks):
            raise InputError(
                f"no image that {arguments.run} has learned is at hand: {'; '.join(past.missing.values())}"
            )
        changed = {name: getattr(arguments, name) for name in ("samples", "generated") if getattr(arguments, name)}
        trainer.settings = dataclasses.replace(trainer.settings, **changed)
        if past.missing:
            display.note(past.explain())
        classifier = None if past.stream is None else judge(past.stream, trainer, arguments.metric, display)
        history = run.events("evaluation")[: trainer.tasks_done - 1]
        event = measure(trainer, tasks, classifier, history, metrics=arguments.metric, progress=display.evaluating)
    if arguments.json:
        print(json.dumps(event))
    else:
        _print_table([event])


def sample(arguments: Sample) -> None:
    """Draw images."""
    from boovae.run import load_trainer, save_samples

    run, trainer = load_trainer(arguments.run, arguments.device)
    with run:
        if arguments.n < 1:
            raise InputError(f"--n is {arguments.n}; it must be at least 1")
        _check_choice(trainer, arguments.task, arguments.replica)
        save_samples(trainer, arguments.out, arguments.task, arguments.n, arguments.replica)
    print(arguments.out)


def inspect(arguments: Inspect) -> None:
    """Show the components; drop some if asked to."""
    from boovae.inspect import components, prune_run, require_components, save_gallery, task_names
    from boovae.run import load_trainer

    run, trainer = load_trainer(arguments.run, arguments.device)
    with run:
        require_components(trainer)
        _check_choice(trainer, arguments.task, arguments.replica)
        tasks = range(trainer.tasks_done) if arguments.task is None else [arguments.task]
        events = [] if arguments.prune is None else prune_run(run, trainer, arguments.prune, tasks)
        found = [component for component in components(trainer, arguments.replica) if component.task in tasks]
        names = task_names(run)
        save_gallery(arguments.out, found, trainer, names)
    if arguments.json:
        listed = [component.numbers(names) for component in found]
        print(json.dumps({"replica": arguments.replica, "components": listed, "pruned": events}))
    else:
        _print_components(found, names)
    print(f"gallery: {arguments.out}", file=sys.stderr)
    if arguments.prune is not None:
        dropped = sum(sum(event["dropped"]) for event in events)
        print(f"pruned: {dropped} components, all replicas together", file=sys.stderr)
    if events:
        _report(arguments.run, quiet=False)


def report(arguments: Report) -> None:
    """Write the page."""
    from boovae.report import write_csv, write_report

    if not arguments.runs:
        raise InputError("name at least one run folder: boovae report RUN")
    print(write_report(arguments.runs, arguments.out))
    if arguments.csv is not None:
        if len(arguments.runs) > 1:
            raise InputError("--csv takes the numbers of one run; name one run folder")
        print(write_csv(arguments.runs[0], arguments.csv))


def datasets(arguments: Datasets) -> None:
    """List the datasets."""
    from boovae.data import DATASETS, PATH_FORMS

    rows = []
    for name, info in DATASETS.items():
        where = info.where(arguments.data_dir)
        present = "embedded" if not info.files else str(where) if info.is_present(arguments.data_dir) else "not here"
        rows.append((name, info.description, info.licence, present))
    rows += [(name, text, "", "yours") for name, text in PATH_FORMS.items()]
    _print_rows(("dataset", "what", "licence", "on this disk"), rows)


def methods(arguments: Methods) -> None:
    """List the methods."""
    from boovae.methods import METHODS

    _print_rows(("method", "what it does"), [(name, method.summary) for name, method in METHODS.items()])


VERBS: dict[str, tuple[Any, Any]] = {
    "train": (Train, train),
    "extend": (Extend, extend),
    "eval": (Eval, evaluate),
    "sample": (Sample, sample),
    "inspect": (Inspect, inspect),
    "report": (Report, report),
    "datasets": (Datasets, datasets),
    "methods": (Methods, methods),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `boovae`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        _print_help()
        return
    try:
        if words[0] == "--version":
            print(boovae.__version__)
            return
        if words[0] not in VERBS:
            raise unknown_name("command", words[0], VERBS)
        kind, function = VERBS[words[0]]
        function(_parsed(kind, words[0], words[1:]))
    except RunError as error:
        print(f"boovae: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except BoovaeError as error:
        print(f"boovae: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _print_help() -> None:
    print(f"usage: boovae COMMAND [--help] ...\n\n{boovae.__doc__}\n\ncommands:")
    for verb, (kind, _) in VERBS.items():
        print(f"  {verb:10} {kind.__doc__}")


def _parsed(kind: Any, verb: str, words: list[str]) -> Any:
    """Parse the words after a verb; for `train` the defaults come from the file and the dataset's recipe."""
    default = None
    if kind is Train:
        config = _value_of("--config", words)
        dataset = _value_of("--dataset", words)
        preset = _value_of("--preset", words)
        settings = resolve({"dataset": dataset} if dataset else {}, Path(config) if config else None, preset)
        default = Train(**dataclasses.asdict(settings))
    return tyro.cli(kind, prog=f"boovae {verb}", args=words, default=default)


def _value_of(name: str, words: list[str]) -> str | None:
    """Return the last value given for a flag, as `--flag value` or `--flag=value`."""
    value = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == name:
            value = following
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def _settings(arguments: Train) -> Settings:
    return Settings(**{item.name: getattr(arguments, item.name) for item in dataclasses.fields(Settings)})


def _default_folder(settings: Settings) -> Path:
    """Return a folder name that is the same for the same settings, so that the same command continues its run."""
    digest = hashlib.sha256(to_toml(settings).encode()).hexdigest()[:8]
    name = "".join(letter if letter.isalnum() or letter in "_+-" else "-" for letter in settings.dataset)
    return Path("runs") / f"{name[-40:]}-{settings.method}-{digest}"


def _check_choice(trainer: Trainer, task: int | None, replica: int) -> None:
    """Refuse a task or a replica that the run does not have."""
    if task is not None and not 0 <= task < trainer.tasks_done:
        raise InputError(f"--task is {task}; this run has learned tasks 0 to {trainer.tasks_done - 1}")
    if not 0 <= replica < len(trainer.replicas):
        raise InputError(f"--replica is {replica}; this run has replicas 0 to {len(trainer.replicas) - 1}")


def _conclude(folder: Path, arguments: Train | Extend) -> None:
    """Print what a run has come to, and write its report."""
    evaluations = _events(folder)
    if arguments.json:
        print(json.dumps(evaluations[-1]))
    else:
        _print_table(evaluations)
    _report(folder, quiet=arguments.quiet)


def _report(folder: Path, *, quiet: bool) -> None:
    from boovae.report import write_report

    page = write_report([folder])
    if not quiet:
        print(f"report: {page}", file=sys.stderr)


def _events(folder: Path) -> list[dict[str, Any]]:
    from boovae.run import Run

    with Run.open(folder) as run:
        return run.events("evaluation")


def _command() -> str:
    """Return what was typed, without the path of the program on this machine."""
    return shlex.join(["boovae", *sys.argv[1:]])


def _print_table(evaluations: Sequence[dict[str, Any]]) -> None:
    rows = [
        (
            str(event["seen"]),
            _spread(event.get("nll", {}).get("pooled")),
            _spread(event.get("diversity", {}).get("table"), digits=3),
            _spread(event.get("frechet", {}).get("pooled"), digits=1),
            _spread(_mean_forgetting(event)),
            f"{event['ledger']['memory_bytes']:,}",
        )
        for event in evaluations
    ]
    _print_rows(("tasks seen", "NLL", "diversity", "Fréchet", "forgotten", "bytes kept"), rows)
    accuracy = evaluations[-1].get("classifier", {}).get("accuracy")
    if accuracy is not None:
        print(
            f"Mean ± deviation over replicas. The classifier behind diversity and Fréchet is {accuracy:.1%} accurate."
        )


def _print_components(found: Sequence[Component], names: Mapping[int, str]) -> None:
    rows = [
        (
            names.get(component.task, str(component.task)),
            str(component.place),
            f"{component.weight:.1%}",
            f"{component.mass:.1%}",
            *(("the only one", "-") if component.only else (_nats(component.cost), f"{component.share:.1%}")),
        )
        for component in found
    ]
    _print_rows(("task", "component", "weight in task", "in the prior", "nats to drop it", "share of them"), rows)


def _nats(cost: float) -> str:
    return "< 0.0001" if cost < 1e-4 else f"{cost:.4f}"


def _mean_forgetting(event: dict[str, Any]) -> list[float | None]:
    """Return each replica's mean change of the old tasks' NLL."""
    old = event.get("forgetting", {}).get("own", [])[:-1]
    return [None if None in column else statistics.fmean(column) for column in zip(*old, strict=True)]


def _spread(values: Sequence[float | None] | None, digits: int = 2) -> str:
    good = [value for value in values or () if value is not None]
    if not good:
        return "-"
    deviation = f" ± {statistics.stdev(good):.{digits}f}" if len(good) > 1 else ""
    return f"{statistics.fmean(good):.{digits}f}{deviation}"


def _print_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table, highlight=False)


if __name__ == "__main__":
    main()
