"""The panel of learned components: pictures of each with its weight and the cost of dropping it, task by task."""

import math
from typing import NamedTuple

import numpy as np

from boovae.metrics.schema import Floats
from boovae.report.numbers import number
from boovae.report.run_record import Component, RunRecord

SHOWN = 60  # components per task on the page, the most important first


class Row(NamedTuple):
    """The components of one task."""

    name: str
    story: str
    components: list[Component]


def rows(run: RunRecord) -> list[Row]:
    """Return the components of every task that has any, the costliest to drop first."""
    found = []
    for task in sorted({component.task for component in run.components}):
        every = (component for component in run.components if component.task == task)
        mine = sorted(every, key=lambda component: math.inf if component.cost is None else -component.cost)
        found.append(Row(run.task_name(task), _story(run, task, len(mine)), mine[:SHOWN]))
    return found


def _story(run: RunRecord, task: int, count: int) -> str:
    """Describe how many components a task has, and how many were kept, merged and pruned."""
    several = " in each replica" if len(run.head.seeds) > 1 else ""
    text = f"{count} component{'s' if count > 1 else ''}"
    if count > SHOWN:
        text += f", of which the {SHOWN} costliest to drop are shown"
    if task in run.kept:
        kept, twins = run.kept[task].kept, run.kept[task].twins
        if kept is not None and (_span(kept) != str(count) or (twins > 0).any()):
            text += f"; {_span(kept)} kept when the task ended{several}"
        if (twins > 0).any():
            text += f", {_span(twins)} merged as duplicates"
    dropped = sum((pruning.dropped for pruning in run.prunings if pruning.task == task), np.zeros(len(run.head.seeds)))
    if (dropped > 0).any():
        text += f"; {_span(dropped)} pruned since"
    return f"{text}."


def _span(counts: Floats) -> str:
    """Write the counts of all replicas as a range.

    >>> _span(np.array([14.0, 15.0])), _span(np.array([3.0, 3.0]))
    ('14 to 15', '3')
    """
    finite = counts[np.isfinite(counts)].tolist() or [math.nan]
    low, high = number(min(finite), 0), number(max(finite), 0)
    return low if low == high else f"{low} to {high}"
