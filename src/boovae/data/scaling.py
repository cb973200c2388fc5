"""Convert images or features of any range to the rows of numbers that a model learns from, and back.

Grey values stay as they are; other numbers are standardised per feature, with the mean and the standard deviation of
the first task.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from boovae.data.arrays import as_images
from boovae.errors import InputError

Rows = NDArray[Any]  # (n, D)

#: Rounding error allowed to grey values outside [0, 1]; below 0 it is relative to the largest value.
SLACK = 1e-6
#: Rows processed at once where all of them may not fit into memory.
BLOCK = 4096
#: A task with fewer rows is validated on its training rows.
LEAST_SPLIT = 50
#: The smallest (unless there are none) and the largest number of validation rows.
LEAST_VALID, MOST_VALID = 10, 10_000


@dataclass(frozen=True, eq=False)
class Scaling:
    """x ↦ (x − centre) / scale per feature; with `grey`, values must lie in [0, 1] and stay as they are."""

    grey: bool
    centre: NDArray[np.float64]  # (D,)
    scale: NDArray[np.float64]  # (D,)

    @classmethod
    def learned(cls, rows: Rows, likelihood: str) -> Self:
        """Return the scaling for rows (n, D) of a first task; `auto` treats values in [0, 1] as grey values."""
        low, high = _extent(rows)
        unchanged = cls(True, np.zeros(rows.shape[1]), np.ones(rows.shape[1]))
        if likelihood in ("bernoulli", "logistic"):
            unchanged.check(low, high)
            return unchanged
        if likelihood == "auto" and -SLACK * high <= low <= high <= 1 + SLACK:
            return unchanged
        centre, scale = _moments(rows)
        # A deviation below the rounding error of the values means a constant feature.
        rounding = 10 * np.finfo(rows.dtype).eps * np.abs(centre)
        constant = scale <= rounding + np.finfo(np.float32).tiny
        return cls(False, centre, np.where(constant, 1.0, scale))

    @property
    def log_scale(self) -> float:
        """Σ log scale, to be subtracted from log-densities of scaled rows."""
        return float(np.log(self.scale).sum())

    def check(self, low: float, high: float) -> None:
        """Refuse values outside [0, 1] if the model has learned grey values."""
        if self.grey and (low < -SLACK or high > 1 + SLACK):
            raise InputError(
                f"X has values in [{low:g}, {high:g}], but the model takes grey values in [0, 1] "
                "(likelihood 'bernoulli' or 'logistic'): divide by the largest possible value, pass uint8, or scale "
                "with MinMaxScaler(clip=True); "
                "for other numbers call fit again with likelihood='normal'"
            )

    def forward(self, rows: Rows) -> NDArray[np.float32]:
        """Return rows (n, D) scaled for the model."""
        if self.grey:
            self.check(*_extent(rows))
            return np.clip(rows, 0.0, 1.0).astype(np.float32)
        scaled = (rows - self.centre) / self.scale
        if not (np.abs(scaled) < 1e18).all():  # squares of larger ones are infinite
            raise InputError("X has values out of all proportion to those of the first task; remove or rescale them")
        return scaled.astype(np.float32)

    def back(self, rows: Rows) -> NDArray[np.float32]:
        """Return rows (n, D) of the model in the units of the data."""
        return rows.astype(np.float32) if self.grey else (rows * self.scale + self.centre).astype(np.float32)

    def extent(self, rows: Rows) -> tuple[float, float]:
        """Return the range of scaled rows: [0, 1] for grey values, else that of these rows."""
        if self.grey:
            return 0.0, 1.0
        low, high = _extent(rows)
        return (low, high) if low < high else (low - 0.5, high + 0.5)


def _extent(rows: Rows) -> tuple[float, float]:
    lows, highs = zip(*((block.min(), block.max()) for block in blocks_of(rows)), strict=True)
    return float(min(lows)), float(max(highs))


def _moments(rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard deviation of each feature, block by block (Chan, Golub and LeVeque, 1983)."""
    count, centre, squares = 0, np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    for block in blocks_of(rows):
        wide = block.astype(np.float64)
        mean, more = wide.mean(0), len(wide)
        squares += ((wide - mean) ** 2).sum(0) + (mean - centre) ** 2 * count * more / (count + more)
        centre += (mean - centre) * more / (count + more)
        count += more
    return centre, np.sqrt(squares / count)


def blocks_of(rows: Rows) -> Iterator[Rows]:
    """Return the rows in blocks of some thousands."""
    return (rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK))


def divided(rows: Rows, share: float, generator: np.random.Generator) -> tuple[Rows, Rows]:
    """Return training and validation rows as views of `rows`, whose validation rows are swapped to the end.

    With few rows, all of them are used for training, and for validation too.
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


def model_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an image in the model, colours first.

    >>> model_shape((8, 8, 3))
    (3, 8, 8)
    """
    return as_images(np.zeros((1, *shape), np.uint8), "X").shape[1:]


def in_given_shape(images: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return rows (n, D) of the model as images of the shape that the user passed."""
    if len(shape) == 3 and shape[-1] in (1, 3):
        return np.ascontiguousarray(np.moveaxis(images.reshape(-1, shape[2], shape[0], shape[1]), 1, -1))
    return images.reshape(-1, *shape)
