"""The events of training that are written to `metrics.jsonl`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from boovae.config.choose import Choice
from boovae.data import Task
from boovae.training.task_progress import Array, Control, Mask

Event = dict[str, Any]


class Interrupted(Exception):  # noqa: N818 (nothing went wrong)
    """Training was asked to stop; its state is in the checkpoint."""


def listed(array: Array) -> list[float | None]:
    """Return an array as a list for JSON, with None for numbers that are not finite."""
    return [float(f"{value:.8g}") if math.isfinite(value) else None for value in array.tolist()]


def choices_event(index: int, choices: Sequence[Choice]) -> Event:
    """Return the event of the settings that were chosen for a task from its images."""
    return {"event": "choices", "task": index, "choices": [choice._asdict() for choice in choices]}


def task_start(index: int, task: Task) -> Event:
    """Return the event of the start of a task."""
    splits = {"train": task.train, "valid": task.valid, "test": task.test}
    return {
        "event": "task_start",
        "task": index,
        "name": task.name,
        "classes": list(task.classes),
        "images": {name: len(split.images) for name, split in splits.items()},
    }


def epoch_end(
    task: int, epoch: int, numbers: Mapping[str, Mapping[str, Array]], learning_rate: Array, active: Mask
) -> Event:
    """Return the event of an epoch; `numbers` are the loss terms of each split, {split: {term: (R,)}}."""
    return {
        "event": "epoch",
        "task": task,
        "epoch": epoch,
        **{split: {name: listed(array) for name, array in terms.items()} for split, terms in numbers.items()},
        "learning_rate": listed(learning_rate),
        "active": active.tolist(),
    }


def divergence(task: int, epoch: int, replica: int, retry: int | str) -> Event:
    """Return the event of a replica that diverged; `retry` counts from 1, or is "frozen"."""
    return {"event": "divergence", "task": task, "epoch": epoch, "replica": replica, "retry": retry}


def collapse(task: int, collapsed: Mask, kl_warmup: int) -> Event:
    """Return the event of replicas that learn a task once more because their posterior collapsed."""
    return {"event": "collapse", "task": task, "collapsed": collapsed.tolist(), "kl_warmup": kl_warmup}


def task_end(task: int, control: Control) -> Event:
    """Return the event of the end of a task."""
    return {
        "event": "task_end",
        "task": task,
        "epochs": control.epochs.astype(int).tolist(),
        "best_epoch": control.best_epoch.astype(int).tolist(),
        "best_loss": listed(control.best),
    }
