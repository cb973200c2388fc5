"""The charts of a page: numbers as tasks arrive, beside the joint bound and the paper; training; the latent map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from boovae.bench.published import METHOD_NAMES
from boovae.report.charts import (
    COLOURS,
    Series,
    distance_over_tasks,
    forgetting_over_tasks,
    over_components,
    over_epochs,
    over_tasks,
)
from boovae.report.findings import distance_name, printed
from boovae.report.plots import SYMBOLS, Chart, Line, line_plot, map_plot, round_of
from boovae.report.read import Run

#: Metrics that the paper prints.
PRINTED = ("nll", "diversity")


def is_joint(run: Run) -> bool:
    """Whether a run was trained on everything at once: the bound of the others."""
    return "joint" in run.method.split("+")


def has_paper(runs: Sequence[Run]) -> bool:
    """Whether the paper has a number beside any of the runs."""
    return any(_paper(run, metric, 0) for run in runs for metric in PRINTED)


def curves(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """Draw NLL, diversity, forgetting, distances and memory over the tasks seen."""

    def lines(make: Callable[[Run, int], Series], metric: str = "") -> list[Line]:
        ours = [
            Line(label, make(run, index), index, "joint" if is_joint(run) else "run")
            for index, (run, label) in enumerate(zip(runs, labels, strict=True))
            if run.evaluations
        ]
        return ours + [line for index, run in enumerate(runs) for line in _paper(run, metric, index)]

    distances = [
        (lines(partial(distance_over_tasks, features)), f"{distance_name(features)} (0 is best)")
        for features in dict.fromkeys(name for run in runs for e in run.evaluations for name in e.fidelity)
    ]
    drawn = [
        line_plot(found, title, "tasks seen", at="tasks seen: %{x}")
        for found, title in (
            (lines(lambda run, colour: over_tasks(run, "nll", colour), "nll"), "NLL of all tasks seen, nats"),
            (lines(lambda run, colour: over_tasks(run, "diversity", colour), "diversity"), "Diversity (0 is best)"),
            (lines(forgetting_over_tasks), "Forgetting: mean of the earlier tasks, nats"),
            *distances,
            (lines(_memory), "Memory of the past per replica, kB"),
        )
    ]
    return [chart for chart in drawn if chart]


def _paper(run: Run, metric: str, index: int) -> list[Line]:
    """Return the paper's line for a run, if there is one and something to put beside it."""
    if metric not in PRINTED or not run.evaluations:
        return []
    found = [(seen, printed(run, metric, seen)) for seen in range(1, run.planned + 1)]
    numbers = [(float(seen), number.mean, number.std) for seen, number in found if number]
    if not numbers:
        return []
    x, y, band = np.array(numbers, dtype=np.float64).T
    return [Line(f"{METHOD_NAMES[run.method]} in the paper", Series(x, y, band, index, marks=True), index, "paper")]


def _memory(run: Run, colour: int) -> Series:
    seen = np.array([evaluation.task + 1.0 for evaluation in run.evaluations])
    kilobytes = np.array([evaluation.memory_bytes / 1000 for evaluation in run.evaluations])
    return Series(seen, kilobytes, np.zeros(len(seen)), colour, marks=True)


def training(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """Draw validation loss and KL over the epochs; for a single run the training loss too."""

    def lines(key: str, names: Sequence[str]) -> list[Line]:
        found = []
        for index, (run, name) in enumerate(zip(runs, names, strict=True)):
            series = over_epochs(run, key, index)
            found.append(Line(name, series, index, "joint" if is_joint(run) else "run", _moments(run, series)))
        return found

    loss = lines("valid_loss", labels if len(runs) > 1 else ["validation"])
    if len(runs) == 1:
        series = over_epochs(runs[0], "train_loss", 1, dashed=True)
        loss.append(Line("training", series, 0, "run", _moments(runs[0], series)))
    drawn = [
        line_plot(loss, "Validation loss" if len(runs) > 1 else "Loss", "tasks done", ends=True, clip=True),
        line_plot(lines("valid_kl", labels), "Validation KL", "tasks done", ends=True),
    ]
    return [chart for chart in drawn if chart]


def _moments(run: Run, series: Series) -> list[str]:
    """Say of every point of a training curve which task it was and how far in it."""
    tasks = np.ceil(series.x).astype(int) - 1
    shares = series.x - tasks
    return [f"{run.task_name(task)}, {share:.0%} through" for task, share in zip(tasks.tolist(), shares, strict=True)]


def gains(run: Run) -> Chart | None:
    """Draw what each further component of a task gained, a line for each task."""
    found = [Line(run.task_name(task), over_components(gain, task)) for task, gain in run.gains.items()]
    return line_plot(found, "Gained over the smallest mixture, nats", "components", at="components: %{x}")


def latent_map(run: Run) -> Chart | None:
    """Draw test images and the prior's components in the plane where the images spread most."""
    if run.latents is None:
        return None
    owners = {place.task for place in run.latents.components if place.task is not None}
    names = {task: run.task_name(task) for task in owners | {codes.task for codes in run.latents.codes}}
    return map_plot(run.latents, names, "Codes and components")


@dataclass(frozen=True)
class TaskLabel:
    """A task in the legend of charts that show tasks; `colour` as there."""

    label: str
    colour: int
    again: bool  # the colours are used up
    mark: str  # on a map


def task_legend(run: Run) -> list[TaskLabel]:
    """Return the tasks of a run in the colours in which charts show them."""
    shown = set(run.gains) | ({codes.task for codes in run.latents.codes} if run.latents else set())
    return [
        TaskLabel(run.task_name(task), task % COLOURS, task >= COLOURS, list(SYMBOLS.values())[round_of(task)])
        for task in sorted(shown)
    ]
