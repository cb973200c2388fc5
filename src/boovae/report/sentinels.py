"""What may have gone wrong inside a model, in plain words, each with the flag that helps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from boovae.report.numbers import mean, number, percent
from boovae.report.read import Evaluation, Run

#: Share of the encoder's log-variances at their upper limit from which it is a fault.
MOST_AT_LIMIT = 0.25
#: Share of a task's components that should be left when it ends.
LEAST_KEPT = 0.5


def sentinels(run: Run, last: Evaluation) -> list[str]:
    """Return what the newest evaluation and the components say."""
    return [*_collapsed(run, last), *_exploding(run, last), *_idle(run)]


def names(run: Run, tasks: Sequence[int]) -> str:
    """Name up to four tasks."""
    listed = ", ".join(f"“{run.task_name(task)}”" for task in tasks[:4])
    more = f" and {len(tasks) - 4} more" if len(tasks) > 4 else ""
    return f"task{'s' if len(tasks) > 1 else ''} {listed}{more}"


def _collapsed(run: Run, last: Evaluation) -> list[str]:
    active = mean(last.active_units)
    tasks = [task for task in range(last.task + 1) if active[task] < 1]
    if not tasks:
        return []
    return [
        f"The latent space says nothing about the images of {names(run, tasks)}: no latent dimension varies between "
        "them (posterior collapse). A slower start of the KL term (--kl-warmup 50) or a smaller weight of it "
        "(--kl-weight 0.5) helps."
    ]


def _exploding(run: Run, last: Evaluation) -> list[str]:
    share = mean(last.at_upper_limit)
    tasks = [task for task in range(last.task + 1) if share[task] > MOST_AT_LIMIT]
    if not tasks:
        return []
    worst = percent(float(np.nanmax(share)))
    return [
        f"Up to {worst} of the encoder's log-variances of {names(run, tasks)} lie at their upper limit: they would "
        "grow without end. A smaller step (--learning-rate) or a wider range (--log-variance-range) helps."
    ]


def _idle(run: Run) -> list[str]:
    """Dead or duplicate components: a task that kept less than half of its places."""
    wanted = run.config.get("components", "")
    if not wanted.isdigit():
        return []
    kept = {task: float(mean(found.kept)) for task, found in run.kept.items()}
    tasks = sorted(task for task, count in kept.items() if count < LEAST_KEPT * int(wanted))
    if not tasks:
        return []
    twins = max(float(mean(run.kept[task].twins)) for task in tasks)
    twin = f"up to {number(twins, 1)} were duplicates of others, the rest" if twins > 0 else "the others"
    return [
        f"Of {wanted} components only {number(min(kept[task] for task in tasks), 1)} were left to "
        f"{names(run, tasks)}: {twin} had no weight. Fewer (--components) would do, "
        "or the images of a task are too few."
    ]
