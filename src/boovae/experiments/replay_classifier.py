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

A curve has a checkpoint after each task, and leaves its points in a small JSON file when it is finished, so the same
command continues where it was stopped. Both files are named by a hash of everything that decides the numbers of the
curve: curves of different settings never mix.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from boovae.config import Settings
from boovae.data import Stream, Task
from boovae.errors import InputError, SettingError
from boovae.experiments.classifiers import Classifiers, accuracies, class_scores
from boovae.experiments.options import ReplayOptions
from boovae.files import TEXT_BYTES, read_file, write_file
from boovae.methods import from_mapping
from boovae.methods.boo import BooSettings
from boovae.model import VAE
from boovae.replicas import Draw
from boovae.replicas.devices import choose_device, compiles
from boovae.report.outputs import prepared, save_figure, write_table
from boovae.runs.data import load_data
from boovae.runs.environment import environment
from boovae.runs.progress import Display, Watch, make_display
from boovae.runs.train import planned_tasks, trainer_for
from boovae.training.checkpoint import load_checkpoint, save_checkpoint
from boovae.training.sampling import generate
from boovae.training.state import group, prefixed, put
from boovae.training.trainer import Trainer

#: Weight of the paper's penalties for the generator `boo`, unless the settings have one.
PAPER_LAMBDA = 1.0
#: Both kinds of accuracy, each with a panel.
ACCURACIES = ("task_incremental", "class_incremental")
#: Ticks of the accuracy axes, in percent, and the gap between an accuracy of 100 and the end of the axis.
TICKS, MARGIN = (0, 20, 50, 80, 90, 95, 98, 99, 99.5, 99.9), 0.1


class Curve(NamedTuple):
    """What replaces old images: all of them, nothing, or samples of a generator."""

    name: str
    generator: Settings | None = None
    by_class: bool = False  # the generator learns class by class, not in the tasks of the classifier
    keeps: bool = False  # old images stay available


@dataclass
class Costs:
    """The costs of a curve so far."""

    generator_images: int = 0  # seen by the generator in training, with repetitions, per replica
    generator_seconds: float = 0.0  # for all replicas together
    classifier_seconds: float = 0.0


@dataclass(kw_only=True)
class Point(Costs):
    """One curve after one task: accuracies of each replica, averaged over the tasks seen, and the costs so far."""

    curve: str
    seen: int
    task_incremental: list[float]
    class_incremental: list[float]


@dataclass
class Experiment:
    """What all curves share."""

    settings: Settings
    tasks: Stream  # of the classifier
    classes: Stream  # the same images, one class per task
    device: torch.device
    display: Display
    options: ReplayOptions
    compile: str

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The classes of each task."""
        return [task.classes for task in self.tasks]

    def parts(self, seen: int) -> list[Task]:
        """Return the tasks seen, split into classes."""
        by_class = {task.classes[0]: task for task in self.classes}
        return [by_class[label] for group in self.groups[:seen] for label in group]

    def images(self, tasks: Sequence[Task], split: str) -> tuple[Tensor, Tensor]:
        """Return all images of a split of some tasks (n, D), and their labels (n,)."""
        columns = zip(*(getattr(task, split) for task in tasks), strict=True)
        images, labels = (torch.cat(column).to(self.device) for column in columns)
        return images, labels

    def place(self, folder: Path, curve: Curve) -> Path:
        """Return the folder of a curve's checkpoints, named by a hash of everything that decides its numbers."""
        key = {
            "curve": curve.name,
            "seeds": self.settings.training.seeds,
            "generator": curve.generator and curve.generator.flat(),
            "classifier": [getattr(self.options, item.name) for item in fields(ReplayOptions) if item.name != "curve"],
            "data": (self.tasks.split_record, self.groups),
        }
        text, words = json.dumps(key, sort_keys=True), re.sub(r"[^a-z0-9+]+", "-", curve.name.lower()).strip("-")
        return folder / f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


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
    tasks = planned_tasks(load_data(settings, data_dir), settings)
    classes = load_data(settings.changed(classes_per_task=1), data_dir)
    compiled = compiles(compile, sum(len(task.train.images) for task in tasks), settings, place)
    points, rows = list[Point](), list[dict[str, Any]]()
    with closing(make_display(quiet=quiet)) as display:
        experiment = Experiment(settings, tasks, classes, place, display, options, compile)
        for curve in curves(settings, tasks, options.curve):
            points += learned(experiment, curve, experiment.place(folder / "curves", curve))
            rows = table(points, settings)
            write_table(folder / "replay.csv", rows, environment(place, compiled, command))
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


# --- one curve -------------------------------------------------------------------------------------------------------


def learned(experiment: Experiment, curve: Curve, place: Path) -> list[Point]:
    """Return the points of a curve: read them if it is finished, else learn the remaining tasks."""
    finished = place.with_name(f"{place.name}.json")
    if finished.exists():
        try:
            points = [Point(**point) for point in json.loads(read_file(finished, TEXT_BYTES))["points"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"cannot read {finished} ({error}): remove it to learn the curve again") from error
        experiment.display.note(f"{curve.name}: found in {place.parent}")
        return points
    learner = Learner(experiment, curve)
    for index, task in list(enumerate(experiment.tasks))[learner.load(place) :]:
        learner.learn(index, task)
        learner.save(place)
    write_file(finished, json.dumps({"points": [vars(point) for point in learner.points]}, indent=1).encode())
    shutil.rmtree(place, ignore_errors=True)
    return learner.points


class Learner:
    """A curve while it is learned: its classifiers, its generator if it has one, and its points so far."""

    def __init__(self, experiment: Experiment, curve: Curve) -> None:
        self.experiment, self.curve = experiment, curve
        stream, device, seeds = experiment.tasks, experiment.device, experiment.settings.training.seeds
        pixels, classes = stream[0].train.images.shape[1], len(stream.class_names)
        self.classifiers = Classifiers(pixels, classes, seeds, device, dropout=experiment.options.dropout)
        settings = curve.generator
        self.trainer = None if settings is None else trainer_for(settings, stream, device, experiment.compile)
        self.costs = Costs()
        self.points: list[Point] = []

    def save(self, place: Path) -> None:
        """Write a checkpoint."""
        tensors, rest = self.trainer.state() if self.trainer is not None else ({}, None)
        together = prefixed("classifiers", self.classifiers.replicas.tensors()) | prefixed("generator", tensors)
        record = {"tasks": self.classifiers.tasks, "costs": list(vars(self.costs).values()), "generator": rest}
        save_checkpoint(place, together, record | {"points": [vars(point) for point in self.points]})

    def load(self, place: Path) -> int:
        """Continue from the last checkpoint; return how many tasks it has learned, 0 without one."""
        found = load_checkpoint(place, owner=True)
        if found is None:
            return 0
        tensors, record = found
        put(self.classifiers.replicas.tensors(), group(tensors, "classifiers"))
        self.classifiers.tasks = record["tasks"]
        if self.trainer is not None:
            self.trainer.load_state(group(tensors, "generator"), record["generator"])
        self.costs = Costs(*record["costs"])
        self.points = [Point(**point) for point in record["points"]]
        return self.classifiers.tasks

    def learn(self, index: int, task: Task) -> None:
        """Learn a task from its images, and from real or generated images of earlier tasks if the curve has any."""
        experiment, curve, trainer = self.experiment, self.curve, self.trainer
        if trainer is None:
            experiment.display.note(f"{curve.name}: task {index + 1}/{len(experiment.tasks)} ({task.name})")
            visible = experiment.tasks[: index + 1] if curve.keeps else [task]
            images, labels = experiment.images(visible, "train")
        else:
            images, labels = self._with_samples(trainer, index, task)
        options = experiment.options
        schedule = {"epochs": options.classifier_epochs, "batch_size": options.classifier_batch}
        with self._timed("classifier_seconds"):
            self.classifiers.learn(images, labels, task.classes, **schedule)
        test, truth = experiment.images(experiment.tasks[: index + 1], "test")
        self._add(curve.name, self._answers(test), truth, index + 1)
        if trainer is not None and curve.by_class:
            labels_of = [part.classes[0] for part in experiment.parts(index + 1)]
            classes = len(experiment.tasks.class_names)
            scores = class_scores(trainer, test, labels_of, classes, options.samples_per_image)
            self._add(f"{trainer.settings.method}, no replay: p(class | x)", scores, truth, index + 1)

    def _with_samples(self, trainer: Trainer, index: int, task: Task) -> tuple[Tensor, Tensor]:
        """Return the images of a task and samples of earlier ones; the generator learns the task too."""
        experiment, by_class = self.experiment, self.curve.by_class
        before, seen = experiment.parts(index), experiment.parts(index + 1)
        old = []
        if index > 0:
            labels_of = [part.classes[0] for part in before] if by_class else None
            old.append(earlier_samples(trainer, self.classifiers, labels_of, task))
        with self._timed("generator_seconds"):
            for part in seen[len(before) :] if by_class else [task]:
                name, epochs = f"{self.curve.name}: {part.name}", trainer.settings.training.epochs
                experiment.display.task(index, len(experiment.tasks), name, epochs)
                trainer.learn(part, Watch(experiment.display))
                self.costs.generator_images += trainer.task_steps * trainer.engine.batch_size
        images, labels = (torch.cat(parts, 1) for parts in zip(self._current(trainer, task), *old, strict=True))
        return images, labels

    @contextmanager
    def _timed(self, cost: str) -> Iterator[None]:
        """Add the duration of the block to one of the costs."""
        began = time.monotonic()
        yield
        if self.experiment.device.type == "cuda":  # wait for the device, which runs asynchronously
            torch.cuda.synchronize(self.experiment.device)
        setattr(self.costs, cost, getattr(self.costs, cost) + time.monotonic() - began)

    def _add(self, name: str, scores: Tensor, truth: Tensor, seen: int) -> None:
        """Add a point from the scores (R, n, classes) of the test images."""
        by_task, by_class = (part.mean(0).tolist() for part in accuracies(scores, truth, self.experiment.groups[:seen]))
        point = Point(curve=name, seen=seen, task_incremental=by_task, class_incremental=by_class, **vars(self.costs))
        self.points.append(point)

    @torch.no_grad()
    def _current(self, trainer: Trainer, task: Task) -> tuple[Tensor, Tensor]:
        """Return the images (R, n, D) of the task and labels; with `reconstruct`, reconstructions of them as well.

        Without, the look of an image would tell the classifier whether it is old (generated) or new (real).
        """
        replicas = trainer.replicas
        images, labels = self.experiment.images([task], "train")
        real, labels = images.expand(len(replicas), -1, -1), labels.expand(len(replicas), -1)
        if not self.experiment.options.reconstruct:
            return real, labels
        draw = Draw("normal", (real.shape[1], trainer.settings.model.latent_dim))
        noise = replicas.generators.draw(draw, "reconstruct", trainer.tasks_done)
        return torch.cat([real, replicas.map(_reconstructed, real, noise)], 1), torch.cat([labels, labels], 1)

    @torch.no_grad()
    def _answers(self, test: Tensor) -> Tensor:
        """Return the scores (R, n, classes) of images (n, D).

        With `reconstruct` the classifier has learned images and reconstructions: add the log-probabilities of both.
        """
        scores = self.classifiers.logits(test)
        if self.trainer is None:
            return scores
        scores = scores.log_softmax(-1)
        if not self.experiment.options.reconstruct:
            return scores
        replicas = self.trainer.replicas
        each = test.expand(len(replicas), -1, -1)
        still = torch.zeros(*each.shape[:2], self.trainer.settings.model.latent_dim, device=test.device)
        return scores + self.classifiers.logits(replicas.map(_reconstructed, each, still)).log_softmax(-1)


def _reconstructed(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
    """Return the reconstructions of images (n, D) by one model; zero noise decodes the posterior means."""
    return model.images(model.posterior(x).rsample(noise))


def earlier_samples(
    trainer: Trainer, classifiers: Classifiers, labels_of: Sequence[int] | None, task: Task
) -> tuple[Tensor, Tensor]:
    """Return samples (R, n, D) of earlier tasks, and labels; as many per old class as the new classes have images.

    With `labels_of`, the class of each VAE task, samples are labelled by the components that produced them; without, by
    the classifier. Both generator and classifier have not yet learned the task.
    """
    count, purpose = len(task.train.images) // len(task.classes), f"replay {trainer.tasks_done}"
    if labels_of is None:
        seen = int((classifiers.replicas.buffers["seen"][0] == 0).sum())
        images = generate(trainer, count * seen, purpose)
        return images, classifiers.logits(images).argmax(-1)
    samples = [generate(trainer, count, f"{purpose} {old}", old) for old in range(len(labels_of))]
    labels = torch.tensor(labels_of, device=trainer.device).repeat_interleave(count)
    return torch.cat(samples, 1), labels.expand(len(trainer.replicas), -1)


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
