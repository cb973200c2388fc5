"""Spread over seeds as the paper prints it, and differences of two methods seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from boovae.report.numbers import deviation, mean

#: Resamples of the bootstrap, and the share of them inside the interval.
RESAMPLES, INSIDE = 10_000, 0.95


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over so many seeds; the deviation of one seed is NaN."""

    mean: float
    std: float
    seeds: int

    @property
    def record(self) -> tuple[str, str, int]:
        """Mean, deviation and seeds as a table has them; one seed has no deviation."""
        return f"{self.mean:.6g}", f"{self.std:.6g}" if math.isfinite(self.std) else "", self.seeds


@dataclass(frozen=True)
class Difference:
    """Mean of the differences by seed, and the interval that holds 95 % of its bootstrap."""

    mean: float
    low: float
    high: float
    seeds: int


def spread(values: Sequence[float]) -> Spread:
    """Return mean and deviation.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, std=1.0, seeds=3)
    """
    array = np.asarray(values, dtype=np.float64)
    return Spread(float(mean(array)), float(deviation(array)), int(np.isfinite(array).sum()))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Return ours minus theirs over the seeds both have; None without two: a single one says nothing of the spread.

    Seeds share their data order and noise, so a difference by seed is free of much that both have in common. The
    interval is the percentile bootstrap of the mean over seeds, always with the same resamples; of few seeds it is too
    narrow: read it as the least there is to doubt.
    """
    seeds = sorted(set(ours) & set(theirs))
    differences = np.array([ours[seed] - theirs[seed] for seed in seeds])
    differences = differences[np.isfinite(differences)]
    if len(differences) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(differences), size=(RESAMPLES, len(differences)))
    edges = (1 - INSIDE) / 2, (1 + INSIDE) / 2
    low, high = np.quantile(differences[drawn].mean(axis=1), edges)
    return Difference(float(differences.mean()), float(low), float(high), len(differences))
