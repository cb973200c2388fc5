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
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from boovae.config import Settings
from boovae.errors import InputError
from boovae.experiments.classifiers import Classifiers, accuracies
from boovae.experiments.results import prepared, save_figure, write_table
from boovae.machine import choose_device, environment, matmul_precision
from boovae.metrics.evaluation import generate
from boovae.progress import Watch, make_display
from boovae.recall import load_data
from boovae.run import planned_tasks
from boovae.training.randomness import Draw, Generators
from boovae.training.trainer import Trainer
from boovae.vae import VAE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from boovae.arguments import Replay
    from boovae.data import Stream, Task
    from boovae.progress import Display

#: Latents that are scored at once by the generative classifier.
LATENTS = 20_000
#: Weight of the paper's penalties for the generator `boo`, if the settings have none.
PAPER_LAMBDA = 1.0


class Point(NamedTuple):
    """One curve after one task: accuracies of each replica, means over the tasks seen, and what it took."""

    curve: str
    seen: int
    task_incremental: list[float]
    class_incremental: list[float]
    generator_images: int  # that the generator has learned from so far, each as often as it was seen, per replica
    generator_seconds: float  # all replicas together
    classifier_seconds: float


@dataclass
class Experiment:
    """What all curves share."""

    settings: Settings
    tasks: Stream  # of the classifier
    classes: Stream  # the same images, one class per task
    device: torch.device
    display: Display
    epochs: int = 200
    batch_size: int = 500
    dropout: float = 0.2
    reconstruct: bool = True
    samples: int = 100

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The classes of each task."""
        return [task.classes for task in self.tasks]

    def test_set(self, seen: int) -> tuple[Tensor, Tensor]:
        """Return all test images of the tasks seen (n, D), and their labels (n,)."""
        parts = [task.test for task in self.tasks[:seen]]
        return torch.cat([part.images for part in parts]).to(self.device), torch.cat([part.labels for part in parts])

    def classifiers(self) -> Classifiers:
        """Return fresh classifiers, one per replica."""
        pixels, classes = self.tasks[0].train.images.shape[1], len(self.tasks.class_names)
        return Classifiers(pixels, classes, self.settings.seeds, self.device, dropout=self.dropout)

    def point(self, curve: str, scores: Tensor, labels: Tensor, seen: int, cost: Cost) -> Point:
        """Return a point of a curve from the scores (R, n, classes) of the test images."""
        both = accuracies(scores, labels, self.groups[:seen])
        by_task, by_class = (part.mean(0).tolist() for part in both)
        return Point(curve, seen, by_task, by_class, cost.images, cost.generator_seconds, cost.classifier_seconds)


@dataclass
class Cost:
    """What a curve has taken so far."""

    images: int = 0
    generator_seconds: float = 0.0
    classifier_seconds: float = 0.0


def run(settings: Settings, arguments: Replay, command: str) -> list[dict[str, Any]]:
    """Learn all curves; write `replay.csv` and `replay.png` after each of them, return the rows."""
    _check(settings, arguments)
    device, folder = choose_device(arguments.device), prepared(arguments.out)
    display = make_display(quiet=arguments.quiet)
    experiment = Experiment(
        settings,
        planned_tasks(load_data(settings, arguments.data_dir), settings),
        load_data(replace(settings, classes_per_task=1), arguments.data_dir),
        device,
        display,
        arguments.classifier_epochs,
        arguments.classifier_batch,
        arguments.dropout,
        arguments.reconstruct,
        arguments.samples_per_image,
    )
    points: list[Point] = []
    rows: list[dict[str, Any]] = []
    for curve in curves(experiment, arguments.curve):
        points += curve
        rows = table(points, settings)
        write_table(folder / "replay.csv", rows, environment(device, False, command))
        save_figure(folder / "replay.png", draw(points))
    display.close()
    return rows


def _check(settings: Settings, arguments: Replay) -> None:
    """Refuse what makes no sense before anything is trained."""
    if settings.classes_per_task < 2:
        raise InputError(
            f"--classes-per-task is {settings.classes_per_task}; a classifier needs at least 2 classes per task"
        )
    for name, value in (
        ("--classifier-epochs", arguments.classifier_epochs),
        ("--classifier-batch", arguments.classifier_batch),
        ("--samples-per-image", arguments.samples_per_image),
    ):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be a whole number of at least 1")
    if not 0 <= arguments.dropout < 1:
        raise InputError(f"--dropout is {arguments.dropout}; it must be a share of at least 0 and under 1")
    if not arguments.curve:
        raise InputError("--curve is empty; name at least one, or leave it out for all")
    if not set(settings.method.split("+")) & {"boo", "boo-flow", "mog"} and "method" in arguments.curve:
        raise InputError(
            f"--method {settings.method}: its prior has no components per task to label samples by; "
            "use one with boo, boo-flow or mog"
        )


def curves(experiment: Experiment, wanted: Sequence[str]) -> Iterator[list[Point]]:
    """Yield the points of each curve, or of the curves that share a generator."""
    settings = experiment.settings
    if "exact" in wanted:
        yield list(_real_images(experiment, "exact replay", keep=True))
    if "none" in wanted:
        yield list(_real_images(experiment, "no replay", keep=False))
    generators = []
    if "boo" in wanted:
        generators.append(replace(settings, method="boo", boo_lambda=settings.boo_lambda or PAPER_LAMBDA))
    if "method" in wanted and settings.method != "boo":
        generators.append(settings)
    for generator in generators:
        yield list(_generated(experiment, generator, by_class=True))
        yield list(_generated(experiment, generator, by_class=False))
    if "scratch" in wanted:
        yield list(_generated(experiment, replace(settings, method="scratch", prior="vamp"), by_class=False))


# --- the bounds -----------------------------------------------------------------------------------------------------


def _real_images(experiment: Experiment, curve: str, *, keep: bool) -> Iterator[Point]:
    """Yield the points of a classifier that sees real images: of all tasks so far, or of the current one alone."""
    classifiers, cost = experiment.classifiers(), Cost()
    for index, task in enumerate(experiment.tasks):
        experiment.display.note(f"{curve}: task {index + 1}/{len(experiment.tasks)} ({task.name})")
        visible = experiment.tasks[: index + 1] if keep else [task]
        images = torch.cat([one.train.images for one in visible]).to(experiment.device)
        labels = torch.cat([one.train.labels for one in visible]).to(experiment.device)
        _learn(experiment, classifiers, images, labels, task, cost)
        test, truth = experiment.test_set(index + 1)
        yield experiment.point(curve, classifiers.logits(test), truth, index + 1, cost)


def _learn(
    experiment: Experiment, classifiers: Classifiers, images: Tensor, labels: Tensor, task: Task, cost: Cost
) -> None:
    began = time.monotonic()
    classifiers.learn(images, labels, task.classes, epochs=experiment.epochs, batch_size=experiment.batch_size)
    _wait(experiment.device)
    cost.classifier_seconds += time.monotonic() - began


def _wait(device: torch.device) -> None:
    """Let the device finish, so that the clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- generators -----------------------------------------------------------------------------------------------------


def _generated(experiment: Experiment, settings: Settings, *, by_class: bool) -> Iterator[Point]:
    """Yield the points of a classifier that sees samples of a VAE; the VAE learns along, by class or by task."""
    stream, display = experiment.tasks, experiment.display
    vae_tasks = sum(len(task.classes) for task in stream) if by_class else len(stream)
    name = f"{settings.method}, {vae_tasks} VAE tasks"
    trainer = Trainer(settings, stream.shape, stream.pixel_range, binarize=stream.binarize, device=experiment.device)
    classifiers, cost = experiment.classifiers(), Cost()
    labels_of: list[int] = []  # the class of each VAE task, where that is one
    for index, task in enumerate(stream):
        replayed = _past(trainer, classifiers, labels_of if by_class else None, task) if index > 0 else None
        own = [one for one in experiment.classes if one.classes[0] in task.classes] if by_class else [task]
        began = time.monotonic()
        for part in own:
            display.task(index, len(stream), f"{name}: {part.name}", settings.epochs)
            trainer.learn(part, Watch(display))
            cost.images += trainer.task_steps * trainer.engine.batch_size
            labels_of.append(part.classes[0])
        _wait(experiment.device)
        cost.generator_seconds += time.monotonic() - began
        images, labels = _now(experiment, trainer, task)
        if replayed is not None:
            images, labels = torch.cat([images, replayed[0]], 1), torch.cat([labels, replayed[1]], 1)
        _learn(experiment, classifiers, images, labels, task, cost)
        test, truth = experiment.test_set(index + 1)
        yield experiment.point(name, classifiers.logits(test), truth, index + 1, cost)
        if by_class:
            scores = class_scores(trainer, test, labels_of, len(stream.class_names), experiment.samples)
            yield experiment.point(f"{settings.method}, no replay: p(class | x)", scores, truth, index + 1, cost)


@torch.no_grad()
def _now(experiment: Experiment, trainer: Trainer, task: Task) -> tuple[Tensor, Tensor]:
    """Return the task's images (R, n, D) and labels; with `reconstruct` each also as the generator shows it.

    Else the look of an image would tell the classifier whether it is old (generated) or new (real).
    """
    replicas = trainer.replicas
    real = task.train.images.to(experiment.device).expand(len(replicas), -1, -1)
    labels = task.train.labels.to(experiment.device).expand(len(replicas), -1)
    if not experiment.reconstruct:
        return real, labels
    draw = Draw("normal", (real.shape[1], trainer.settings.latent_dim))
    noise = Generators(replicas.seeds, replicas.device).draw(draw, "reconstruct", trainer.tasks_done)

    def shown(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        return model.images(model.posterior(x).rsample(noise))

    return torch.cat([real, replicas.map(shown, real, noise)], 1), torch.cat([labels, labels], 1)


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


@torch.no_grad()
def class_scores(trainer: Trainer, images: Tensor, labels_of: Sequence[int], classes: int, samples: int) -> Tensor:
    """Return log p(x, class) (R, n, classes) of images (n, D), up to what does not depend on the class; else −inf.

    Importance sampling with the posterior; `labels_of` names the class of each VAE task.
    """
    replicas = trainer.replicas
    draw = Draw("normal", (samples, trainer.settings.latent_dim))
    noise = Generators(replicas.seeds, replicas.device).draw(draw, "classify")
    sizes = torch.tensor(trainer.sizes, dtype=torch.float32, device=images.device)
    log_masses = (sizes / sizes.sum()).log()

    def joint(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        posterior = model.posterior(x)
        wide = type(posterior)(*(part.unsqueeze(1) for part in posterior))
        z = wide.rsample(noise)  # (n, samples, L)
        output = model.likelihood.bounded(model.decode(z))
        rest = model.likelihood.log_prob(output, x.unsqueeze(1)) - wide.log_prob(z)
        parts = [model.prior.forward(model.posterior, task).log_prob(z) for task in range(len(labels_of))]
        return torch.logsumexp(rest.unsqueeze(2) + torch.stack(parts, 2), 1) + log_masses

    chunk = max(1, LATENTS // samples)
    with matmul_precision(trainer.device):
        parts = [replicas.map(joint, part.expand(len(replicas), -1, -1), noise) for part in images.split(chunk)]
    found = torch.cat(parts, 1)
    scores = torch.full((*found.shape[:2], classes), -torch.inf, device=images.device)
    scores[..., list(labels_of)] = found
    return scores


# --- the table and the figure ---------------------------------------------------------------------------------------


def table(points: Sequence[Point], settings: Settings) -> list[dict[str, Any]]:
    """Return one row for every curve, number of tasks seen and seed."""
    return [
        {
            "dataset": settings.dataset,
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
        for row, seed in enumerate(settings.seeds)
    ]


def draw(points: Sequence[Point]) -> Figure:
    """Return the figure: mean accuracy over tasks seen, both ways, and what the generators had to learn from."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.6), layout="constrained")
    by_task, by_class, cost = figure.subplots(1, 3)
    for number, name in enumerate(dict.fromkeys(point.curve for point in points)):
        own = [point for point in points if point.curve == name]
        seen = [point.seen for point in own]
        style: dict[str, Any] = {"color": f"C{number}", "marker": "o", "markersize": 4}
        style["linestyle"] = "--" if "replay" in name.split(",")[0] else "-"
        for axes, key in ((by_task, "task_incremental"), (by_class, "class_incremental")):
            values = 100 * np.array([getattr(point, key) for point in own])
            axes.plot(seen, values.mean(1), label=name, **style)
            axes.fill_between(seen, values.min(1), values.max(1), color=f"C{number}", alpha=0.15, linewidth=0)
        if own[-1].generator_images and "p(class" not in name:
            cost.plot(seen, [point.generator_images / 1e6 for point in own], label=name, **style)
    by_task.set(title="task-incremental: the task is named", ylabel="mean accuracy over tasks seen, %")
    by_class.set(title="class-incremental: among all classes seen")
    cost.set(title="cost: images the generator learned, millions")
    for axes in (by_task, by_class, cost):
        axes.set_xlabel("tasks seen")
        axes.set_xticks(sorted({point.seen for point in points}))
        axes.grid(alpha=0.3)
    figure.legend(*by_task.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure
