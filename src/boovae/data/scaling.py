"""Images or features of any range, as the rows of numbers that a model learns from, and back.

Grey values stay as they are; any other numbers are standardised, feature by feature, with the mean and the deviation of
the first task. Batches that would not fit into memory together go to a file without a name, which a task reads like an
array and which is gone with it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from boovae.data.arrays import as_images
from boovae.errors import InputError

Rows = NDArray[Any]  # (n, D)

#: Rounding that grey values may have beyond [0, 1]; where none is near 1, that share of the largest below 0.
SLACK = 1e-6
#: Rows that are looked at at once where all of them may not fit into memory.
BLOCK = 4096
#: With fewer rows than this, a task is validated on what it is trained on.
LEAST_SPLIT = 50
#: Validation rows at least (where there are any) and at most.
LEAST_VALID, MOST_VALID = 10, 10_000


@dataclass(frozen=True, eq=False)
class Scaling:
    """x ↦ (x − centre) / scale, feature by feature; `grey` says that values must lie in [0, 1] and stay as they are."""

    grey: bool
    centre: NDArray[np.float64]  # (D,)
    scale: NDArray[np.float64]  # (D,)

    @classmethod
    def learned(cls, rows: Rows, likelihood: str) -> Scaling:
        """Return the scaling for rows (n, D) of a first task; `auto` takes grey values for what lies in [0, 1]."""
        low, high = _extent(rows)
        unchanged = cls(True, np.zeros(rows.shape[1]), np.ones(rows.shape[1]))
        if likelihood in ("bernoulli", "logistic"):
            unchanged.check(low, high)
            return unchanged
        if likelihood == "auto" and -SLACK * high <= low <= high <= 1 + SLACK:
            return unchanged
        centre, scale = _moments(rows)
        # Below the rounding of the numbers themselves a feature is constant.
        rounding = 10 * np.finfo(rows.dtype).eps * np.abs(centre)
        constant = scale <= rounding + np.finfo(np.float32).tiny
        return cls(False, centre, np.where(constant, 1.0, scale))

    @property
    def log_scale(self) -> float:
        """Σ log scale: what log-densities of scaled rows are too high by."""
        return float(np.log(self.scale).sum())

    def check(self, low: float, high: float) -> None:
        """Refuse values that are no grey values where the model has learned such."""
        if self.grey and (low < -SLACK or high > 1 + SLACK):
            raise InputError(
                f"X has values in [{low:g}, {high:g}], but the model takes grey values in [0, 1] "
                "(likelihood 'bernoulli' or 'logistic'): divide by the largest possible value, hand in uint8, or scale "
                "with MinMaxScaler(clip=True); "
                "for other numbers fit anew with likelihood='normal'"
            )

    def forward(self, rows: Rows) -> NDArray[np.float32]:
        """Return rows (n, D) as the model takes them."""
        if self.grey:
            self.check(*_extent(rows))
            return np.clip(rows, 0.0, 1.0).astype(np.float32)
        scaled = (rows - self.centre) / self.scale
        if not (np.abs(scaled) < 1e18).all():  # squares of larger ones are infinite
            raise InputError("X has values that are out of all proportion to the first task's; remove or rescale them")
        return scaled.astype(np.float32)

    def back(self, rows: Rows) -> NDArray[np.float32]:
        """Return rows (n, D) of the model in the units of the data."""
        return rows.astype(np.float32) if self.grey else (rows * self.scale + self.centre).astype(np.float32)

    def extent(self, rows: Rows) -> tuple[float, float]:
        """Return between which values scaled rows may lie: grey values in [0, 1], others where these are."""
        if self.grey:
            return 0.0, 1.0
        low, high = _extent(rows)
        return (low, high) if low < high else (low - 0.5, high + 0.5)


def _extent(rows: Rows) -> tuple[float, float]:
    lows, highs = zip(*((block.min(), block.max()) for block in blocks_of(rows)), strict=True)
    return float(min(lows)), float(max(highs))


def _moments(rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and deviation of each feature, block by block (Chan, Golub and LeVeque, 1983)."""
    count, centre, squares = 0, np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    for block in blocks_of(rows):
        wide = block.astype(np.float64)
        mean, more = wide.mean(0), len(wide)
        squares += ((wide - mean) ** 2).sum(0) + (mean - centre) ** 2 * count * more / (count + more)
        centre += (mean - centre) * more / (count + more)
        count += more
    return centre, np.sqrt(squares / count)


def blocks_of(rows: Rows) -> Iterator[Rows]:
    """Return the rows some thousand at a time."""
    return (rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK))


def spooled(batches: Iterable[Rows]) -> Rows:
    """Write batches (n, D) to a file without a name, and return it as one array that is read from disk as needed.

    The file lies in the folder for temporary files (TMPDIR), and is gone with the array, however the process ends.
    """
    with tempfile.TemporaryFile() as file:
        count, head = 0, None
        for batch in batches:
            head = batch[:0] if head is None else head
            np.ascontiguousarray(batch, dtype=head.dtype).tofile(file)
            count += len(batch)
        if head is None or not count:
            raise InputError("X has no batches: hand in at least one")
        file.flush()
        return np.memmap(file, dtype=head.dtype, mode="r+", shape=(count, head.shape[1]))


def divided(rows: Rows, share: float, generator: np.random.Generator) -> tuple[Rows, Rows]:
    """Return training and validation rows, views of `rows`, whose validation rows are swapped to the end.

    Few rows are too dear to hold back: they are trained and validated on.
    """
    if len(rows) < LEAST_SPLIT or share == 0:
        return rows, rows[:MOST_VALID]
    held = min(max(math.ceil(len(rows) * share), LEAST_VALID), MOST_VALID, len(rows) - 1)
    first = len(rows) - held
    chosen = generator.choice(len(rows), held, replace=False)
    here = np.sort(chosen[chosen < first])
    there = np.setdiff1d(np.arange(first, len(rows)), chosen)
    moved = rows[here]
    rows[here] = rows[there]
    rows[there] = moved
    return rows[:first], rows[first:]


def check_kind(data: object) -> None:
    """Refuse what can be no images, and say what can."""
    none = data is None or isinstance(data, (str, bytes, PathLike, Mapping))
    if none and not hasattr(data, "ndim"):  # SciPy has a sparse matrix that is a dictionary
        raise InputError(
            f"X is a {type(data).__name__}; hand in an array or tensor (n, features), (n, height, width) or "
            "(n, height, width, colours), or an iterable of such batches"
        )


@contextmanager
def told_from_batches(data: object) -> Iterator[None]:
    """Say of a list that cannot be read as an array how it would be read as batches."""
    try:
        yield
    except InputError as error:
        if isinstance(data, (list, tuple)):
            raise InputError(f"{error.text}; a list is one array, a list of batches is iter(X)") from error
        raise


def is_batches(data: object) -> TypeGuard[Iterable[Any]]:
    """Whether data are an iterable of batches; lists are arrays, as everywhere in scikit-learn."""
    arrays = (np.ndarray, Tensor, Sequence, Mapping, str, bytes)
    like_arrays = ("__array__", "__array_interface__", "__dataframe__", "shape")
    return isinstance(data, Iterable) and not (isinstance(data, arrays) or any(hasattr(data, n) for n in like_arrays))


def of_each(function: Callable[[Any], NDArray[Any]], batches: Iterable[Any]) -> NDArray[Any]:
    """Return what a function makes of the images of each batch, one after another."""
    parts = [function(without_labels(batch)) for batch in batches]
    if not parts:
        raise InputError("X has no batches; a generator can be read once: make it anew for every call")
    return np.concatenate(parts)


def without_labels(batch: Any) -> Any:
    """Return the images of a batch (images, labels), as data loaders make them, or the batch itself.

    More than two arrays of one shape are no images with labels: they are a list of pictures.
    """
    if not isinstance(batch, (tuple, list)) or not batch or getattr(batch[0], "ndim", 0) < 2:
        return batch
    pictures = len(batch) > 2 and all(getattr(part, "shape", None) == batch[0].shape for part in batch)
    return batch if pictures else batch[0]


def model_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an image as the model has it, colours first.

    >>> model_shape((8, 8, 3))
    (3, 8, 8)
    """
    return as_images(np.zeros((1, *shape), np.uint8), "X").shape[1:]


def as_given(images: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return rows (n, D) of the model in the shape in which one image was handed in."""
    if len(shape) == 3 and shape[-1] in (1, 3):
        return np.ascontiguousarray(np.moveaxis(images.reshape(-1, shape[2], shape[0], shape[1]), 1, -1))
    return images.reshape(-1, *shape)
