"""`boovae bench paper`: the paper's NLL and diversity tables, its curves and its samples, measured with our code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from boovae.experiments import grid
from boovae.experiments.measured import Measured
from boovae.experiments.paper import DATASETS, METHODS
from boovae.experiments.request import Request
from boovae.experiments.tables import HEAD, as_csv, table
from boovae.files import write_file

__all__ = ["DATASETS", "METHODS", "plan", "write"]


def plan(request: Request) -> list[grid.Cell]:
    """Return the cells of datasets x methods."""
    return grid.plan(request.datasets, request.methods, request.given, request.tasks, request.config)


def write(request: Request, measured: Sequence[Measured]) -> Mapping[str, Any]:
    """Write every number, the tables beside the paper's, the figures and the page."""
    folder = request.results
    for numbers in measured:
        numbers.write_csv(folder / f"{_file_name(numbers.dataset)}.csv", request.command)
    for metric in request.metrics:
        tables = [table(numbers, metric) for numbers in measured]
        write_file(folder / f"{metric}.csv", as_csv(HEAD, (record for each in tables for record in each.records())))
        write_file(folder / f"{metric}.md", "\n".join(each.markdown() for each in tables).encode())
    return {}


def _file_name(dataset: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_-" else "-" for letter in dataset)
