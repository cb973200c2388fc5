"""The record of a finished cell is read on any machine, perhaps years later: nothing in it is trusted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boovae.report.log import EVALUATED, Event

if TYPE_CHECKING:
    from boovae.bench.cells import Cell

#: What to do with a record that cannot be used.
AGAIN = "remove it, and its cell runs again"
DAMAGED = f"the record is damaged: {AGAIN}"
#: How a PNG begins in base64.
PNG = "iVBORw0KGgo"


def check_record(path: Path, summary: dict[str, Any], cell: Cell) -> None:
    """Refuse a record that does not hold what its cell must have measured: all seeds after each of its tasks."""
    record = Event(str(path), summary, DAMAGED)
    seeds, tasks = list(cell.settings.training.seeds), cell.settings.data.tasks or 1
    if record.value("seeds") != seeds:
        raise record.error(f"'seeds' is {record.value('seeds')!r:.40}, not {seeds}")
    if len(record.texts("tasks")) != tasks:
        raise record.error(f"'tasks' has {len(record.texts('tasks'))} names of {tasks}")
    evaluations = record.value("evaluations")
    if not isinstance(evaluations, list) or [_seen(event) for event in evaluations] != list(range(1, tasks + 1)):
        raise record.error(f"'evaluations' must be one after each of {tasks} tasks")
    for seen, data in enumerate(evaluations, start=1):
        _check_evaluation(Event(f"{path}, after {seen} tasks", data, DAMAGED), seen, len(seeds))
    for name in ("boovae", "python", "torch", "device", "commit"):
        record.text(f"environment.{name}")
    for name in ("seconds.train", "seconds.evaluate"):
        if math.isnan(record.number(name)):
            raise record.error(f"'{name}' must be a number")
    _check_pictures(record)


def _seen(event: Any) -> Any:
    return event.get("seen") if isinstance(event, dict) else None


def _check_evaluation(event: Event, seen: int, replicas: int) -> None:
    """Refuse numbers that are not those of so many tasks and replicas; all but the NLL of all tasks may be missing."""
    if event.value("nll.pooled") is None:
        raise event.error("'nll.pooled' is missing")
    event.number("ledger.memory_bytes")
    for name, shape in EVALUATED.items():
        event.array(name, *({"seen": seen, "replicas": replicas}[axis] for axis in shape))
    if event.mapping("diversity"):
        for name in ("uniform", "bernoulli"):
            event.array(f"diversity.{name}", replicas)
        shares = event.value("diversity.proportions")
        classes = len(shares[0]) if isinstance(shares, list) and shares and isinstance(shares[0], list) else 0
        event.array("diversity.proportions", replicas, classes)
        event.integer("diversity.samples", below=1 << 40)
    for features, numbers in event.mapping("frechet.sets").items():
        on = Event(f"{event.where}, on {features}", numbers if isinstance(numbers, dict) else {}, DAMAGED)
        for name in ("frechet", "frechet_train", "kid", "precision", "recall"):
            on.array(name, replicas)


def _check_pictures(record: Event) -> None:
    """Refuse pictures that are none; a record may have none at all."""
    shown = [record.value("samples") or [], *record.mapping("components").values()]
    for pictures in shown:
        if not isinstance(pictures, list) or not all(isinstance(one, str) and one.startswith(PNG) for one in pictures):
            raise record.error("'samples' and 'components' must be pictures")
