"""What the tests of the bench share: cells that take a moment, and summaries that nobody trained for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from boovae.bench.cells import Cell
from boovae.bench.executors import Handle
from boovae.bench.request import FORMAT, Request
from boovae.bench.results import Summary
from boovae.bench.worker import Answer, Job, make_job, work
from boovae.methods import resolve
from boovae.metrics.evaluation import read_evaluation
from conftest import TINY

GIVEN = {name: value for name, value in TINY.items() if name not in ("method", "tasks")}


class Inline:
    """An executor that does every job at once, in this process; `before` may change or refuse it."""

    def __init__(self, before: Callable[[Job], Answer | None] = lambda job: None, slots: int = 1) -> None:
        self.slots = slots
        self.before = before
        self.done: list[str] = []

    def submit(self, job: Job) -> Handle:
        self.done.append(job["label"])
        answer = self.before(job) or work(job)
        return Handle(lambda: True, lambda: answer, lambda: None)

    def close(self) -> None:
        pass


def job_of(cell: Cell, folder: Path) -> Job:
    return make_job(cell, request(folder, out=folder, device="cpu", compile="off"))


def request(folder: Path, **changes: Any) -> Request:
    """Return what a command asks for: `boo` on the digits, unless told otherwise."""
    lists: dict[str, Any] = {"study": "paper", "datasets": ("digits",), "methods": ("boo",), "given": {}}
    places: dict[str, Any] = {"out": folder / "cells", "results": folder / "results", "command": "boovae bench"}
    return Request(**{**lists, **places, **changes})


def made_up(cell: Cell, nll: Callable[[int, int], float], shares: Callable[[int], list[float]]) -> Summary:
    """Return the summary of a cell: `nll(seen, seed)` and the `shares(seen)` of the classes are given."""
    return typed(made_up_record(cell, nll, shares))


def typed(record: Summary) -> Summary:
    """Return a record as `read_summary` does, its evaluations typed."""
    evaluations = [read_evaluation(each, "made up", len(record["seeds"])) for each in record["evaluations"]]
    return record | {"evaluations": evaluations}


def made_up_record(cell: Cell, nll: Callable[[int, int], float], shares: Callable[[int], list[float]]) -> Summary:
    """Return the same as JSON has it."""
    settings = cell.settings
    counts = range(1, (settings.data.tasks or 1) + 1)
    return {
        "format": FORMAT,
        "settings": settings.flat(),
        "environment": {"boovae": "0", "python": "3", "torch": "2", "device": "none", "commit": "abc"},
        "seeds": list(settings.training.seeds),
        "tasks": [str(task) for task in range(settings.data.tasks or 1)],
        "evaluations": [_evaluation(cell, seen, nll, shares) for seen in counts],
        "divergences": [],
        "kept": {task: [15, 14] for task in range(settings.data.tasks or 1)},
        "seconds": {"train": 2.0, "evaluate": 1.0},
    }


def _evaluation(
    cell: Cell, seen: int, nll: Callable[[int, int], float], shares: Callable[[int], list[float]]
) -> dict[str, Any]:
    import math

    seeds = cell.settings.training.seeds
    found = [nll(seen * cell.together, seed) for seed in seeds]
    share = shares(seen * cell.settings.data.classes_per_task)
    entropy = -sum(p * math.log(p) for p in share if p)
    zeros = [[0.0] * len(seeds)] * seen
    return {
        "event": "evaluation",
        "task": seen - 1,
        "seen": seen,
        "nll": {"pooled": found, "per_task": [found] * seen, "own": [found] * seen, "effective_samples": zeros},
        "diversity": {"table": [math.log(len(share)) - entropy] * len(seeds), "proportions": [share] * len(seeds)}
        | {"samples": 1000},
        "forgetting": {"own": zeros},
        "ledger": {"memory_bytes": 7},
    }


def paper_cell(dataset: str, method: str, **changes: Any) -> Cell:
    values = {"dataset": dataset, "method": method, "tasks": 10, "replicas": 2, **changes}
    return Cell(method, resolve(values, preset="paper"))
