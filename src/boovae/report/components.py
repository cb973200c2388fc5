"""The panel of learned components: pictures of each with its weight and the cost of dropping it, task by task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from boovae.metrics.schema import Floats
from boovae.report.findings import known
from boovae.report.frame import image_source
from boovae.report.numbers import MISSING, number, percent
from boovae.report.run_record import Component, RunRecord

SHOWN = 60  # components per task on the page, the most important first


@dataclass(frozen=True)
class Tile:
    """One component: pseudo-input, decoded image, weight and the cost of dropping it."""

    pseudo_input: str
    decoded: str
    alt: str
    decoded_alt: str
    weight: str
    cost: str
    wide: bool  # a strip of colours, not an image


@dataclass(frozen=True)
class Row:
    """The components of one task."""

    name: str
    story: str
    tiles: list[Tile]


def rows(run: RunRecord) -> list[Row]:
    """Return the components of every task that has any, the costliest to drop first."""
    found = []
    for task in sorted({component.task for component in run.components}):
        mine = [component for component in run.components if component.task == task]
        mine.sort(key=lambda component: math.inf if component.cost is None else -component.cost)
        name = run.task_name(task)
        tiles = [_tile(component, name, only=len(mine) == 1) for component in mine[:SHOWN]]
        found.append(Row(name, _story(run, task, len(mine)), tiles))
    return found


def _tile(component: Component, name: str, *, only: bool) -> Tile:
    weight = percent(known(component.weight))
    cost = "the only one" if only else nats(known(component.cost))
    loss = "it is the only one" if only else f"dropping it costs {cost}"
    width, height = (int.from_bytes(component.decoded[at : at + 4], "big") for at in (16, 20))  # in the PNG's header
    return Tile(
        pseudo_input=image_source(component.pseudo_input),
        decoded=image_source(component.decoded),
        alt=f"Pseudo-input {component.component} of task {name}: weight {weight}, {loss}",
        decoded_alt=f"Decoded image of pseudo-input {component.component}",
        weight=weight,
        cost=cost,
        wide=width > 2 * height,
    )


def nats(cost: float) -> str:
    """Write a cost.

    >>> nats(0.01234), nats(2.5), nats(0.0002), nats(float("nan"))
    ('0.012 nats', '2.50 nats', '≈ 0 nats', '–')
    """
    if not math.isfinite(cost):
        return MISSING
    if cost < 0.001:
        return "≈ 0 nats"
    return f"{number(cost, 3 if cost < 1 else None)} nats"


def _story(run: RunRecord, task: int, count: int) -> str:
    """Describe how many components a task has, and how many were kept, merged and pruned."""
    several = " in each replica" if len(run.seeds) > 1 else ""
    text = f"{count} component{'s' if count > 1 else ''}"
    if count > SHOWN:
        text += f", of which the {SHOWN} costliest to drop are shown"
    if task in run.kept:
        kept, twins = run.kept[task].kept, run.kept[task].twins
        if kept is not None and (_span(kept) != str(count) or (twins > 0).any()):
            text += f"; {_span(kept)} kept when the task ended{several}"
        if (twins > 0).any():
            text += f", {_span(twins)} merged as duplicates"
    dropped = sum((pruning.dropped for pruning in run.prunings if pruning.task == task), np.zeros(len(run.seeds)))
    if (dropped > 0).any():
        text += f"; {_span(dropped)} pruned since"
    return f"{text}."


def _span(counts: Floats) -> str:
    """Write the counts of all replicas as a range.

    >>> _span(np.array([14.0, 15.0])), _span(np.array([3.0, 3.0]))
    ('14 to 15', '3')
    """
    finite: Sequence[float] = counts[np.isfinite(counts)].tolist() or [math.nan]
    low, high = number(min(finite), 0), number(max(finite), 0)
    return low if low == high else f"{low} to {high}"
