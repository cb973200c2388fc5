"""Forgetting: how much worse a task is modelled now than when it was learned.

The evaluation after task t gives a negative log-likelihood (NLL) for every task s ≤ t. Read over time this is
a triangular task × time matrix; forgetting is its last row minus its diagonal:

    own_s     the change under the task's own part of the prior: the honest number
    pooled_s  the change under the whole prior
    dilution  log(n_≤t / n_≤s): the part of pooled_s that no method can avoid when tasks share the prior's
              mass: task s had the share n_s / n_≤s when it was learned and has n_s / n_≤t now

Positive is worse. Numbers are nats per image. A change is claimed only where both NLLs rest on enough effective
samples: with fewer, each is too high by an amount of its own, and the difference tells of the encoder, not of the task.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from boovae.errors import InputError
from boovae.metrics.evaluation import FEW, NLL, Forgetting
from boovae.metrics.metric import Context, Metric, Number
from boovae.metrics.schema import Floats, rounded


class ChangeOfNLL(Metric):
    """Forgetting: the NLL of a task now compared with the NLL when it was learned."""

    name = section = "forgetting"
    aliases = frozenset({"nll"})

    def measure(self, context: Context) -> Forgetting:
        """Compare the NLL just measured with the history.

        Fewer importance samples give a higher NLL, and fitted posteriors a lower one, so an NLL estimated in another
        way is ignored.
        """
        trainer, last = context.trainer, context.sections["nll"]
        alike = {past.learned: past.nll for past in context.history if past.nll and _way(past.nll) == _way(last)}
        history = [alike.get(seen) for seen in range(1, len(context.tasks))] + [last]
        sizes = [1] * len(history) if trainer.method.equal_masses else trainer.sizes
        found = forgetting(history, sizes, shared_mass=trainer.replicas.model.prior.shares_mass)
        own, pooled, dilution = map(rounded, (found.own, found.pooled, found.dilution))
        return msgspec.structs.replace(found, own=own, pooled=pooled, dilution=dilution)

    def numbers(self, section: Forgetting) -> Iterator[Number]:
        """Yield the change under each task's own part of the prior; the task just learned is left out of the mean."""
        yield Number(section.own, "forgetting")
        yield Number(section.own_claimed[:-1], tag="forgetting")
        if len(section.own) > 1:
            why = not_judged(section)
            yield Number(section.own_claimed[:-1].mean(0), column="forgotten", remark=f"({why})" if why else "")
            lost = of_earlier(section)
            finite = np.isfinite(lost)
            middle = np.where(finite, lost, 0.0).sum(0) / np.maximum(finite.sum(0), 1)
            known = finite.any(0) & np.isfinite(section.claimed(np.zeros_like(lost))).all(0)  # a part is not the whole
            yield Number(np.where(known, middle, np.nan), curve="Forgetting: mean of the earlier tasks, nats")


def of_earlier(section: Forgetting) -> Floats:
    """Return the change of every earlier task, (seen − 1) x [R].

    Methods without components per task have no own part of the prior; the change under the whole prior replaces it.
    What cannot be judged is NaN.
    """
    own = section.own[:-1]
    return section.claimed(own if np.isfinite(own).any() else section.pooled[:-1])


def not_judged(section: Forgetting) -> str:
    """Return why the change of some earlier task is not claimed; empty if that of each is."""
    if section.judged is None or section.effective_samples is None or (section.judged[:-1] != 0).all():
        return ""
    lowest = section.effective_samples[:-1][section.judged[:-1] == 0].min()
    of = f" of {section.samples}" if section.samples else ""
    return f"cannot be judged: effective samples {lowest:.1f}{of}"


def _way(nll: NLL) -> tuple[int | None, bool]:
    """Return how an NLL was estimated."""
    return nll.samples, nll.fitted is not None


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
    return judged(Forgetting(change("own"), change("per_task"), np.array(dilution)), history)


def judged(section: Forgetting, history: Sequence[NLL | None]) -> Forgetting:
    """Return a change with what it rests on, given the NLL after each task; logs of before say nothing of it."""
    now = history[-1]
    if now is None or section.judged is not None or not now.effective_samples.size:
        return section
    unknown = np.full(now.pooled.shape, np.nan)  # is taken for enough
    typical = [unknown[None] if past is None else past.typical_effective for past in history]
    learned = [rows[task] if task < len(rows) else unknown for task, rows in enumerate(typical)]
    effective = np.fmin(now.typical_effective, learned)
    enough = np.where(effective < FEW, 0.0, 1.0)
    return msgspec.structs.replace(section, effective_samples=effective, judged=enough, samples=now.samples)
