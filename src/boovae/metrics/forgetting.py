"""Forgetting: how much worse a task is modelled now than when it was learned.

The evaluation after task t gives a negative log-likelihood (NLL) for every task s ≤ t. Read over time this is
a triangular task × time matrix; forgetting is its last row minus its diagonal:

    own_s     the change under the task's own part of the prior: the honest number
    pooled_s  the change under the whole prior
    dilution  log(n_≤t / n_≤s): the part of pooled_s that no method can avoid when tasks share the prior's
              mass, because task s held n_s / n_≤s of it when it was learned and holds n_s / n_≤t of it now

Positive is worse. Numbers are nats per image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from boovae.errors import InputError

History = Sequence[Sequence[Sequence[float | None]]]
"""`history[t][s][r]`: the NLL of task s ≤ t after learning task t, replica r; `None` if it was not finite."""


class Forgetting(NamedTuple):
    """The change of every task's NLL since it was learned, float64."""

    own: Tensor
    """`(seen, R)`: under the task's own part of the prior."""
    pooled: Tensor
    """`(seen, R)`: under the whole prior."""
    dilution: Tensor
    """`(seen,)`: the part of `pooled` due to the prior's mass being shared among more tasks."""


class Summary(NamedTuple):
    """Forgetting in two numbers per replica, over all tasks but the newest; `nan` (−1) if there is none."""

    mean: Tensor
    """`(R,)`: mean over the old tasks."""
    worst: Tensor
    """`(R,)`: that of the task forgotten most."""
    worst_task: Tensor
    """`(R,)` int64: which task that is."""


def forgetting(own: History, pooled: History, sizes: Sequence[int], *, shared_mass: bool) -> Forgetting:
    """Return the change of every task's NLL between the time it was learned and the last time.

    Args:
        own: NLL under the task's own part of the prior, `own[time][task][replica]`.
        pooled: NLL under the whole prior, likewise.
        sizes: training images per task, whose shares are the tasks' masses in the prior; all 1 where tasks
            have equal mass.
        shared_mass: whether the tasks share the prior's mass; if not (a standard normal, one head per task),
            the dilution is zero.

    >>> after = [[[100.0]], [[101.5], [90.0]]]  # one replica: task 0 went from 100 to 101.5 nats
    >>> change = forgetting(after, after, sizes=[500, 500], shared_mass=True)
    >>> change.own.tolist(), [round(x, 3) for x in change.dilution.tolist()]
    ([[1.5], [0.0]], [0.693, 0.0])
    """
    under_own, under_all = _change(own, "own"), _change(pooled, "pooled")
    if under_own.shape != under_all.shape:
        covered = f"own covers {tuple(under_own.shape)} tasks x replicas, pooled {tuple(under_all.shape)}"
        raise InputError(f"{covered}: give both from the same run")
    if len(sizes) != len(own) or min(sizes) < 1:
        raise InputError(f"sizes {list(sizes)}: give one positive number of images for each of the {len(own)} tasks")
    total = list(accumulate(sizes))
    dilution = [math.log(total[-1] / n) if shared_mass else 0.0 for n in total]
    return Forgetting(under_own, under_all, torch.tensor(dilution, dtype=torch.float64))


def task_time_matrix(history: History, name: str = "history") -> Tensor:
    """Return the NLL of task s after task t as `matrix[t, s, r]`, `(T, T, R)` float64.

    Tasks not yet seen are `nan`; `name` is what an error message calls the argument.

    >>> task_time_matrix([[[4.0]], [[5.0], [6.0]]])[..., 0]
    tensor([[4., nan],
            [5., 6.]], dtype=torch.float64)
    """
    if len(history) == 0:
        raise InputError(f"{name} is empty: give the evaluation after every task, from the first on")
    replicas = {len(row) for after in history for row in after}
    if len(replicas) != 1 or any(len(after) != t + 1 for t, after in enumerate(history)):
        rows = [len(after) for after in history]
        raise InputError(
            f"{name} has {rows} tasks over time and {sorted(replicas)} replicas: the evaluation after task t "
            "must hold tasks 0 to t, each with the same replicas"
        )
    tasks = len(history)
    matrix = torch.full((tasks, tasks, replicas.pop()), math.nan, dtype=torch.float64)
    for t, after in enumerate(history):
        values = [[math.nan if x is None else float(x) for x in row] for row in after]
        matrix[t, : t + 1] = torch.tensor(values, dtype=torch.float64)
    return matrix


def summary(change: Tensor) -> Summary:
    """Return mean and worst of a change `(seen, R)` over the old tasks, that is without the last row.

    >>> s = summary(torch.tensor([[1.0], [4.0], [0.0]]))
    >>> s.mean.item(), s.worst.item(), s.worst_task.item()
    (2.5, 4.0, 1)
    """
    if change.ndim != 2 or len(change) == 0:
        raise InputError(f"change has shape {tuple(change.shape)}: give (tasks seen, replicas)")
    old = change[:-1].double()
    if len(old) == 0:
        none = torch.full_like(change[0], math.nan, dtype=torch.float64)
        return Summary(none, none.clone(), torch.full_like(none, -1, dtype=torch.int64))
    worst, task = old.max(0)  # nan wins, so a diverged replica is not called good
    return Summary(old.mean(0), worst, task.where(worst.isfinite(), -1))


def _change(history: History, name: str) -> Tensor:
    """Last row minus diagonal, `(T, R)`."""
    matrix = task_time_matrix(history, name)
    learned = matrix.diagonal(dim1=0, dim2=1).mT  # (R, T) -> (T, R)
    return matrix[-1] - learned
