"""The record of a finished cell is read on any machine, perhaps years later: nothing in it is trusted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from boovae.errors import InputError
from boovae.metrics.evaluation import Evaluation, read_evaluation
from boovae.metrics.typed import decode

if TYPE_CHECKING:
    from boovae.bench.cells import Cell

#: What to do with a record that cannot be used.
AGAIN = "remove it, and its cell runs again"
DAMAGED = f"the record is damaged: {AGAIN}"
#: How a PNG begins in base64.
PNG = "iVBORw0KGgo"


class Environment(msgspec.Struct, frozen=True):
    """What a cell ran with."""

    boovae: str
    python: str
    torch: str
    device: str
    commit: str


class Seconds(msgspec.Struct, frozen=True):
    """Wall times of a cell."""

    train: float
    evaluate: float


class CellRecord(msgspec.Struct, frozen=True):
    """What tables and pages read of a finished cell."""

    seeds: list[int]
    tasks: list[str]
    evaluations: Any
    environment: Environment
    seconds: Seconds
    samples: Any = None
    components: Any = None


def check_record(path: Path, summary: dict[str, Any], cell: Cell) -> list[Evaluation]:
    """Return the evaluations of a record; refuse one without all seeds after each of the cell's tasks."""
    record = decode(summary, CellRecord, str(path), lambda found: {}, DAMAGED)
    seeds, tasks = list(cell.settings.training.seeds), cell.settings.data.tasks or 1
    if record.seeds != seeds:
        raise _damaged(path, f"'seeds' is {record.seeds!r:.40}, not {seeds}")
    if len(record.tasks) != tasks:
        raise _damaged(path, f"'tasks' has {len(record.tasks)} names of {tasks}")
    found = record.evaluations if isinstance(record.evaluations, list) else []
    if [each.get("seen") if isinstance(each, dict) else None for each in found] != list(range(1, tasks + 1)):
        raise _damaged(path, f"'evaluations' must be one after each of {tasks} tasks")
    shown = [record.samples or [], *(record.components.values() if isinstance(record.components, dict) else ())]
    for pictures in shown:
        if not isinstance(pictures, list) or not all(isinstance(one, str) and one.startswith(PNG) for one in pictures):
            raise _damaged(path, "'samples' and 'components' must be pictures")
    places = (f"{path}, after {seen} tasks" for seen in range(1, tasks + 1))
    evaluations = [read_evaluation(each, place, len(seeds), DAMAGED) for each, place in zip(found, places, strict=True)]
    for evaluation in evaluations:
        if evaluation.nll is None:
            raise _damaged(path, "'nll' is missing")
    return evaluations


def _damaged(path: Path, problem: str) -> InputError:
    return InputError(f"{path}: {problem}; {DAMAGED}")
