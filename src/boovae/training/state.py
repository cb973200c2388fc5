"""Read the content of a checkpoint: named groups of tensors, none of them trusted.

The checksum of a checkpoint detects accidents, not manipulation. So every tensor and every number is compared with what
this run would have written, and refused if it does not fit.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from boovae.errors import InputError

#: A longer list of finished tasks means a damaged file, and would need a huge prior.
MOST_TASKS = 10_000
REMEDY = "start again in another folder ({out})"


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with their names prefixed by a group."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def group(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of one group, without the prefix."""
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def put(places: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Copy saved tensors to their places; each must exist with the right shape and type."""
    for name, tensor in places.items():
        if name not in saved or (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            found = f"{tuple(saved[name].shape)} {saved[name].dtype}" if name in saved else "missing"
            raise InputError(
                f"the checkpoint does not fit these settings: tensor '{name}' is {found}, "
                f"not {tuple(tensor.shape)} {tensor.dtype}; continue with the configuration it was made with"
            )
        tensor.copy_(saved[name])


def whole(value: object) -> bool:
    """Return whether a value from JSON is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def check(name: str, value: object, good: bool) -> None:
    """Refuse a checkpoint with a value that this run would not write."""
    if not good:
        raise InputError(f"the checkpoint says '{name}' is {value!r:.60}: it was not written by this run; {REMEDY}")


def logged(record: dict[str, Any]) -> tuple[int, float]:
    """Return the length of the log at a checkpoint, and the seconds spent on its task."""
    length: Any = record.get("metrics_length")
    seconds: Any = record.get("task_seconds")
    check("metrics_length", length, whole(length) and length >= 0)
    check("task_seconds", seconds, isinstance(seconds, (int, float)) and 0 <= seconds < math.inf)
    return int(length), float(seconds)


@contextmanager
def refused() -> Iterator[None]:
    """Convert any error of reading a checkpoint to InputError; an untrusted one fails in too many ways to list."""
    try:
        yield
    except InputError:
        raise
    except KeyError as missing:
        raise InputError(f"the checkpoint lacks {missing}: it is incomplete; {REMEDY}") from missing
    except Exception as error:
        raise InputError(f"the checkpoint cannot be used ({type(error).__name__}: {error}); {REMEDY}") from error
