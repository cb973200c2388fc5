"""Forgetting: how much worse a task is modelled now than when it was learned.

The evaluation after task t gives a negative log-likelihood (NLL) for every task s ≤ t. Read over time this is
a triangular task × time matrix; forgetting is its last row minus its diagonal:

    own_s     the change under the task's own part of the prior: the honest number
    pooled_s  the change under the whole prior
    dilution  log(n_≤t / n_≤s): the part of pooled_s that no method can avoid when tasks share the prior's
              mass: task s had the share n_s / n_≤s when it was learned and has n_s / n_≤t now

Positive is worse. Numbers are nats per image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from boovae.errors import InputError
from boovae.metrics.evaluation import NLL, Forgetting
from boovae.metrics.metric import Context, Metric, Number
from boovae.metrics.schema import Floats, rounded


class ChangeOfNLL(Metric):
    """Forgetting: the NLL of a task now compared with the NLL when it was learned."""

    name = section = "forgetting"
    aliases = frozenset({"nll"})

    def measure(self, context: Context) -> Forgetting:
        """Compare the NLL just measured with the history.

        Fewer importance samples give a higher NLL, so an NLL estimated with another number of them is ignored.
        """
        trainer, last = context.trainer, context.sections["nll"]
        alike = {past.learned: past.nll for past in context.history if past.nll and past.nll.samples == last.samples}
        history = [alike.get(seen) for seen in range(1, len(context.tasks))] + [last]
        sizes = [1] * len(history) if trainer.method.equal_masses else trainer.sizes
        found = forgetting(history, sizes, shared_mass=trainer.replicas.model.prior.shares_mass)
        return Forgetting(rounded(found.own), rounded(found.pooled), rounded(found.dilution))

    def numbers(self, section: Forgetting) -> Iterator[Number]:
        """Yield the change under each task's own part of the prior; the task just learned is left out of the mean."""
        yield Number(section.own, "forgetting")
        yield Number(section.own[:-1], tag="forgetting")
        if len(section.own) > 1:
            yield Number(section.own[:-1].mean(0), column="forgotten")
            lost = of_earlier(section)
            finite = np.isfinite(lost)
            middle = np.where(finite, lost, 0.0).sum(0) / np.maximum(finite.sum(0), 1)
            curve = "Forgetting: mean of the earlier tasks, nats"
            yield Number(np.where(finite.any(0), middle, np.nan), curve=curve)


def of_earlier(section: Forgetting) -> Floats:
    """Return the change of every earlier task, (seen − 1) x [R].

    Methods without components per task have no own part of the prior; the change under the whole prior replaces it.
    """
    own = section.own[:-1]
    return own if np.isfinite(own).any() else section.pooled[:-1]


def forgetting(history: Sequence[NLL | None], sizes: Sequence[int], *, shared_mass: bool) -> Forgetting:
    """Return the change of every task's NLL between the time it was learned and the last time.

    Args:
        history: the NLL after each task, the current one last; None if it was not measured.
        sizes: training images per task; their shares are the tasks' masses in the prior. All 1 for equal masses.
        shared_mass: whether the tasks share the prior's mass; if not (a standard normal, one head per task),
            dilution is zero.

    >>> first, now = (NLL(np.array([90.0]), *[np.array(rows)] * 3) for rows in ([[100.0]], [[101.5], [90.0]]))
    >>> change = forgetting([first, now], sizes=[500, 500], shared_mass=True)
    >>> change.own.tolist(), [round(x, 3) for x in change.dilution.tolist()]
    ([[1.5], [0.0]], [0.693, 0.0])
    """
    now = history[-1]
    if now is None or len(sizes) != len(history) or min(sizes) < 1:
        raise InputError(f"sizes {list(sizes)}: give a positive number of images for each of {len(history)} tasks")

    def change(key: str) -> Floats:
        last: Floats = getattr(now, key)
        missing = np.full(last.shape[1], np.nan)
        learned = [missing if past is None else getattr(past, key)[task] for task, past in enumerate(history)]
        changed: Floats = last - np.array(learned)
        return changed

    total = list(accumulate(sizes))
    dilution = [math.log(total[-1] / n) if shared_mass else 0.0 for n in total]
    return Forgetting(change("own"), change("per_task"), np.array(dilution))
