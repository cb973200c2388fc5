"""What a study is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boovae.errors import unknown_name

METRICS = ("nll", "diversity", "frechet")


@dataclass(frozen=True)
class Request:
    """A study, its lists, the settings that hold in every cell, and where cells and results lie."""

    study: str
    datasets: Sequence[str]
    methods: Sequence[str]
    tasks: int
    given: Mapping[str, Any]
    cells: Path
    results: Path
    command: str
    metrics: Sequence[str] = ("nll", "diversity")
    config: Path | None = None

    def __post_init__(self) -> None:
        for metric in self.metrics:
            if metric not in METRICS:
                raise unknown_name("metric (--metrics)", metric, METRICS)
