"""Checkpoints: tensors as safetensors, the rest as JSON; never pickle.

A checkpoint is two files, `N.safetensors` and `N.json`. Both are written to a temporary file, synced and renamed; the
JSON is written last and holds the checksum of the tensors, so a checkpoint is complete or does not exist. The last two
are kept.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from boovae.errors import InputError, RunError
from boovae.files import TEXT_BYTES, memory_share, read_file, write_file

FORMAT = 1
KEPT = 2
#: Seconds between two checkpoints of the same work, the most that has to be repeated.
CHECKPOINT_SECONDS = 30.0
_NAME = re.compile(r"(0|[1-9][0-9]*)\.(?:json|safetensors)")


def due(last: float, ahead: float = 0.0) -> bool:
    """Return whether to write a checkpoint now, given the time `last` (`time.monotonic`) of the previous one.

    The next opportunity comes after `ahead` seconds or more.
    """
    return time.monotonic() + ahead - last > CHECKPOINT_SECONDS


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write the next checkpoint into `folder` and remove all but the last two."""
    numbers = _numbers(folder)
    number = numbers[-1] + 1 if numbers else 0
    content = save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})
    head = {"format": FORMAT, "checksum": _checksum(content, record), "record": record}
    write_file(folder / f"{number}.safetensors", content)
    write_file(folder / f"{number}.json", json.dumps(head, indent=1).encode())
    kept = [*numbers, number][-KEPT:]
    try:
        for path in folder.iterdir():  # including leftovers of a killed process
            match = _NAME.fullmatch(path.name)
            if path.suffix == ".tmp" or (match and int(match.group(1)) not in kept):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot remove old checkpoints from {folder}: {error.strerror}; the newest is complete"
        ) from error


def _checksum(content: bytes, record: dict[str, Any]) -> str:
    digest = hashlib.blake2b(content)
    digest.update(json.dumps(record, sort_keys=True).encode())
    return digest.hexdigest()


def load_checkpoint(
    folder: Path, warn: Callable[[str], None] = lambda text: None, *, owner: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return tensors and record of the newest intact checkpoint, or None if there is none yet.

    Damaged checkpoints are skipped with a warning; if all are damaged, an error is raised. The `owner`, who continues
    the run, renames damaged ones (`.damaged`), so that they do not count among the last two.
    """
    damaged: dict[int, _DamagedError] = {}
    for number in reversed(_numbers(folder)):
        try:
            found = _read(folder, number)
        except _DamagedError as damage:
            warn(f"{damage}; trying the previous checkpoint")
            damaged[number] = damage
        else:
            if owner:
                _put_aside(folder, damaged)
            return found
    if damaged:
        problem = damaged[min(damaged)]
        raise InputError(f"no checkpoint in {folder} can be read ({problem}): start again in another folder ({{out}})")
    return None


def _put_aside(folder: Path, numbers: Iterable[int]) -> None:
    for path in (folder / f"{number}.{kind}" for number in numbers for kind in ("json", "safetensors")):
        try:
            if path.exists():
                path.replace(path.with_name(f"{path.name}.damaged"))
        except OSError as error:
            raise RunError(f"cannot rename {path}, which is damaged: {error.strerror}; remove it") from error


class _DamagedError(Exception):
    pass


def _numbers(folder: Path) -> list[int]:
    names = (_NAME.fullmatch(path.name) for path in folder.glob("*.json"))
    return sorted(int(match.group(1)) for match in names if match)


def _read(folder: Path, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    path = folder / f"{number}.json"
    try:
        head = json.loads(read_file(path, TEXT_BYTES))
        version, checksum, record = head["format"], head["checksum"], dict(head["record"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _DamagedError(f"{path} is damaged ({error})") from error
    if version != FORMAT:
        raise _DamagedError(f"{path} has format {version!r:.40}; this version of boovae reads format {FORMAT}")
    path = folder / f"{number}.safetensors"
    try:
        content = read_file(path, memory_share())
        whole = _checksum(content, record) == checksum
        tensors = load(content) if whole else {}
    except Exception as error:  # untrusted tensors fail in too many ways to list
        raise _DamagedError(f"{path} is damaged ({error})") from error
    if not whole:
        raise _DamagedError(f"{path} and {number}.json do not match the checksum that was written")
    return tensors, record
