"""Find tasks in a stream without borders: a drop of the ELBO shows that the data have changed.

When a task begins, a trial copy of the model learns its first images; the scores of a few held-out ones are the
reference. Every later image is scored by the trial's ELBO under the task's own part of the prior, and by the ELBO's KL
term alone: a simple image of another kind can have a good ELBO, but its code lies off the task's prior. The drops, in
standard deviations of the reference, are summed up after subtracting a slack, and the sum is kept at 0 or above (Page's
cumulative sum, 1954):

    s ← max(0, s + min(limit, (mean − ELBO(x)) / deviation) − slack),

Once one of the sums exceeds the threshold, the data have changed since that sum was last zero; the change point is the
one that maximises the likelihood of a shifted mean after it. The limit keeps a single outlier from raising an alarm.
The images before the change point are a finished task, those after it begin the next.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from boovae.config import Settings
from boovae.config.choose import choose
from boovae.config.resolve import read_toml
from boovae.data.scaling import Rows
from boovae.data.summary import summarise
from boovae.data.tasks import Split, Stream, Task
from boovae.errors import InputError
from boovae.methods import from_mapping
from boovae.model.vae import VAE
from boovae.replicas.devices import choose_device
from boovae.replicas.randomness import Draw
from boovae.runs.data import load_data
from boovae.runs.progress import Display, Watch, make_display
from boovae.training.trainer import Trainer
from boovae.training.transfer import copy_learned

#: Number of images at the beginning of a task that a trial learns; shorter tasks are not found.
FIRST = 100
#: Share of them held out as reference.
HELD_OUT = 0.25
#: Epochs of a trial, and its minimum number of steps per epoch.
EPOCHS, STEPS = 40, 12
#: Latents per image for its ELBO, and images scored at once.
LATENTS, CHUNK = 8, 500

#: Maps images (n, D) to scores (n, columns): the ELBO and its KL term, in nats.
Score = Callable[[Tensor], Tensor]


class ChangeDetector:
    """Detects where the ELBO values of a task stop resembling the reference (n,).

    >>> reference = torch.randn(100, generator=torch.Generator().manual_seed(0))
    >>> detector = ChangeDetector(reference)
    >>> detector.feed(torch.zeros(50)) is None  # nothing has changed
    True
    >>> detector.feed(torch.tensor([0.0, 0.0] + 14 * [-9.0]))  # 52 images were of the task
    52
    """

    def __init__(self, reference: Tensor, *, slack: float = 1.0, limit: float = 4.0, threshold: float = 40.0) -> None:
        if len(reference) < 2 or not bool(reference.isfinite().all()):
            raise InputError(f"reference: {len(reference)} values; at least 2 finite ones are needed")
        self.mean = reference.double().mean().item()
        self.deviation = max(reference.double().std().item(), 1e-6)
        self.slack, self.limit, self.threshold = slack, limit, threshold
        self.sum = 0.0
        self.seen = 0
        self._drops: list[float] = []  # since the sum was last zero

    def feed(self, values: Tensor) -> int | None:
        """Take the ELBO (n,) of the next images; once the task has ended, return its number of images."""
        drops = (self.mean - values.double()) / self.deviation
        # A score of NaN counts as the largest drop.
        for drop in drops.nan_to_num(nan=self.limit).clamp(max=self.limit).tolist():
            self.seen += 1
            self.sum += drop - self.slack
            self._drops.append(drop)
            if self.sum <= 0:
                self.sum, self._drops = 0.0, []
            if self.sum > self.threshold:
                return self.seen - len(self._drops) + self._onset()
        return None

    def _onset(self) -> int:
        """Return how many of the stored drops came before the change: the most likely point for the mean to shift.

        With m drops, k of them before the change, the log-likelihood ratio is (sum of the others)² / 2 (m − k).
        """
        sums = list(itertools.accumulate(reversed(self._drops)))  # of the last 1, 2, … drops
        ratios = [total * abs(total) / count for count, total in enumerate(sums, start=1)]
        return len(self._drops) - 1 - ratios.index(max(ratios))


class TaskFinder:
    """Cuts a stream of images into tasks while they are learned.

    `trial(images)` trains a copy of the current model on images and returns a function that scores others. Feed batches
    of any size, and learn each task that is yielded before asking for the next:

        for task in finder.feed(images):
            learn(task)
        rest = finder.finish()
    """

    def __init__(self, trial: Callable[[Tensor], Score], first: int = FIRST, most: int | None = None) -> None:
        """After `most` images without a change they become a task, so that never more of them wait."""
        if first < 8:
            raise InputError(f"first ({{detect_first}}) is {first}; a trial needs at least 8 images")
        if most is not None and most < first:
            raise InputError(f"most ({{detect_most}}) is {most}; it must be at least {{detect_first}}, {first}")
        self.trial, self.first, self.most = trial, first, most
        self._images: Tensor | None = None  # of the task that has not ended
        self._learned = 0  # by the trial; `first` and `most` may change within a task
        self._detectors: list[ChangeDetector] = []  # one for each column of its scores; none before the trial

    @property
    def waiting(self) -> int:
        """The number of images of the task that has not ended."""
        return 0 if self._images is None else len(self._images)

    def feed(self, images: Tensor) -> Iterator[Tensor]:
        """Add images (n, D); yield the tasks that have ended, each (m, D)."""
        if len(images):
            self._images = images if self._images is None else torch.cat([self._images, images])
        while self._images is not None and len(self._images) >= self.first:
            whole = self._images
            if not self._detectors:
                self._begin(whole[: self.first])
            end = self._end(whole)
            if end is None:
                return
            self._images, self._detectors = whole[end:], []
            del self._score  # and with it the model of the trial, before the task is learned
            yield whole[:end]

    def _end(self, whole: Tensor) -> int | None:
        """Score the new images; return where their task ends, or None."""
        scored = self._learned + self._detectors[0].seen
        for part in filter(len, whole[scored : self.most].split(CHUNK)):
            columns = zip(self._detectors, self._score(part).unbind(1), strict=True)
            found = [detector.feed(values) for detector, values in columns]
            changes = [change for change in found if change is not None]
            if changes:
                return self._learned + min(changes)
            scored += len(part)
        return scored if self.most is not None and scored >= self.most else None

    def copy(self) -> Self:
        """Return an independent copy."""
        other = copy.copy(self)
        other._detectors = copy.deepcopy(self._detectors)
        return other

    def _begin(self, images: Tensor) -> None:
        """Train a trial on the first images, except a few that become the reference."""
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(images.device)
        held = max(2, round(HELD_OUT * len(images)))
        self._score: Score = self.trial(images[order[held:]])
        self._detectors = [ChangeDetector(values) for values in self._score(images[order[:held]]).unbind(1)]
        self._learned = len(images)

    def finish(self) -> Tensor | None:
        """End the stream: return the images of the last task, or None if there are none."""
        images, self._images, self._detectors = self._images, None, []
        return images


@dataclass
class Waiting:
    """The images of the task that has not ended, and the finder of its end, which has scaled ones.

    The first images of a stream wait unscaled, until there are enough for a trial. `scaled` scales rows.
    """

    seed: int
    finder: TaskFinder
    raw: list[Rows] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of waiting images."""
        return self.finder.waiting + sum(map(len, self.raw))

    def copy(self) -> Self:
        """Return an independent copy."""
        return replace(self, finder=self.finder.copy(), raw=list(self.raw))

    def ended(self, scaled: Callable[[Rows], Rows]) -> Iterator[Rows]:
        """Scale what waits unscaled; yield the tasks that have ended, each as scaled rows (m, D)."""
        rows, self.raw = scaled(np.concatenate(self.raw)), []
        for images in self.finder.feed(torch.from_numpy(rows)):
            yield images.numpy()

    def rest(self, scaled: Callable[[Rows], Rows]) -> Rows | None:
        """Return all waiting images as scaled rows, or None if there are none."""
        images = self.finder.finish()
        parts = [] if images is None else [images.numpy()]
        if self.raw:
            parts.append(scaled(np.concatenate(self.raw)))
        return np.concatenate(parts) if parts else None


# --- with a trainer -------------------------------------------------------------------------------------------------


class Trial:
    """Trains a copy of the current trainer on images, with a short schedule."""

    def __init__(self, trainer: Trainer) -> None:
        if trainer.method.knows_task:
            raise InputError(f"method '{trainer.method.name}' needs to know the task; it cannot find one itself")
        self.trainer = trainer  # may be replaced by a learner with a shortened schedule
        self._settings = trainer.settings

    def __call__(self, images: Tensor) -> Score:
        """Return the score function of the copy: ELBO and its KL term (n, 2), means over replicas."""
        learner = self.learner(len(images))
        learner.learn(make_task(images, "trial"))
        return lambda others: elbo_and_kl(learner, others).mean(0)

    def learner(self, images: int) -> Trainer:
        """Return a copy of the trainer with a schedule short enough for `images` images."""
        old = self.trainer
        learner = Trainer(shortened(self._settings, images), old.spec, device=old.device, seeds=old.replicas.seeds)
        copy_learned(old, learner)
        return learner


def shortened(settings: Settings, images: int) -> Settings:
    """Return fixed settings with fewer epochs, and batches small enough for several steps per epoch."""
    least = 2 if settings.model.normalisation == "batch" else 1
    batch = max(least, min(settings.training.batch_size, images // STEPS))
    epochs = min(settings.training.epochs, EPOCHS)
    short = settings.changed(epochs=epochs, batch_size=batch, epoch_steps=1, schedule="cosine")
    return replace(short, chosen=())


def make_task(images: Tensor, name: str) -> Task:
    """Return unlabelled images (n, D) as a task; a random tenth of them is both validation and test set."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(images.device)
    held = max(1, len(images) // 10)
    parts = (images[rows].cpu() for rows in (order[held:], order[:held]))
    train, other = (Split(part, torch.zeros(len(part), dtype=torch.long)) for part in parts)
    return Task(name, train, other, other, (0,))


@torch.no_grad()
def elbo_and_kl(trainer: Trainer, images: Tensor) -> Tensor:
    """Return ELBO and −KL of images (n, D) under the newest task's part of the prior, (R, n, 2)."""
    replicas, task = trainer.replicas, trainer.tasks_done - 1
    noise = replicas.generators.draw(Draw("normal", (LATENTS, trainer.settings.model.latent_dim)), "elbo")

    def one(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        posterior = model.posterior(x)
        wide = type(posterior)(*(part.unsqueeze(1) for part in posterior))
        z = wide.rsample(noise)  # (n, LATENTS, L)
        output = model.likelihood.bounded(model.decode(z))
        likelihood = model.likelihood.log_prob(output, x.unsqueeze(1))
        kl = wide.log_prob(z) - model.prior.forward(model.posterior, task).log_prob(z)
        return torch.stack([(likelihood - kl).mean(1), -kl.mean(1)], -1)

    parts = images.to(replicas.device).split(CHUNK)
    return torch.cat([replicas.map(one, part.expand(len(replicas), -1, -1), noise) for part in parts], 1)


def with_found_borders(
    settings: Settings,
    resumed: Path | None,
    *,
    data_dir: Path | None = None,
    device: str = "auto",
    first: int = FIRST,
    quiet: bool = False,
) -> Settings:
    """Return the settings with the borders found in the stream, or with those of the run folder to be resumed."""
    if settings.data.borders is not None:
        raise InputError("{borders} and {detect_tasks} exclude each other: give the borders, or let them be found")
    begun = resumed / "config.toml" if resumed else None
    if begun is not None and begun.is_file():
        found = from_mapping(read_toml(begun)).data.borders
        if found is None:
            raise InputError(f"{resumed} holds a run with given tasks: leave out {{detect_tasks}}, or change {{out}}")
        return settings.changed(borders=found)
    stream = load_data(settings, data_dir)
    with closing(make_display(quiet=quiet)) as display:
        borders = find_borders(settings, stream, choose_device(device), display, first=first)
        display.note(f"{len(borders)} borders found; now learning the tasks between them")
    if settings.data.tasks is not None and len(borders) + 1 < settings.data.tasks:
        raise InputError(
            f"{{tasks}} is {settings.data.tasks}, but the stream has {len(borders) + 1}; leave it out to learn those"
        )
    return settings.changed(borders=tuple(borders))


def find_borders(
    settings: Settings, stream: Stream, device: torch.device, display: Display, *, first: int = FIRST
) -> list[int]:
    """Return the positions at which the sequence of a stream's training images changes; its borders are not used.

    The learner follows the settings with a short schedule, long enough to tell its tasks from others.
    """
    settings, _ = choose(settings, summarise(stream[0].train.images[:first], stream.spec))
    trial = Trial(Trainer(settings, stream.spec, device=device))
    finder, borders = TaskFinder(trial, first), [0]
    display.note("looking for borders between tasks")
    for batch in torch.cat([task.train.images for task in stream]).split(first):
        for images in finder.feed(batch):
            borders.append(borders[-1] + len(images))
            display.note(f"task {len(borders) - 1} ended after {len(images)} images, at {borders[-1]}")
            if len(borders) - 1 == settings.data.tasks:
                return borders[1:]
            trial.trainer = trial.learner(len(images))
            task = make_task(images, f"images {borders[-2]} to {borders[-1] - 1}")
            display.task(len(borders) - 2, None, task.name, trial.trainer.settings.training.epochs)
            trial.trainer.learn(task, Watch(display))
    return borders[1:]
