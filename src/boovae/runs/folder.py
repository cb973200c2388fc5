"""Files of a run folder: their names and formats, and how to read them (docs/run-folder.md).

Nothing in a folder is trusted: it may come from a stranger. Does not import torch.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from boovae.errors import InputError
from boovae.files import read_file
from boovae.metrics.evaluation import Evaluation, read_evaluation
from boovae.metrics.schema import REMEDY, decode
from boovae.report import run_record as records

Event = dict[str, Any]
Content = TypeVar("Content", bound=msgspec.Struct)

#: The newest version of `metrics.jsonl` that is read, and the one that is written.
LOG_FORMAT = 1
#: Most bytes of a file that are read; the log of a hundred tasks of a thousand epochs takes a tenth of this.
LOG_BYTES = 1 << 30
#: Signature of a PNG file.
PNG = b"\x89PNG\r\n\x1a\n"
_GRID = re.compile(r"task_(\d{1,5})\.png", re.ASCII)


class Line(NamedTuple):
    """An event of a log, and where it stands, for error messages."""

    where: str
    event: Event


class RunFolder:
    """Paths of the files in a run folder, and their content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.environment = path / "config.toml", path / "environment.json"
        self.log, self.timing = path / "metrics.jsonl", path / "timing.jsonl"
        self.checkpoint, self.samples = path / "checkpoint", path / "samples"
        self.components, self.components_picture = path / "components.json", path / "samples" / "components.png"
        self.latents, self.report, self.tensorboard = path / "latents.json", path / "report.html", path / "tensorboard"

    def sample_grid(self, task: int) -> Path:
        """Return the path of the sample grid after a task."""
        return self.samples / f"task_{task:02d}.png"

    def sample_grids(self) -> dict[int, Path]:
        """Return the paths of all existing sample grids, by task."""
        found = ((_GRID.fullmatch(path.name), path) for path in self.samples.glob("task_*.png"))
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def export(self, form: str) -> Path:
        """Return the folder of an exported model."""
        return self.path / "export" / form

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return self.config.is_file()

    def require(self) -> None:
        """Refuse anything but a complete run folder."""
        if not self.path.is_dir():
            raise InputError(f"{self.path} is not a folder: give a run folder, as written by 'boovae train'")
        needed = (self.config, self.environment, self.log)
        missing = [path.name for path in needed if not path.is_file()]
        if len(missing) == len(needed):
            raise InputError(
                f"{self.path} is not a run folder (it has no metrics.jsonl): give one written by 'boovae train'"
            )
        if missing:
            raise InputError(
                f"{self.path} lacks {', '.join(missing)}: copy the whole run folder, or run 'boovae train' again"
            )

    # --- reading ------------------------------------------------------------------------------------------------

    def read_config(self) -> dict[str, Any]:
        """Return the settings as written: in sections, or flat as in version 0.1.0."""
        return _parsed(self.config, "TOML", tomllib.loads)

    def read_environment(self) -> dict[str, Any]:
        """Return versions, device, source commit and command."""
        return _parsed(self.environment, "JSON", json.loads)

    def read_log(self, notes: list[str], length: int | None = None) -> list[Line]:
        """Return the lines of the log, or of its first `length` bytes."""
        return _lines(self.log, notes, length)

    def read_timings(self, notes: list[str]) -> dict[int, records.Timing]:
        """Return the wall times by task; the file appears with the first finished task."""
        lines = _lines(self.timing, notes) if self.timing.is_file() else []
        ended = [line for line in lines if line.event.get("event") == "task"]
        kept = [decode(line.event, records.Timing, line.where, lambda found: {}) for line in ended]
        return {timing.task: timing for timing in kept}  # an interrupted evaluation is timed again

    def read_samples(self, notes: list[str]) -> dict[int, bytes]:
        """Return the pictures of samples by task; a file that is not a PNG is left out with a note."""
        pictures: dict[int, bytes] = {}
        for task, path in self.sample_grids().items():
            content = _bytes(path)
            if content.startswith(PNG):
                pictures[task] = content
            else:
                notes.append(f"samples/{path.name} is not a PNG picture; it is left out.")
        return pictures

    def read_components(self, notes: list[str]) -> list[records.Component]:
        """Return the components of the first replica; a damaged file has none and leaves a note."""
        left_out = "the learned components are left out"
        found = _optional(self.components, records.ComponentsFile, left_out, notes)
        for index, part in enumerate(found.components if found else ()):
            if not (part.pseudo_input.startswith(PNG) and part.decoded.startswith(PNG)):
                notes.append(f"{self.components.name} is damaged (picture {index} is not a PNG); {left_out}.")
                return []
        return found.components if found else []

    def read_latents(self, notes: list[str]) -> records.LatentMap | None:
        """Return the latent map; None before the first evaluation; a damaged file leaves a note."""
        return _optional(self.latents, records.LatentMap, "the latent map is left out", notes)


class Log:
    """The events of a log: all of them as JSON, those of known kinds also as structs.

    Refuses what a run cannot have written. Kinds in `passed` are not read as structs.
    """

    def __init__(self, path: Path, lines: Iterable[Line], passed: frozenset[str] = frozenset()) -> None:
        self.path, self.passed = path, passed
        self.events: list[Event] = []
        self.typed: list[Any] = []
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> None:
        """Append an event."""
        where, event = line
        kind, replicas = event.get("event"), len(self.typed[0].seeds) if self.typed else 0
        if (kind == "run") != (not self.typed):
            raise InputError(f"{self.path} must begin with its only 'run' event; copy the whole run folder")
        if isinstance(kind, str) and kind in records.EVENTS and kind not in self.passed:
            self.typed.append(_typed(event, records.EVENTS[kind], where, replicas))
        self.events.append(event)

    def all_of(self, kind: type[Content]) -> list[Content]:
        """Return the events of one kind as structs."""
        return [event for event in self.typed if isinstance(event, kind)]

    def require(self) -> Self:
        """Return the log; refuse one without events."""
        if not self.events:
            raise InputError(f"{self.path} has no 'run' event: the run has not begun; start or resume it first")
        return self


def _typed(event: Event, kind: type[msgspec.Struct], where: str, replicas: int) -> msgspec.Struct:
    if kind is Evaluation:
        return read_evaluation(event, where, replicas)

    def sizes(found: msgspec.Struct) -> Mapping[str, int]:
        count = found.sizes.size if isinstance(found, records.ComponentsLearned) and found.sizes is not None else -1
        return {"replicas": replicas, "sizes": count}

    found = decode(event, kind, where, sizes)
    if isinstance(found, records.Divergence) and found.replica >= replicas:
        raise InputError(f"{where}: 'replica' must be below {replicas}; {REMEDY}")
    if isinstance(found, records.Head):
        low, high = found.pixel_range
        if not (0 < int(np.prod(found.shape, dtype=object)) < 10**8 and low < high):
            raise InputError(
                f"{where}: 'shape' must have fewer than 10^8 pixels, 'pixel_range' a lower and a higher number"
            )
    return found


def _bytes(path: Path) -> bytes:
    try:
        return read_file(path, LOG_BYTES)
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}; check its permissions, or copy the whole run folder"
        ) from error


def _parsed(path: Path, kind: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    content = _bytes(path)
    try:
        tree = parse(content.decode("utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("not a table of settings")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid {kind} ({error}); restore it from a copy of the run") from error
    return tree


def _lines(path: Path, notes: list[str], length: int | None = None) -> list[Line]:
    """Return the objects of a JSONL file; a torn last line becomes a note, an invalid line before it an error."""
    found = []
    lines = [(at, line) for at, line in enumerate(_bytes(path)[:length].split(b"\n"), start=1) if line.strip()]
    for number, line in lines:
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            if number == lines[-1][0]:
                notes.append(f"The last line of {path.name} is torn, probably by an interrupted write; it is left out.")
                break
            message = f"{path}, line {number} is not a JSON object; restore the file, or remove that line"
            raise InputError(message) from error
        found.append(Line(f"{path}, line {number}", data))
    return found


def _optional(path: Path, kind: type[Content], left_out: str, notes: list[str]) -> Content | None:
    """Return the content of an optional file; None if there is none, or with a note if it is damaged."""
    if not path.is_file():
        return None
    try:
        return decode(json.loads(_bytes(path)), kind, path.name, lambda found: {"two": 2})
    except (ValueError, RecursionError) as error:
        problem = str(error).removeprefix(f"{path.name}: ").partition(";")[0]  # the remedy is for logs
        notes.append(f"{path.name} is damaged ({problem}); {left_out}.")
        return None
