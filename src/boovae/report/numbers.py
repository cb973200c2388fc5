"""Averages over replicas, and formatting of numbers."""

import math

import numpy as np
from rich import filesize

from boovae.metrics.schema import Floats

MISSING = "–"


def mean(values: Floats, axis: int = -1) -> Floats:
    """Average over the finite entries; NaN if there are none."""
    return np.ma.filled(np.ma.masked_invalid(values).mean(axis), np.nan)


def deviation(values: Floats, axis: int = -1) -> Floats:
    """Return the sample standard deviation over the finite entries; NaN for fewer than two."""
    return np.ma.filled(np.ma.masked_invalid(values).std(axis, ddof=1), np.nan)


def number(value: float | None, decimals: int | None = None, sign: str = "") -> str:
    """Write a number with about three figures; zero has no sign.

    >>> number(92.345), number(-0.5), number(1234.5), number(-0.001), number(float("nan"))
    ('92.3', '−0.50', '1,234', '0.00', '–')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if decimals is None:
        decimals = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2
    return f"{value:{sign}z,.{decimals}f}".replace("-", "−")


def change(value: float, decimals: int | None = None) -> str:
    """Write a change, with its sign.

    >>> change(2.0), change(-2.0), change(0.001)
    ('+2.00', '−2.00', '0.00')
    """
    text = number(value, decimals, "+")
    return text if text.strip("+0.") else text.removeprefix("+")


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


def nats(cost: float | None) -> str:
    """Write a cost.

    >>> nats(0.01234), nats(2.5), nats(0.0002), nats(None)
    ('0.012 nats', '2.50 nats', '≈ 0 nats', '–')
    """
    if cost is None or not math.isfinite(cost):
        return MISSING
    return "≈ 0 nats" if cost < 0.001 else f"{number(cost, 3 if cost < 1 else None)} nats"


def percent(value: float | None) -> str:
    """Write a share as a percentage.

    >>> percent(0.9876)
    '98.8 %'
    """
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def size(count: int | None) -> str:
    """Write a number of bytes.

    >>> size(47040), size(0)
    ('47.0 kB', '0 B')
    """
    return MISSING if count is None else filesize.decimal(count).replace("bytes", "B")


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
