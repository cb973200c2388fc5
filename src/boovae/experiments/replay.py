"""`boovae replay`: a classifier that learns tasks one after another, and a generator that stands in for the old images.

The paper's experiment (spec E7): binary tasks 0/1, 2/3, …; a classifier with a head per task sees the real images of
its task and, of earlier tasks, one of these:

    exact        all old images, the upper bound
    none         nothing, the lower bound
    boo          samples of a VAE with a boosted prior and the paper's penalties that learns along, never from scratch
    METHOD       the same with the method of the settings, `boo+distill`
    scratch      samples of a VAE made anew at every task from its own samples, which is what the paper argues against

A VAE that learned class by class labels its samples by the prior's component that made them; one that learned in the
classifier's tasks leaves that to the classifier before the task. Beside them stands a classifier that needs no replay
and no training: p(class | x) ∝ p(class) E_{q(z|x)}[p(x|z) r_class(z) / q(z|x)], read off the prior's components.

A curve is kept after each of its tasks (`kept.py`), so the same command goes on where it was stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from boovae.config import Settings
from boovae.errors import InputError
from boovae.experiments.classifiers import Classifiers, accuracies, class_scores
from boovae.experiments.curve_store import Kept
from boovae.experiments.options import ReplayOptions
from boovae.experiments.replay_points import Point, draw, table
from boovae.methods import from_mapping
from boovae.methods.boo import BooSettings
from boovae.model.vae import VAE
from boovae.replicas.devices import choose_device, compiles, environment
from boovae.replicas.randomness import Draw, Generators
from boovae.report.outputs import prepared, save_figure, write_table
from boovae.runs.data import load_data
from boovae.runs.progress import Watch, make_display
from boovae.runs.train import planned_tasks
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer

if TYPE_CHECKING:
    from pathlib import Path

    from boovae.data import Stream, Task
    from boovae.runs.progress import Display

#: Weight of the paper's penalties for the generator `boo`, if the settings have none.
PAPER_LAMBDA = 1.0


class Curve(NamedTuple):
    """What stands in for the past: real images, all or none, or the samples of a generator."""

    name: str
    generator: Settings | None = None
    by_class: bool = False  # the generator's tasks are classes, not those of the classifier
    keeps: bool = False  # real images of the past are there


@dataclass
class Experiment:
    """What all curves share."""

    settings: Settings
    tasks: Stream  # of the classifier
    classes: Stream  # the same images, one class per task
    device: torch.device
    display: Display
    options: ReplayOptions = field(default_factory=ReplayOptions)
    compile: str = "auto"

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The classes of each task."""
        return [task.classes for task in self.tasks]

    def parts(self, seen: int) -> list[Task]:
        """Return the tasks seen, cut into classes."""
        by_class = {task.classes[0]: task for task in self.classes}
        return [by_class[label] for group in self.groups[:seen] for label in group]

    def test_set(self, seen: int) -> tuple[Tensor, Tensor]:
        """Return all test images of the tasks seen (n, D), and their labels (n,)."""
        parts = [task.test for task in self.tasks[:seen]]
        return torch.cat([part.images for part in parts]).to(self.device), torch.cat([part.labels for part in parts])

    def classifiers(self) -> Classifiers:
        """Return fresh classifiers, one per replica."""
        pixels, classes = self.tasks[0].train.images.shape[1], len(self.tasks.class_names)
        return Classifiers(pixels, classes, self.settings.training.seeds, self.device, dropout=self.options.dropout)

    def generator(self, settings: Settings) -> Trainer:
        """Return a fresh generator."""
        stream = self.tasks
        return Trainer(
            settings,
            stream.shape,
            stream.pixel_range,
            binarize=stream.binarize,
            device=self.device,
            compile=self.compiled,
        )

    @property
    def compiled(self) -> bool:
        """Whether the generators' steps are compiled."""
        images = sum(len(task.train.images) for task in self.tasks)
        return compiles(self.compile, images, self.settings, self.device)

    def key(self, curve: Curve) -> dict[str, Any]:
        """Return everything that decides a curve's numbers, but for the machine."""
        return {
            "curve": curve.name,
            "seeds": self.settings.training.seeds,
            "generator": curve.generator and curve.generator.flat(),
            "classifier": [getattr(self.options, item.name) for item in fields(ReplayOptions) if item.name != "curve"],
            "data": (self.tasks.split_record, self.groups),
        }


@dataclass
class Progress:
    """How far a curve is."""

    classifiers: Classifiers
    trainer: Trainer | None
    images: int = 0
    generator_seconds: float = 0.0
    classifier_seconds: float = 0.0
    points: list[Point] = field(default_factory=list)

    @property
    def costs(self) -> tuple[int, float, float]:
        """Images that the generator learned from, its seconds, and those of the classifiers."""
        return self.images, self.generator_seconds, self.classifier_seconds

    def point(self, name: str, scores: Tensor, labels: Tensor, groups: Sequence[Sequence[int]]) -> Point:
        """Return a point of a curve from the scores (R, n, classes) of the test images."""
        by_task, by_class = (part.mean(0).tolist() for part in accuracies(scores, labels, groups))
        return Point(name, len(groups), by_task, by_class, *self.costs)


def run(
    settings: Settings,
    out: Path,
    options: ReplayOptions | None = None,
    *,
    data_dir: Path | None = None,
    device: str = "auto",
    compile: str = "auto",
    quiet: bool = False,
    command: str = "",
) -> list[dict[str, Any]]:
    """Learn all curves; write `replay.csv` and `replay.png` after each of them, return the rows."""
    options = options or ReplayOptions()
    _check(settings, options)
    place, folder = choose_device(device), prepared(out)
    display = make_display(quiet=quiet)
    experiment = Experiment(
        settings,
        planned_tasks(load_data(settings, data_dir), settings),
        load_data(settings.changed(classes_per_task=1), data_dir),
        place,
        display,
        options,
        compile,
    )
    points: list[Point] = []
    rows: list[dict[str, Any]] = []
    with closing(display):
        for curve in curves(settings, experiment.tasks, options.curve):
            points += learned(experiment, curve, Kept(folder / "curves", experiment.key(curve)))
            rows = table(points, settings)
            write_table(folder / "replay.csv", rows, environment(place, experiment.compiled, command))
            save_figure(folder / "replay.png", draw(points))
    return rows


def _check(settings: Settings, options: ReplayOptions) -> None:
    """Refuse what makes no sense before anything is trained."""
    if settings.data.classes_per_task < 2:
        raise InputError(
            f"{{classes_per_task}} is {settings.data.classes_per_task}; a classifier needs at least 2 classes per task"
        )
    if not set(settings.method.split("+")) & {"boo", "boo-flow", "mog"} and "method" in options.curve:
        raise InputError(
            f"{{method}} {settings.method}: its prior has no components per task to label samples by; "
            "use one with boo, boo-flow or mog"
        )


def curves(settings: Settings, tasks: Stream, wanted: Sequence[str]) -> list[Curve]:
    """Return the curves that are wanted, the bounds first."""
    found = []
    if "exact" in wanted:
        found.append(Curve("exact replay", keeps=True))
    if "none" in wanted:
        found.append(Curve("no replay"))
    generators = []
    if "boo" in wanted:
        penalties = settings.of(BooSettings).boo_lambda or PAPER_LAMBDA
        generators.append(from_mapping({**settings.flat(), "method": "boo", "boo_lambda": penalties}))
    if "method" in wanted and not (generators and settings.method == "boo"):  # that curve is there already
        generators.append(settings)
    classes = sum(len(task.classes) for task in tasks)
    for generator in generators:
        found.append(Curve(f"{generator.method}, {classes} VAE tasks", generator, by_class=True))
        found.append(Curve(f"{generator.method}, {len(tasks)} VAE tasks", generator))
    if "scratch" in wanted:
        found.append(
            Curve(
                f"scratch, {len(tasks)} VAE tasks",
                from_mapping({**settings.flat(), "method": "scratch", "prior": "vamp"}),
            )
        )
    return found


# --- one curve ------------------------------------------------------------------------------------------------------


def learned(experiment: Experiment, curve: Curve, kept: Kept) -> list[Point]:
    """Return the points of a curve: what is kept of it, and the tasks that are still to be learned."""
    finished = kept.finished()
    if finished is not None:
        experiment.display.note(f"{curve.name}: found in {kept.folder.parent}")
        return [Point(**point) for point in finished]
    trainer = None if curve.generator is None else experiment.generator(curve.generator)
    progress = Progress(experiment.classifiers(), trainer)
    done = _restore(progress, kept)
    for index, task in list(enumerate(experiment.tasks))[done:]:
        learn = _with_real_images if progress.trainer is None else _with_samples
        progress.points += learn(experiment, curve, progress, index, task)
        tensors, record = progress.classifiers.state(), {"tasks": index + 1, "costs": list(progress.costs)}
        generator = progress.trainer.state() if progress.trainer is not None else None
        kept.save(tensors, generator, record | {"points": [point._asdict() for point in progress.points]})
    kept.finish([point._asdict() for point in progress.points])
    return progress.points


def _restore(progress: Progress, kept: Kept) -> int:
    """Put back what is kept of a curve; return how many tasks that are."""
    found = kept.load()
    if found is None:
        return 0
    tensors, generator, record = found
    progress.classifiers.load_state(tensors, record["tasks"])
    if progress.trainer is not None and generator is not None:
        progress.trainer.load_state(*generator)
    progress.images, progress.generator_seconds, progress.classifier_seconds = record["costs"]
    progress.points = [Point(**point) for point in record["points"]]
    return int(record["tasks"])


def _with_real_images(
    experiment: Experiment, curve: Curve, progress: Progress, index: int, task: Task
) -> Iterator[Point]:
    """Learn a task from real images: of all tasks so far, or of this one alone."""
    experiment.display.note(f"{curve.name}: task {index + 1}/{len(experiment.tasks)} ({task.name})")
    visible = experiment.tasks[: index + 1] if curve.keeps else [task]
    images = torch.cat([one.train.images for one in visible]).to(experiment.device)
    labels = torch.cat([one.train.labels for one in visible]).to(experiment.device)
    _learn(experiment, progress, images, labels, task)
    test, truth = experiment.test_set(index + 1)
    yield progress.point(curve.name, progress.classifiers.logits(test), truth, experiment.groups[: index + 1])


def _with_samples(experiment: Experiment, curve: Curve, progress: Progress, index: int, task: Task) -> Iterator[Point]:
    """Learn a task from its images and a generator's samples of the past; the generator learns the task too."""
    trainer, classifiers = progress.trainer, progress.classifiers
    assert trainer is not None
    stream, display, before = experiment.tasks, experiment.display, experiment.parts(index)
    labels_of = [part.classes[0] for part in before] if curve.by_class else None
    replayed = _past(trainer, classifiers, labels_of, task) if index > 0 else None
    seen = experiment.parts(index + 1)
    began = time.monotonic()
    for part in seen[len(before) :] if curve.by_class else [task]:
        display.task(index, len(stream), f"{curve.name}: {part.name}", trainer.settings.training.epochs)
        trainer.learn(part, Watch(display))
        progress.images += trainer.task_steps * trainer.engine.batch_size
    _wait(experiment.device)
    progress.generator_seconds += time.monotonic() - began
    images, labels = _now(experiment, trainer, task)
    if replayed is not None:
        images, labels = torch.cat([images, replayed[0]], 1), torch.cat([labels, replayed[1]], 1)
    _learn(experiment, progress, images, labels, task)
    test, truth = experiment.test_set(index + 1)
    groups = experiment.groups[: index + 1]
    scores = _answers(experiment, trainer, classifiers, test)
    yield progress.point(curve.name, scores, truth, groups)
    if curve.by_class:
        labels_now = [part.classes[0] for part in seen]
        scores = class_scores(trainer, test, labels_now, len(stream.class_names), experiment.options.samples_per_image)
        yield progress.point(f"{trainer.settings.method}, no replay: p(class | x)", scores, truth, groups)


def _learn(experiment: Experiment, progress: Progress, images: Tensor, labels: Tensor, task: Task) -> None:
    began, options = time.monotonic(), experiment.options
    progress.classifiers.learn(
        images, labels, task.classes, epochs=options.classifier_epochs, batch_size=options.classifier_batch
    )
    _wait(experiment.device)
    progress.classifier_seconds += time.monotonic() - began


def _wait(device: torch.device) -> None:
    """Let the device finish, so that the clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def _now(experiment: Experiment, trainer: Trainer, task: Task) -> tuple[Tensor, Tensor]:
    """Return the task's images (R, n, D) and labels; with `reconstruct` each also as the generator shows it.

    Else the look of an image would tell the classifier whether it is old (generated) or new (real).
    """
    replicas = trainer.replicas
    real = task.train.images.to(experiment.device).expand(len(replicas), -1, -1)
    labels = task.train.labels.to(experiment.device).expand(len(replicas), -1)
    if not experiment.options.reconstruct:
        return real, labels
    draw = Draw("normal", (real.shape[1], trainer.settings.model.latent_dim))
    noise = Generators(replicas.seeds, replicas.device).draw(draw, "reconstruct", trainer.tasks_done)
    return torch.cat([real, _shown(trainer, real, noise)], 1), torch.cat([labels, labels], 1)


def _shown(trainer: Trainer, images: Tensor, noise: Tensor) -> Tensor:
    """Return images (R, n, D) as the generator shows them; without noise, at the means of their latents."""

    def one(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        return model.images(model.posterior(x).rsample(noise))

    shown: Tensor = trainer.replicas.map(one, images, noise)
    return shown


@torch.no_grad()
def _answers(experiment: Experiment, trainer: Trainer, classifiers: Classifiers, test: Tensor) -> Tensor:
    """Return the scores (R, n, classes) of images (n, D).

    With `reconstruct` the classifier has learned both looks of an image, so both are asked: log-probabilities add up.
    """
    scores = classifiers.logits(test).log_softmax(-1)
    if not experiment.options.reconstruct:
        return scores
    each = test.expand(len(trainer.replicas), -1, -1)
    still = torch.zeros(*each.shape[:2], trainer.settings.model.latent_dim, device=test.device)
    return scores + classifiers.logits(_shown(trainer, each, still)).log_softmax(-1)


def _past(
    trainer: Trainer, classifiers: Classifiers, labels_of: Sequence[int] | None, task: Task
) -> tuple[Tensor, Tensor]:
    """Return samples (R, n, D) of the tasks before, and labels; as many per old class as the new classes have images.

    With `labels_of`, the class of each VAE task, a sample's label is that of the components that made it; without, it
    is what the classifier calls it. Generator and classifier are as they were before the task.
    """
    count, purpose = len(task.train.images) // len(task.classes), f"replay {trainer.tasks_done}"
    if labels_of is None:
        seen = int((classifiers.replicas.buffers["seen"][0] == 0).sum())
        images = generate(trainer, count * seen, purpose)
        return images, classifiers.logits(images).argmax(-1)
    samples = [generate(trainer, count, f"{purpose} {old}", old) for old in range(len(labels_of))]
    labels = torch.tensor(labels_of, device=trainer.device).repeat_interleave(count)
    return torch.cat(samples, 1), labels.expand(len(trainer.replicas), -1)
