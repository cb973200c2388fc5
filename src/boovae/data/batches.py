"""Data in batches, which may be larger than memory: recognise batches and join them into one array.

Batches that may not fit into memory together are written to an unnamed temporary file, which a task reads like an array
and which disappears with it.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from types import NoneType
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from boovae.data.scaling import Rows
from boovae.errors import InputError


def check_kind(data: object) -> None:
    """Refuse data that cannot be images, with an error that lists what is accepted."""
    # SciPy has a sparse matrix that is a dictionary, but with `ndim`.
    if isinstance(data, (str, bytes, PathLike, Mapping, NoneType)) and not hasattr(data, "ndim"):
        raise InputError(
            f"X is a {type(data).__name__}; pass an array or tensor (n, features), (n, height, width) or "
            "(n, height, width, colours), or an iterable of such batches"
        )


def is_batches(data: object) -> TypeGuard[Iterable[Any]]:
    """Whether data are an iterable of batches; lists are arrays, as everywhere in scikit-learn."""
    arrays = (np.ndarray, Tensor, Sequence, Mapping, str, bytes)
    like_arrays = ("__array__", "__array_interface__", "__dataframe__", "shape")
    return isinstance(data, Iterable) and not (isinstance(data, arrays) or any(hasattr(data, n) for n in like_arrays))


def concatenated(function: Callable[[Any], NDArray[Any]], batches: Iterable[Any]) -> NDArray[Any]:
    """Apply a function to the images of each batch and return the results as one array."""
    parts = [function(images_of_batch(batch)) for batch in batches]
    if not parts:
        raise InputError("X has no batches; a generator can be read only once: make a new one for every call")
    return np.concatenate(parts)


def images_of_batch(batch: Any) -> Any:
    """Return the images of a batch (images, labels), as data loaders return it, or else the batch itself.

    More than two arrays of the same shape are a list of pictures, not images with labels.
    """
    if not isinstance(batch, (tuple, list)) or not batch or getattr(batch[0], "ndim", 0) < 2:
        return batch
    pictures = len(batch) > 2 and all(getattr(part, "shape", None) == batch[0].shape for part in batch)
    return batch if pictures else batch[0]


def spooled(batches: Iterable[Rows]) -> Rows:
    """Write batches (n, D) to an unnamed temporary file and return it as one array that is read from disk as needed.

    The file lies in the folder for temporary files (TMPDIR) and disappears with the array, however the process ends.
    """
    with tempfile.TemporaryFile() as file:
        count, head = 0, None
        for batch in batches:
            head = batch[:0] if head is None else head
            np.ascontiguousarray(batch, dtype=head.dtype).tofile(file)
            count += len(batch)
        if head is None or not count:
            raise InputError("X has no batches: pass at least one")
        file.flush()
        return np.memmap(file, dtype=head.dtype, mode="r+", shape=(count, head.shape[1]))
