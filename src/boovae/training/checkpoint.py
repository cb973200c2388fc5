"""Checkpoints: tensors as safetensors, the rest as JSON; never pickle.

A checkpoint is two files, `N.safetensors` and `N.json`. Both are written under a temporary name, synced and renamed;
the JSON comes last and names the checksum of the tensors, so a checkpoint is whole or it is not there. The last two are
kept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from boovae.errors import InputError
from boovae.files import write_file

FORMAT = 1
KEPT = 2


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write the next checkpoint into `folder` and remove all but the last two."""
    numbers = _numbers(folder)
    number = numbers[-1] + 1 if numbers else 0
    content = save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})
    head = {"format": FORMAT, "checksum": _checksum(content, record), "record": record}
    write_file(folder / f"{number}.safetensors", content)
    write_file(folder / f"{number}.json", json.dumps(head, indent=1).encode())
    kept = [*numbers, number][-KEPT:]
    for path in folder.iterdir():  # also what a killed process left behind
        if path.suffix == ".tmp" or (path.stem.isdigit() and int(path.stem) not in kept):
            path.unlink(missing_ok=True)


def _checksum(content: bytes, record: dict[str, Any]) -> str:
    return hashlib.blake2b(content + json.dumps(record, sort_keys=True).encode()).hexdigest()


def load_checkpoint(
    folder: Path, warn: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return tensors and record of the newest whole checkpoint, or None if there is none yet.

    A damaged one is passed over with a warning; that all are damaged is an error.
    """
    numbers = _numbers(folder)
    for number in reversed(numbers):
        try:
            return _read(folder, number)
        except _DamagedError as damage:
            warn(f"{damage}; trying the checkpoint before it")
    if numbers:
        raise InputError(f"no checkpoint in {folder} can be read: start anew in another folder (--out)")
    return None


class _DamagedError(Exception):
    pass


def _numbers(folder: Path) -> list[int]:
    names = (re.fullmatch(r"(\d{1,9})\.json", path.name) for path in folder.glob("*.json"))
    return sorted(int(match.group(1)) for match in names if match)


def _read(folder: Path, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    path = folder / f"{number}.json"
    try:
        head = json.loads(path.read_bytes())
        version, checksum, record = head["format"], head["checksum"], head["record"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _DamagedError(f"{path} is damaged ({error})") from error
    if version != FORMAT:
        raise InputError(f"{path} has format {version}; this version of boovae reads format {FORMAT}")
    path = folder / f"{number}.safetensors"
    try:
        content = path.read_bytes()
        if _checksum(content, record) != checksum:
            raise _DamagedError(f"{path} and {number}.json do not have the checksum that was written")
        return load(content), record
    except (OSError, SafetensorError, KeyError) as error:  # KeyError: a type of numbers that torch does not have
        raise _DamagedError(f"{path} is damaged ({error})") from error
