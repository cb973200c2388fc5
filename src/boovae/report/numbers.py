"""Averages over replicas, and formatting of numbers."""

from __future__ import annotations

import math

import numpy as np

from boovae.metrics.schema import Floats

MISSING = "–"


def mean(values: Floats, axis: int = -1) -> Floats:
    """Average over the finite entries; NaN if there are none (numpy would warn)."""
    finite = np.isfinite(values)
    count = finite.sum(axis=axis)
    total: Floats = np.where(finite, values, 0.0).sum(axis=axis) / np.maximum(count, 1)
    return np.where(count > 0, total, np.nan)


def deviation(values: Floats, axis: int = -1) -> Floats:
    """Return the sample standard deviation over the finite entries; NaN for fewer than two."""
    finite = np.isfinite(values)
    count = finite.sum(axis=axis)
    square = np.where(finite, values - np.expand_dims(mean(values, axis), axis), 0.0) ** 2
    variance: Floats = square.sum(axis=axis) / np.maximum(count - 1, 1)
    return np.where(count > 1, np.sqrt(variance), np.nan)


def number(value: float, decimals: int | None = None) -> str:
    """Write a number with about three figures.

    >>> number(92.345), number(-0.5), number(1234.5), number(float("nan"))
    ('92.3', '−0.50', '1,234', '–')
    """
    if not math.isfinite(value):
        return MISSING
    size = abs(value)
    if decimals is None:
        decimals = 0 if size >= 1000 else 1 if size >= 10 else 2
    text = f"{round(size, decimals):,.{decimals}f}"
    return f"−{text}" if value < 0 and _visible(text) else text


def change(value: float, decimals: int | None = None) -> str:
    """Write a change, with its sign.

    >>> change(2.0), change(-2.0), change(0.001)
    ('+2.00', '−2.00', '0.00')
    """
    text = number(value, decimals)
    return f"+{text}" if value > 0 and _visible(text) else text


def _visible(text: str) -> bool:
    """Whether any digit other than zero is left after rounding; zero gets no sign."""
    return any(digit in text for digit in "123456789")


def plus_minus(values: Floats, signed: bool = False) -> str:
    """Write mean ± standard deviation, with two figures of the deviation.

    >>> plus_minus(np.array([92.0, 93.0]))
    '92.50 ± 0.71'
    """
    return with_spread(float(mean(values)), float(deviation(values)), signed)


def with_spread(middle: float, spread: float, signed: bool = False) -> str:
    """Write a mean and its standard deviation (NaN: none) with at most two decimals, below one with three.

    >>> with_spread(92.5, 0.707), with_spread(0.0049, 0.0012), with_spread(0.0049, math.nan)
    ('92.50 ± 0.71', '0.005 ± 0.001', '0.005')
    """
    write = change if signed else number
    most = 2 if abs(middle) >= 1 else 3
    decimals = most if 0 < abs(middle) < 1 else None
    if not math.isfinite(spread):
        return write(middle, decimals)
    if spread > 0:
        decimals = min(max(1 - math.floor(math.log10(spread)), 0), most)
    return f"{write(middle, decimals)} ± {number(spread, decimals)}"


def percent(value: float) -> str:
    """Write a share as a percentage.

    >>> percent(0.9876)
    '98.8 %'
    """
    return f"{100 * value:.1f} %" if math.isfinite(value) else MISSING


def size(count: float) -> str:
    """Write a number of bytes.

    >>> size(47040), size(0)
    ('47.0 kB', '0 B')
    """
    if not math.isfinite(count):
        return MISSING
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{number(count / factor, 1)} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Write a time span.

    >>> duration(4.25), duration(200), duration(3900)
    ('4.2 s', '3 min 20 s', '1 h 5 min')
    """
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 60:
        return f"{number(seconds, 1)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
