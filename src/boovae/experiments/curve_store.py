"""What an experiment keeps of a curve while it learns it, so that the same command goes on where it was stopped.

After every task of the classifier there is a checkpoint of classifiers and generator; a finished curve leaves its
points alone, a small JSON file. Both lie under a name made of all that decides the curve's numbers, so other settings
never meet.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from boovae.errors import InputError
from boovae.files import TEXT_BYTES, read_file, write_file
from boovae.training.checkpoint import load_checkpoint, save_checkpoint
from boovae.training.state import group, prefixed

#: What a trainer's `state` returns.
State = tuple[dict[str, Tensor], dict[str, Any]]


class Kept:
    """One curve in a folder; `key` has a name for it under "curve"."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        text = json.dumps(key, sort_keys=True)
        words = re.sub(r"[^a-z0-9+]+", "-", str(key["curve"]).lower()).strip("-")
        self.folder = folder / f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        self._points = self.folder.with_name(f"{self.folder.name}.json")

    def finished(self) -> list[dict[str, Any]] | None:
        """Return the points of a finished curve; None if it is not finished."""
        if not self._points.exists():
            return None
        try:
            points: list[dict[str, Any]] = json.loads(read_file(self._points, TEXT_BYTES))["points"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"cannot read {self._points} ({error}): remove it, and the curve is made anew") from error
        return points

    def finish(self, points: Sequence[Mapping[str, Any]]) -> None:
        """Keep the points of a finished curve, and nothing else."""
        write_file(self._points, json.dumps({"points": list(points)}, indent=1).encode())
        shutil.rmtree(self.folder, ignore_errors=True)

    def save(self, classifiers: dict[str, Tensor], generator: State | None, record: Mapping[str, Any]) -> None:
        """Write a checkpoint."""
        tensors, rest = generator or ({}, None)
        together = prefixed("classifiers", classifiers) | prefixed("generator", tensors)
        save_checkpoint(self.folder, together, {**record, "generator": rest})

    def load(self) -> tuple[dict[str, Tensor], State | None, dict[str, Any]] | None:
        """Return what `save` took; None if there is nothing."""
        found = load_checkpoint(self.folder, owner=True)
        if found is None:
            return None
        tensors, record = found
        rest = record.pop("generator")
        generator = None if rest is None else (group(tensors, "generator"), rest)
        return group(tensors, "classifiers"), generator, record
