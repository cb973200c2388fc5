"""The lines of a run's logs, each an event that knows where it stands; nothing in them is trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boovae.errors import InputError
from boovae.files import read_file

Floats = npt.NDArray[np.float64]

PNG = b"\x89PNG\r\n\x1a\n"  # how a picture of a run folder begins
MOST_TASKS = 10_000  # a larger task number is a broken file, and would ask for a huge table
MOST_PIXELS = 10**8  # of one image
LOG_BYTES = 1 << 30  # a hundred tasks of a thousand epochs take a tenth of it
#: What later evaluations and the tables read of an evaluation, and the axes it has.
EVALUATED = {
    "nll.pooled": ("replicas",),
    "nll.per_task": ("seen", "replicas"),
    "nll.own": ("seen", "replicas"),
    "nll.effective_samples": ("seen", "replicas"),
    "forgetting.own": ("seen", "replicas"),
    "diversity.table": ("replicas",),
    "frechet.pooled": ("replicas",),
    "classifier.accuracy": (),
}


@dataclass(frozen=True)
class Event:
    """One line of a JSONL file that knows where it stands."""

    where: str
    data: dict[str, Any]
    remedy: str = "restore the file, or resume the run to write it anew"

    def error(self, problem: str) -> InputError:
        """Return the error that names the place and the remedy."""
        return InputError(f"{self.where}: {problem}; {self.remedy}")

    def value(self, dotted: str) -> Any:
        """Return the value at `a.b`, or None where it is missing."""
        node: Any = self.data
        for key in dotted.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def array(self, dotted: str, *shape: int) -> Floats:
        """Return numbers of this shape; missing, null and infinite become NaN."""
        raw = self.value(dotted)
        if raw is None:
            return np.full(shape, np.nan)
        if len(shape) == 2 and isinstance(raw, list):
            raw = [[None] * shape[1] if row is None else row for row in raw]
        try:
            array = np.array(raw, dtype=np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.error(f"'{dotted}' is not a list of numbers") from error
        if array.shape != shape:
            raise self.error(f"'{dotted}' has shape {array.shape}, expected {shape}")
        return np.where(np.isfinite(array), array, np.nan)

    def number(self, dotted: str) -> float:
        """Return a number; missing, null and infinite become NaN."""
        return float(self.array(dotted))

    def task(self) -> int:
        """Return the number of the task it is about."""
        return self.integer("task", below=MOST_TASKS)

    def integer(self, dotted: str, below: int) -> int:
        """Return a whole number from 0 up."""
        value = self.value(dotted)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
            raise self.error(f"'{dotted}' must be a whole number from 0 to {below - 1}, got {value!r:.40}")
        return value

    def text(self, dotted: str) -> str:
        """Return a text."""
        value = self.value(dotted)
        if not isinstance(value, str):
            raise self.error(f"'{dotted}' must be a text, got {value!r:.40}")
        return value

    def texts(self, dotted: str) -> list[str]:
        """Return a list, its entries as text."""
        value = self.value(dotted)
        if not isinstance(value, list):
            raise self.error(f"'{dotted}' must be a list, got {value!r:.40}")
        return [str(item) for item in value]

    def mapping(self, dotted: str) -> dict[str, Any]:
        """Return an object; empty where there is none."""
        value = self.value(dotted)
        return value if isinstance(value, dict) else {}


def read_bytes(path: Path) -> bytes:
    """Return a file's content."""
    try:
        return read_file(path, LOG_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def read_events(path: Path, notes: list[str], length: int | None = None) -> Iterator[Event]:
    """Yield the objects of a JSONL file, or of its first `length` bytes.

    A torn last line becomes a note, a broken one before it an error.
    """
    content = read_bytes(path)[:length]
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    for number, line in lines:
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            if number == lines[-1][0]:
                notes.append(f"The last line of {path.name} is torn, probably by an interrupted write; it is left out.")
                return
            message = f"{path}, line {number} is not a JSON object; restore the file, or remove that line"
            raise InputError(message) from error
        yield Event(f"{path}, line {number}", data)


def checked(events: Iterable[Event], path: Path) -> Iterator[Event]:
    """Yield the events of a log, one after another; refuse what training, evaluation or a table would stumble over."""
    replicas: int | None = None
    for event in events:
        kind = event.value("event")
        if (kind == "run") != (replicas is None):
            raise InputError(f"{path} must begin with its only 'run' event; copy the whole run folder")
        if replicas is None:
            replicas = _check_head(event)
        if kind in ("extend", "task_start"):
            event.task()
            event.text("name")
        if kind == "extend":
            event.text("split.digest")
            if event.value("source") is not None:
                event.text("source")
        if kind == "evaluation":
            _check_evaluation(event, replicas)
        yield event


def _check_head(head: Event) -> int:
    """Check what a trainer is made from; return the number of replicas."""
    shape = head.value("shape")
    if not isinstance(shape, list) or not 1 <= len(shape) <= 3:
        raise head.error(f"'shape' must be one to three sizes, got {shape!r:.40}")
    for place in range(len(shape)):
        Event(head.where, {"shape": shape[place]}).integer("shape", below=MOST_PIXELS)
    if not 0 < math.prod(shape) < MOST_PIXELS:
        raise head.error(f"'shape' must have 1 to {MOST_PIXELS - 1} pixels, got {shape}")
    if head.value("pixel_range") is not None:
        low, high = head.array("pixel_range", 2)
        if not low < high:
            raise head.error("'pixel_range' must be a lower and a higher number")
    for name in ("split.digest", "split.binarize"):
        head.text(name)
    head.texts("tasks")
    return len(head.texts("seeds"))


def _check_evaluation(event: Event, replicas: int) -> None:
    seen = event.task() + 1
    if event.integer("seen", below=MOST_TASKS + 1) != seen:
        raise event.error(f"'seen' must be {seen}")
    for name, shape in EVALUATED.items():
        section = event.value(name.partition(".")[0])
        if section is not None and event.value(name) is None:
            raise event.error(f"'{name}' is missing")
        event.array(name, *({"seen": seen, "replicas": replicas}[axis] for axis in shape))
    if math.isnan(event.number("ledger.memory_bytes")):
        raise event.error("'ledger.memory_bytes' must be a number")
