"""`boovae replay`: a classifier that learns tasks one after another, with generated images in place of old ones.

The paper's experiment: binary tasks 0/1, 2/3, …; a classifier with a head per task sees the real images of its task
and, for earlier tasks, one of these:

    exact        all old images, the upper bound
    none         nothing, the lower bound
    boo          samples of a VAE with a boosted prior and the paper's penalties, which learns one task after another
    METHOD       the same with the method of the settings, `boo+distill`
    scratch      samples of a VAE that is trained from scratch at every task, on its own samples of the old ones; the
                 paper argues against this

A VAE that learned class by class labels a sample by the prior component that produced it. If it learned the tasks of
the classifier, the classifier labels the samples before it learns the new task. For comparison there is a classifier
that needs neither replay nor training: p(class | x) ∝ p(class) E_{q(z|x)}[p(x|z) r_class(z) / q(z|x)], where r_class is
the part of the prior for a class.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from boovae.config import Settings
from boovae.data import Stream
from boovae.errors import InputError, SettingError
from boovae.experiments.options import ReplayOptions
from boovae.experiments.replay_curve import Costs, Curve, Experiment, Point, learned
from boovae.methods import from_mapping
from boovae.methods.boo import BooSettings
from boovae.replicas.devices import choose_device
from boovae.report.outputs import prepared, save_figure, write_table
from boovae.runs.data import load_data
from boovae.runs.environment import environment
from boovae.runs.progress import make_display
from boovae.runs.train import planned_tasks

#: Weight of the paper's penalties for the generator `boo`, unless the settings have one.
PAPER_LAMBDA = 1.0
#: Both kinds of accuracy, each with a panel.
ACCURACIES = ("task_incremental", "class_incremental")
#: Ticks of the accuracy axes, in percent, and the gap between an accuracy of 100 and the end of the axis.
TICKS, MARGIN = (0, 20, 50, 80, 90, 95, 98, 99, 99.5, 99.9), 0.1


def run(
    settings: Settings,
    out: Path,
    options: ReplayOptions,
    *,
    data_dir: Path | None,
    device: str,
    compile: str,
    quiet: bool,
    command: str,
) -> list[dict[str, Any]]:
    """Learn all curves; write `replay.csv` and `replay.png` after each of them, return the rows."""
    _check(settings, options)
    place, folder = choose_device(device), prepared(out)
    display = make_display(quiet=quiet)
    tasks = planned_tasks(load_data(settings, data_dir), settings)
    classes = load_data(settings.changed(classes_per_task=1), data_dir)
    experiment = Experiment(settings, tasks, classes, place, display, options, compile)
    points, rows = list[Point](), list[dict[str, Any]]()
    with closing(display):
        for curve in curves(settings, experiment.tasks, options.curve):
            points += learned(experiment, curve, experiment.place(folder / "curves", curve))
            rows = table(points, settings)
            write_table(folder / "replay.csv", rows, environment(place, experiment.compiled, command))
            save_figure(folder / "replay.png", draw(points))
    return rows


def _check(settings: Settings, options: ReplayOptions) -> None:
    """Refuse settings that the experiment cannot use before anything is trained."""
    if (classes := settings.data.classes_per_task) < 2:
        raise SettingError("classes_per_task", classes, "at least 2 classes per task for a classifier")
    if not set(settings.method.split("+")) & {"boo", "boo-flow", "mog"} and "method" in options.curve:
        problem = "its prior has no components per task to label samples by; use one with boo, boo-flow or mog"
        raise InputError(f"{{method}} {settings.method}: {problem}")


def curves(settings: Settings, tasks: Stream, wanted: Sequence[str]) -> list[Curve]:
    """Return the curves to draw, the bounds first."""
    bounds = {"exact": Curve("exact replay", keeps=True), "none": Curve("no replay")}
    found = [curve for name, curve in bounds.items() if name in wanted]
    generators = []
    if "boo" in wanted:
        penalties = settings.of(BooSettings).boo_lambda or PAPER_LAMBDA
        generators.append(from_mapping({**settings.flat(), "method": "boo", "boo_lambda": penalties}))
    if "method" in wanted and not (generators and settings.method == "boo"):  # not the same curve twice
        generators.append(settings)
    classes = sum(len(task.classes) for task in tasks)
    for generator in generators:
        found.append(Curve(f"{generator.method}, {classes} VAE tasks", generator, by_class=True))
        found.append(Curve(f"{generator.method}, {len(tasks)} VAE tasks", generator))
    if "scratch" in wanted:
        scratch = from_mapping({**settings.flat(), "method": "scratch", "prior": "vamp"})
        found.append(Curve(f"scratch, {len(tasks)} VAE tasks", scratch))
    return found


# --- the table and the figure ---------------------------------------------------------------------------------------


def table(points: Sequence[Point], settings: Settings) -> list[dict[str, Any]]:
    """Return one row for every curve, number of tasks seen and seed."""
    return [
        {
            "dataset": settings.data.dataset,
            "curve": point.curve,
            "tasks_seen": point.seen,
            "seed": seed,
            **{key: getattr(point, key)[row] for key in ACCURACIES},
            **{item.name: getattr(point, item.name) for item in fields(Costs)},
        }
        for point in points
        for row, seed in enumerate(settings.training.seeds)
    ]


def draw(points: Sequence[Point]) -> Figure:
    """Return the figure: mean accuracy over tasks seen, in both settings, and the training cost of the generators."""
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    costly = {point.curve for point in points if point.generator_images and "p(class" not in point.curve}
    panels = figure.subplots(1, 3 if costly else 2)  # with real images alone there is no cost to show
    for number, name in enumerate(dict.fromkeys(point.curve for point in points)):
        own = [point for point in points if point.curve == name]
        _draw_curve(panels if name in costly else panels[:2], own, f"C{number}")
    by_task, by_class, *rest = panels
    by_task.set(title="task-incremental: the task is named", ylabel="mean accuracy over tasks seen, %")
    by_class.set(title="class-incremental: among all classes seen")
    for cost in rest:
        cost.set(title="cost: images the generator learned, millions")
    for axes in (by_task, by_class):
        _spread(axes)
    for axes in panels:
        axes.set_xlabel("tasks seen")
        axes.set_xticks(sorted({point.seen for point in points}))
        axes.grid(alpha=0.3)
    figure.legend(*by_task.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _draw_curve(panels: Sequence[Axes], points: Sequence[Point], colour: str) -> None:
    """Draw a curve: accuracies with a band from the lowest to the highest replica, and the cost if there is a panel."""
    name, seen = points[0].curve, [point.seen for point in points]
    style: dict[str, Any] = {"label": name, "color": colour, "marker": "o", "markersize": 4}
    style["linestyle"] = "--" if "replay" in name.split(",")[0] else "-"
    for axes, key in zip(panels, ACCURACIES, strict=False):
        values = 100 * np.array([getattr(point, key) for point in points])
        axes.plot(seen, values.mean(1), **style)
        axes.fill_between(seen, values.min(1), values.max(1), color=colour, alpha=0.15, linewidth=0)
    for axes in panels[len(ACCURACIES) :]:
        axes.plot(seen, [point.generator_images / 1e6 for point in points], **style)


def _spread(axes: Axes) -> None:
    """Make an axis of accuracies logarithmic in the error, with room near 100 %."""
    low, high = axes.get_ylim()
    end = 100 + MARGIN
    axes.set_yscale("function", functions=(lambda a: -np.log(np.maximum(end - a, 1e-9)), lambda v: end - np.exp(-v)))
    axes.set_ylim(max(0.0, low), min(high, 100.0))
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
