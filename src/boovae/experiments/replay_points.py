"""The points of the curves of `boovae replay`, as a table and as the paper's figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from boovae.config import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: The ticks of the accuracy axes, in percent, and how far under its end an accuracy of 100 lies.
TICKS, MARGIN = (0, 20, 50, 80, 90, 95, 98, 99, 99.5, 99.9), 0.1


class Point(NamedTuple):
    """One curve after one task: accuracies of each replica, means over the tasks seen, and what it took."""

    curve: str
    seen: int
    task_incremental: list[float]
    class_incremental: list[float]
    generator_images: int  # that the generator has learned from so far, each as often as it was seen, per replica
    generator_seconds: float  # all replicas together
    classifier_seconds: float


def table(points: Sequence[Point], settings: Settings) -> list[dict[str, Any]]:
    """Return one row for every curve, number of tasks seen and seed."""
    return [
        {
            "dataset": settings.data.dataset,
            "curve": point.curve,
            "tasks_seen": point.seen,
            "seed": seed,
            "task_incremental": point.task_incremental[row],
            "class_incremental": point.class_incremental[row],
            "generator_images": point.generator_images,
            "generator_seconds": point.generator_seconds,
            "classifier_seconds": point.classifier_seconds,
        }
        for point in points
        for row, seed in enumerate(settings.training.seeds)
    ]


def draw(points: Sequence[Point]) -> Figure:
    """Return the figure: mean accuracy over tasks seen, both ways, and what the generators had to learn from."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.6), layout="constrained")
    costly = {point.curve for point in points if point.generator_images and "p(class" not in point.curve}
    by_task, by_class, *rest = figure.subplots(1, 3 if costly else 2)  # of real images alone there is no cost to show
    for number, name in enumerate(dict.fromkeys(point.curve for point in points)):
        own = [point for point in points if point.curve == name]
        seen = [point.seen for point in own]
        style: dict[str, Any] = {"color": f"C{number}", "marker": "o", "markersize": 4}
        style["linestyle"] = "--" if "replay" in name.split(",")[0] else "-"
        for axes, key in ((by_task, "task_incremental"), (by_class, "class_incremental")):
            values = 100 * np.array([getattr(point, key) for point in own])
            axes.plot(seen, values.mean(1), label=name, **style)
            axes.fill_between(seen, values.min(1), values.max(1), color=f"C{number}", alpha=0.15, linewidth=0)
        if name in costly:
            rest[0].plot(seen, [point.generator_images / 1e6 for point in own], label=name, **style)
    by_task.set(title="task-incremental: the task is named", ylabel="mean accuracy over tasks seen, %")
    by_class.set(title="class-incremental: among all classes seen")
    for cost in rest:
        cost.set(title="cost: images the generator learned, millions")
    for axes in (by_task, by_class):
        _spread(axes)
    for axes in (by_task, by_class, *rest):
        axes.set_xlabel("tasks seen")
        axes.set_xticks(sorted({point.seen for point in points}))
        axes.grid(alpha=0.3)
    figure.legend(*by_task.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _spread(axes: Axes) -> None:
    """Give an axis of accuracies room where they are near 100 %: it is even in the logarithm of the error."""
    import numpy as np

    low, high = axes.get_ylim()
    end = 100 + MARGIN
    axes.set_yscale("function", functions=(lambda a: -np.log(np.maximum(end - a, 1e-9)), lambda v: end - np.exp(-v)))
    axes.set_ylim(max(0.0, low), min(high, 100.0))
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
