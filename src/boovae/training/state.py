"""Taking a checkpoint apart: named groups of tensors, and nothing in them trusted.

The checksum of a checkpoint finds accidents; a stranger can compute it too. So every tensor and every number is
compared with what this run would have written, and what does not fit is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from boovae.errors import InputError

#: A longer list of finished tasks is a broken file, and would ask for a huge prior.
MOST_TASKS = 10_000
REMEDY = "start anew in another folder ({out})"


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under names of one group."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def group(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of one group, by their own names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def put(places: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Copy saved tensors to their places; each must be there and of the right kind."""
    for name, tensor in places.items():
        if name not in saved or (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            found = f"{tuple(saved[name].shape)} {saved[name].dtype}" if name in saved else "missing"
            raise InputError(
                f"the checkpoint does not fit these settings: tensor '{name}' is {found}, "
                f"not {tuple(tensor.shape)} {tensor.dtype}; continue with the configuration it was made with"
            )
        tensor.copy_(saved[name])


def whole(value: object) -> bool:
    """Whether something from JSON is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def check(name: str, value: object, good: bool) -> None:
    """Refuse a checkpoint in which something is not as this run writes it."""
    if not good:
        raise InputError(f"the checkpoint says '{name}' is {value!r:.60}: it was not written by this run; {REMEDY}")


def logged(record: dict[str, Any]) -> tuple[int, float]:
    """Return how long the log was at a checkpoint, and the seconds spent on its task."""
    length: Any = record.get("metrics_length")
    seconds: Any = record.get("task_seconds")
    check("metrics_length", length, whole(length) and length >= 0)
    check("task_seconds", seconds, isinstance(seconds, (int, float)) and 0 <= seconds < math.inf)
    return int(length), float(seconds)


@contextmanager
def refused() -> Iterator[None]:
    """Name what is wrong with a checkpoint; one that a stranger made fails in too many ways to list."""
    try:
        yield
    except InputError:
        raise
    except KeyError as missing:
        raise InputError(f"the checkpoint lacks {missing}: it is not whole; {REMEDY}") from missing
    except Exception as error:
        raise InputError(f"the checkpoint cannot be used ({type(error).__name__}: {error}); {REMEDY}") from error
