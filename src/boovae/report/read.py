"""Reading a run folder (docs/run-folder.md): everything the page needs, checked, nothing trusted."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from boovae.config.resolve import flattened
from boovae.errors import InputError
from boovae.report.components import Component, Gain, Kept, Pruning, gains, kept, prunings, read_components
from boovae.report.latents import LatentMap, read_latents
from boovae.report.log import PNG, Event, Floats, read_bytes, read_events

FORMAT = 1  # the newest version of metrics.jsonl this reader knows


@dataclass(frozen=True)
class Epoch:
    """One epoch of one task; arrays are [R]. A replica that has stopped has NaN."""

    task: int
    epoch: int
    train_loss: Floats
    valid_loss: Floats
    valid_kl: Floats


@dataclass(frozen=True)
class Divergence:
    """A replica left the finite numbers; `frozen` says that it was given up."""

    task: int
    epoch: int
    replica: int
    frozen: bool


@dataclass(frozen=True)
class Fidelity:
    """How near samples are to real images on the features of one network; arrays are [R]."""

    frechet: Floats
    frechet_train: Floats
    kid: Floats
    precision: Floats
    recall: Floats
    images: float
    samples: float


@dataclass(frozen=True)
class Evaluation:
    """All numbers after one task, seen = task + 1; NaN where a number is missing."""

    task: int
    nll: Floats  # [R]
    nll_per_task: Floats  # seen x [R]
    nll_own: Floats  # seen x [R]
    effective_samples: Floats  # seen x [R]
    nll_samples: float
    diversity: Floats  # [R]
    proportions: Floats  # R x classes
    classes: list[str]
    fidelity: dict[str, Fidelity]  # by the network whose features are compared
    accuracy: float
    forgetting: Floats  # seen x [R], under the task's own components
    forgetting_pooled: Floats  # seen x [R]
    dilution: Floats  # seen
    memory: dict[str, float]
    memory_bytes: float
    images_stored: float
    parameters: float
    active_units: Floats  # seen x [R], latent dimensions that vary between a task's images
    at_upper_limit: Floats  # seen x [R], share of the encoder's log-variances


@dataclass(frozen=True)
class Timing:
    """Wall time of one task."""

    train_seconds: float
    evaluate_seconds: float
    steps: float


@dataclass(frozen=True)
class Run:
    """What a run folder says, in order of the tasks."""

    path: Path
    name: str
    method: str
    dataset: str
    seeds: list[str]
    planned: int
    measured: bool  # a saved estimator keeps no images to be measured by
    task_names: dict[int, str]
    epochs: list[Epoch]
    divergences: list[Divergence]
    evaluations: list[Evaluation]
    timings: dict[int, Timing]
    samples: dict[int, bytes]
    config: dict[str, str]
    environment: dict[str, str]
    components: list[Component]
    latents: LatentMap | None
    gains: dict[int, Gain]
    kept: dict[int, Kept]
    prunings: list[Pruning]
    remarks: list[tuple[int, str]]
    notes: list[str]

    @property
    def finished(self) -> bool:
        """Whether every planned task has been evaluated."""
        return bool(self.evaluations) and self.evaluations[-1].task + 1 >= self.planned

    def task_name(self, task: int) -> str:
        """Return the name of a task, or its number from 1 where it has none."""
        return self.task_names.get(task, f"task {task + 1}")


def read_run(path: Path) -> Run:
    """Read a run folder; raise InputError naming the file and the remedy where that is impossible."""
    _require(path)
    notes: list[str] = []
    events = list(read_events(path / "metrics.jsonl", notes))
    head = next((event for event in reversed(events) if event.value("event") == "run"), None)
    if head is None:
        raise InputError(
            f"{path / 'metrics.jsonl'} has no 'run' event: the run has not begun; start or resume it first"
        )
    version = head.value("format")
    if isinstance(version, int) and version > FORMAT:
        notes.append(f"The run was written in format {version}; this page knows format {FORMAT} and may miss things.")
    planned = head.texts("tasks")
    seeds = head.texts("seeds")
    names = dict(enumerate(planned))
    names |= {
        e.task(): str(e.value("name"))
        for e in events
        if e.value("event") in ("extend", "task_start") and e.value("name") is not None
    }
    extended = {e.task() for e in events if e.value("event") == "extend"}
    return Run(
        path=path,
        name=path.resolve().name,
        method=str(head.value("method")),
        dataset=str(head.value("dataset")),
        seeds=seeds,
        planned=len(planned) + len(extended),
        measured=head.value("estimator") is None,
        task_names=names,
        epochs=_in_order([_epoch(e, len(seeds)) for e in events if e.value("event") == "epoch"]),
        divergences=[_divergence(e, len(seeds)) for e in events if e.value("event") == "divergence"],
        evaluations=_evaluations(events, len(seeds), _class_names(head, events)),
        timings=_timings(path / "timing.jsonl", notes),
        samples=_samples(path / "samples", notes),
        config=_settings(path / "config.toml", "TOML", lambda text: flattened(tomllib.loads(text))),
        environment=_settings(path / "environment.json", "JSON", json.loads),
        components=read_components(path / "components.json", notes),
        latents=read_latents(path / "latents.json", notes),
        gains=gains(events, len(seeds)),
        kept=kept(events, len(seeds)),
        prunings=prunings(events, len(seeds)),
        remarks=[(e.task(), str(e.value("text"))) for e in events if e.value("event") == "note"],
        notes=notes,
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Turn nested settings into `section.key -> text`.

    >>> flatten({"a": {"b": 1}, "c": [1, 2]})
    {'a.b': '1', 'c': '[1, 2]'}
    """
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = (
                value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
            )
    return flat


def _require(path: Path) -> None:
    """Check that `path` looks like a run folder."""
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: give a run folder, as written by 'boovae train'")
    needed = ("config.toml", "environment.json", "metrics.jsonl")
    missing = [name for name in needed if not (path / name).is_file()]
    if len(missing) == len(needed):
        raise InputError(f"{path} is not a run folder (it has no metrics.jsonl): give one written by 'boovae train'")
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}: copy the whole run folder, or run 'boovae train' again")


def _settings(path: Path, kind: str, parse: Callable[[str], Any]) -> dict[str, str]:
    """Return the settings in a TOML or JSON file as `section.key -> text`."""
    try:
        tree = parse(read_bytes(path).decode("utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("not a table of settings")
        return flatten(tree)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid {kind} ({error}); restore it from a copy of the run") from error


def _epoch(event: Event, replicas: int) -> Epoch:
    active = event.value("active")
    stopped = np.array([a is False for a in active]) if isinstance(active, list) else np.zeros(replicas, dtype=bool)
    if stopped.shape != (replicas,):
        raise event.error(f"'active' has {len(stopped)} entries, expected {replicas}")

    def running(dotted: str) -> Floats:
        return np.where(stopped, np.nan, event.array(dotted, replicas))

    number = event.integer("epoch", below=10**9)
    return Epoch(event.task(), number, running("train.loss"), running("valid.loss"), running("valid.kl"))


def _in_order(epochs: list[Epoch]) -> list[Epoch]:
    """Sort by task and epoch; an epoch written twice counts once, the later one."""
    latest = {(epoch.task, epoch.epoch): epoch for epoch in epochs}
    return [latest[key] for key in sorted(latest)]


def _divergence(event: Event, replicas: int) -> Divergence:
    epoch = event.integer("epoch", below=10**9)
    replica = event.integer("replica", below=replicas)
    return Divergence(event.task(), epoch, replica, event.value("retry") == "frozen")


def _class_names(head: Event, events: list[Event]) -> dict[str, str]:
    """Return what classes are called, by their numbers: where every task is one class, as the task.

    Tasks that were cut at borders are numbered, whatever classes are in them.
    """
    begun = [e for e in events if e.value("event") == "task_start" and e.value("classes") is not None]
    classes = [(e.texts("classes"), str(e.value("name"))) for e in begun]
    if head.value("split.borders") is not None or any(len(own) != 1 for own, _ in classes):
        return {}
    return {own[0]: name for own, name in reversed(classes)}  # a class that comes back keeps its first name


def _evaluations(events: list[Event], replicas: int, class_names: dict[str, str]) -> list[Evaluation]:
    """Return one evaluation per task: where a run was evaluated again, the latest."""
    latest = {e.task(): _evaluation(e, replicas, class_names) for e in events if e.value("event") == "evaluation"}
    return [latest[task] for task in sorted(latest)]


def _evaluation(event: Event, replicas: int, class_names: dict[str, str]) -> Evaluation:
    task = event.task()
    seen = task + 1
    numbers = event.texts("diversity.classes") if event.value("diversity.classes") is not None else []
    classes = [class_names.get(number, number) for number in numbers]
    memory = event.mapping("ledger.memory")
    return Evaluation(
        task=task,
        nll=event.array("nll.pooled", replicas),
        nll_per_task=event.array("nll.per_task", seen, replicas),
        nll_own=event.array("nll.own", seen, replicas),
        effective_samples=event.array("nll.effective_samples", seen, replicas),
        nll_samples=event.number("nll.samples"),
        diversity=event.array("diversity.table", replicas),
        proportions=event.array("diversity.proportions", replicas, len(classes)),
        classes=classes,
        fidelity=_fidelity(event, replicas),
        accuracy=event.number("classifier.accuracy"),
        forgetting=event.array("forgetting.own", seen, replicas),
        forgetting_pooled=event.array("forgetting.pooled", seen, replicas),
        dilution=event.array("forgetting.dilution", seen),
        memory={str(name): Event(event.where, {"bytes": size}).number("bytes") for name, size in memory.items()},
        memory_bytes=event.number("ledger.memory_bytes"),
        images_stored=event.number("ledger.images_stored"),
        parameters=event.number("ledger.parameters"),
        active_units=event.array("posterior.active_units", seen, replicas),
        at_upper_limit=event.array("posterior.at_upper_limit", seen, replicas),
    )


def _fidelity(event: Event, replicas: int) -> dict[str, Fidelity]:
    """Return the distances by features; a log of an earlier version has one, and the Fréchet distance alone."""
    sets = event.mapping("frechet.sets")
    if not sets and event.value("frechet.pooled") is not None:
        sets = {event.value("frechet.features"): {"frechet": event.value("frechet.pooled")}}
    found = {}
    for name, content in sets.items():
        numbers = Event(event.where, content if isinstance(content, dict) else {})
        found[str(name)] = Fidelity(
            frechet=numbers.array("frechet", replicas),
            frechet_train=numbers.array("frechet_train", replicas),
            kid=numbers.array("kid", replicas),
            precision=numbers.array("precision", replicas),
            recall=numbers.array("recall", replicas),
            images=numbers.number("images"),
            samples=numbers.number("samples"),
        )
    return found


def _timings(path: Path, notes: list[str]) -> dict[int, Timing]:
    """Return the wall times by task; the file appears with the first finished task."""
    if not path.is_file():
        return {}
    return {
        e.task(): Timing(e.number("train_seconds"), e.number("evaluate_seconds"), e.number("steps"))
        for e in read_events(path, notes)
        if e.value("event") == "task"
    }


def _samples(folder: Path, notes: list[str]) -> dict[int, bytes]:
    """Return the sample grids by task; a file that is no PNG is left out with a note."""
    pictures: dict[int, bytes] = {}
    for path in sorted(folder.glob("task_*.png")):
        number = re.fullmatch(r"task_(\d{1,5})\.png", path.name, re.ASCII)
        if number is None:
            continue
        content = read_bytes(path)
        if content.startswith(PNG):
            pictures[int(number[1])] = content
        else:
            notes.append(f"samples/{path.name} is not a PNG picture; it is left out.")
    return dict(sorted(pictures.items()))
