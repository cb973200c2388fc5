"""The command line: one function per verb. Nothing heavy is imported before a verb runs: `--help` answers at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

import boovae
from boovae.config import Settings, resolve, to_toml
from boovae.errors import BoovaeError, InputError, RunError, unknown_name

if TYPE_CHECKING:
    from boovae.data import Stream
    from boovae.run import Run
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
    data_dir: Path | None = None
    """Where the datasets lie; else BOOVAE_DATA, then the cache."""
    device: Device = "auto"
    """Where to compute."""


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
    from boovae.run import train as run_train

    settings = _settings(arguments)
    stream = _stream(settings, arguments.data_dir)
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
    evaluations = _events(out)
    if arguments.json:
        print(json.dumps(evaluations[-1]))
    else:
        _print_table(evaluations)
    _report(out, quiet=arguments.quiet)


def evaluate(arguments: Eval) -> None:
    """Measure a model again."""
    from boovae.metrics.classifier import trained_classifier
    from boovae.metrics.evaluation import evaluate as measure
    from boovae.progress import make_display

    display = make_display(quiet=arguments.quiet)
    run, trainer, stream = _opened(arguments.run, arguments.data_dir, arguments.device)
    with run:
        changed = {name: getattr(arguments, name) for name in ("samples", "generated") if getattr(arguments, name)}
        trainer.settings = dataclasses.replace(trainer.settings, **changed)
        seen = stream[: trainer.tasks_done]
        classifier = None
        if {"diversity", "frechet"} & set(arguments.metric):
            classifier = trained_classifier(seen, device=trainer.device, progress=display.note)
        history = run.events("evaluation")[: trainer.tasks_done - 1]
        event = measure(trainer, seen, classifier, history, metrics=arguments.metric, progress=display.evaluating)
    display.close()
    if arguments.json:
        print(json.dumps(event))
    else:
        _print_table([event])


def sample(arguments: Sample) -> None:
    """Draw images."""
    from boovae.run import save_samples

    run, trainer, _ = _opened(arguments.run, arguments.data_dir, arguments.device)
    with run:
        if arguments.n < 1:
            raise InputError(f"--n is {arguments.n}; it must be at least 1")
        if arguments.task is not None and not 0 <= arguments.task < trainer.tasks_done:
            raise InputError(f"--task is {arguments.task}; this run has learned tasks 0 to {trainer.tasks_done - 1}")
        if not 0 <= arguments.replica < len(trainer.replicas):
            raise InputError(
                f"--replica is {arguments.replica}; this run has replicas 0 to {len(trainer.replicas) - 1}"
            )
        save_samples(trainer, arguments.out, arguments.task, arguments.n, arguments.replica)
    print(arguments.out)


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
    "eval": (Eval, evaluate),
    "sample": (Sample, sample),
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


def _stream(settings: Settings, data_dir: Path | None) -> Stream:
    from boovae.data import load_stream

    return load_stream(
        settings.dataset,
        data_dir=data_dir,
        seed=settings.data_seed,
        classes_per_task=settings.classes_per_task,
        class_order=settings.class_order,
        limit=settings.limit,
        binarize=settings.binarize,
    )


def _opened(folder: Path, data_dir: Path | None, device: str) -> tuple[Run, Trainer, Stream]:
    """Open a run with the data it was trained on."""
    from boovae.run import Run, load_trainer

    with Run.open(folder) as run:
        settings = run.settings
    stream = _stream(settings, data_dir)
    return (*load_trainer(folder, stream, device), stream)


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
