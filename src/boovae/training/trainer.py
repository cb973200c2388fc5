"""The training loop: tasks, epochs, learning rate, early stopping and recovery, for all replicas at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boovae.config import Settings
from boovae.config.choose import Choice, choose_task
from boovae.data import ImageSpec, Task
from boovae.data.summary import summarise
from boovae.errors import InputError
from boovae.methods import TaskImages, make_method
from boovae.model.likelihoods import make_likelihood
from boovae.model.nets import make_nets
from boovae.model.priors import NormalPrior, VampPrior
from boovae.model.vae import VAE
from boovae.replicas.adam import Moments
from boovae.replicas.devices import choose_device, matmul_precision, one_thread
from boovae.replicas.engine import Engine, block_length, validation_chunk
from boovae.replicas.stacked import Replicas
from boovae.replicas.step import GradientStep
from boovae.training import augment
from boovae.training.collapse import LEAST_EPOCHS, collapsed
from boovae.training.events import Event, choices_event, collapse, divergence, epoch_end, task_end, task_start
from boovae.training.objective import LOSS, Objective
from boovae.training.state import MOST_TASKS, check, group, prefixed, put, refused, whole
from boovae.training.task_progress import Array, Control, TaskProgress


class Observer:
    """Observes a run: writes the log and the checkpoints and updates the display; this one does nothing.

    Only the trainer calls it.
    """

    def event(self, event: Event) -> None:
        """Take a deterministic event for `metrics.jsonl`."""

    def block(self, trainer: Trainer) -> None:
        """Called between two blocks of steps, to write a checkpoint; may raise `Interrupted`."""

    def epoch(self, trainer: Trainer, event: Event) -> None:
        """Called after an epoch, to update the display."""


class Trainer:
    """R replicas of a VAE that learn one task after another.

    `learn(task)` trains on one task and drops its images; `state` and `load_state` save and restore everything, even in
    the middle of a task.
    """

    def __init__(
        self,
        settings: Settings,
        spec: ImageSpec,
        *,
        device: str | torch.device = "cpu",
        compile: bool = False,
        seeds: Sequence[int] | None = None,
        candidates: Mapping[str, Sequence[float]] | None = None,
        choices: Sequence[Choice] = (),
    ) -> None:
        """Build the replicas; `seeds` and `candidates` (values of settings), one per replica, compare settings.

        `choices` are the settings of the model that were chosen from the data, for the log.
        """
        self.spec, self.compile, self.choices = spec, compile, tuple(choices)
        self.device = choose_device(device) if isinstance(device, str) else device
        self._seeds, self._candidates = seeds, candidates or {}
        self._make(settings)
        self.sizes: list[int] = []  # training images of each finished task
        self.frozen = np.zeros(len(self.replicas), dtype=bool)  # replicas given up permanently
        self.collapsed = np.zeros(len(self.replicas), dtype=bool)  # replicas that encode the last task's images alike
        self.task_steps = 0  # of the task in training, or of the last one
        self.engine: Engine  # of the task in training, or of the last one
        self.progress: TaskProgress | None = None  # of the task in training
        self._saved: tuple[dict[str, Tensor], dict[str, Any]] | None = None  # of a task that `learn` will continue
        self._unfinished = ""  # the task in which `learn` was interrupted
        self._prepared: tuple[Task, tuple[Choice, ...]] | None = None  # the task that `prepare` has seen

    def _make(self, settings: Settings) -> None:
        """Build everything that depends on the settings."""
        self.settings, spec = settings, self.spec
        model = settings.model
        self.likelihood = make_likelihood(
            model.likelihood, spec.pixel_range, shape=spec.shape, noise=model.noise, noise_floor=model.noise_floor
        )
        augment.check(settings.training, spec)
        self._batch_statistics = model.normalisation == "batch" and model.net.startswith("conv")
        if settings.training.bound_samples > 1 and self._batch_statistics:
            raise InputError(
                "{bound_samples}: batch normalisation supports one pass of a batch, but several samples need two; use "
                "{normalisation=group}, or {bound_samples=1}"
            )
        self.method = make_method(settings)
        self.replicas = Replicas(self.build, self._seeds or settings.training.seeds, self.device)
        for name, values in self._candidates.items():
            if len(values) != len(self.replicas):
                raise InputError(f"candidates: {len(values)} values of {name} for {len(self.replicas)} replicas")
        for part in self.method.parts:
            part.compare(self._candidates)
        self.objective = Objective(settings.training, spec, settings.model.latent_dim, self.method)
        track = self.method.track if self.method.tracks else None
        self.step = GradientStep(self.replicas, self.objective, track=track, compile=self.compile)
        self.generators = self.replicas.generators

    def build(self) -> VAE:
        """Return one model according to the settings."""
        model, spec = self.settings.model, self.spec
        prior = self.method.make_prior(spec.pixels, spec.pixel_range)
        nets = make_nets(
            model.net,
            spec.shape,
            model.latent_dim,
            model.log_variance_range,
            parameters=self.likelihood.parameters,
            bounds=spec.pixel_range if model.decoder_bounds and not self.likelihood.own_units else None,
            normalisation=model.normalisation,
            shared_noise=model.noise == "shared",
        )
        for part in self.method.own_layers_first:
            nets = part.adapt(nets)
        if prior is None and model.prior == "vamp":
            prior = VampPrior(model.components, spec.pixels, spec.pixel_range)
        prior = NormalPrior(model.latent_dim) if prior is None else prior
        return VAE(*nets, self.likelihood, prior, model.latent_dim)

    @property
    def tasks_done(self) -> int:
        """The number of finished tasks."""
        return len(self.sizes)

    @property
    def in_task(self) -> bool:
        """Whether the trainer is in the middle of a task, started or loaded."""
        return self.progress is not None or self._saved is not None

    @property
    def epoch(self) -> int:
        """The epoch of the task in training, counted from 0."""
        return self.progress.epoch if self.progress is not None else 0

    @property
    def block(self) -> int:
        """The blocks of steps done in the epoch."""
        return self.progress.block if self.progress is not None else 0

    def view(self, task: int) -> Replicas:
        """Return the model for images of a task."""
        return self.method.view(self.replicas, task)

    # --- one task -----------------------------------------------------------------------------------------------

    def prepare(self, task: Task) -> tuple[Choice, ...]:
        """Check a task, and choose those of its settings that nobody gave; what was learned stays."""
        if self._prepared is not None and self._prepared[0] is task:
            return self._prepared[1]
        self._check_images(task)
        if not self.settings.chosen:
            return ()
        summary = summarise(task.train.images, self.spec, pixels=self.settings.model.decoder_bounds)
        settings, choices = choose_task(self.settings, summary)
        if settings != self.settings:
            learned = self.state()
            self._make(settings)
            self._load_state(*learned)
        self._prepared = task, choices
        return choices

    def learn(self, task: Task, observer: Observer | None = None) -> None:
        """Learn one task, or continue it after `load_state`; `observer` receives the events."""
        if self._unfinished:
            raise InputError(
                f"task '{self._unfinished}' was interrupted: call load_state with an earlier result of `state`, "
                "or make a new Trainer"
            )
        observer, choices = observer or Observer(), self.prepare(task)
        self._prepared = None  # it holds images
        with matmul_precision(self.device), one_thread(when=self.device.type == "cpu" and self.replicas.stacked):
            images = self._task_images(task)
            self._unfinished, resumed = task.name, self.in_task
            if not resumed:
                if choices := (*self.choices, *choices) if self.tasks_done == 0 else choices:
                    observer.event(choices_event(self.tasks_done, choices))
                observer.event(task_start(self.tasks_done, task))
                self.task_steps = 0
            self.progress = progress = self._begin(images)
            events = self.method.events()
            if not resumed:  # a resumed task has logged its start already
                _forward(events, observer)
            self._train(progress, images, observer)
            if again := self._again(progress, images, observer):
                progress = again
                self._train(progress, images, observer)
            self._finish(progress, images, observer)
            self._unfinished = ""

    def _train(self, progress: TaskProgress, images: TaskImages, observer: Observer) -> None:
        """Train until all replicas have stopped, and restore the best snapshots."""
        while progress.epoch < self.settings.training.epochs and progress.control.active.any():
            self._train_epoch(progress, images, observer)
            self._end_epoch(progress, images, observer)
        progress.put_back(self._snapshot())
        if self.settings.training.epochs >= LEAST_EPOCHS:  # shorter training says nothing
            self.collapsed = collapsed(self.replicas, images.train, images.pixel_range) & ~self.frozen

    def _again(self, progress: TaskProgress, images: TaskImages, observer: Observer) -> TaskProgress | None:
        """Begin the task again for collapsed replicas, with a longer KL warm-up; the others keep what they learned."""
        if "kl_warmup" not in self.settings.chosen or progress.attempt > 0 or not self.collapsed.any():
            return None
        done = ~self.collapsed
        self._load_state(*self.state())  # the model before the task
        self._saved = None
        self.method.see(images.index + 1)
        self.progress = again = self._begin(images)
        self.method.events()  # logged already
        again.attempt = 1
        again.control.keep(progress.control, done)
        again.take_snapshot(done, progress.best)
        observer.event(collapse(images.index, self.collapsed, self._warmup(again)))
        return again

    def _warmup(self, progress: TaskProgress) -> int:
        """Return the epochs of the KL warm-up: half of all when a task is learned once more after a collapse."""
        training = self.settings.training
        return training.epochs // 2 if progress.attempt else training.kl_warmup

    def _task_images(self, task: Task) -> TaskImages:
        index = self.tasks_done
        train, valid = (split.images.to(self.device) for split in (task.train, task.valid))
        if self._batch_statistics and self.settings.training.batch_of(len(train)) < 2:
            raise InputError(
                f"task '{task.name}': batch normalisation needs at least two images in a batch; "
                "use {normalisation=group}, or a larger {batch_size}"
            )
        self.method.see(index + 1)
        images = TaskImages(index, task.name, train, valid, len(train), tuple(self.sizes), self.spec.pixel_range)
        for part in self.method.parts:
            images = part.images(self.replicas, images)
        return images

    def _check_images(self, task: Task) -> None:
        """Refuse a task without images, or images whose shape or pixel range does not fit this model."""
        low, high = self.spec.pixel_range
        slack = 1e-5 * (high - low)
        for split, images in (("training", task.train.images), ("validation", task.valid.images)):
            if len(images) == 0:
                raise InputError(f"task '{task.name}' has no {split} images; it needs at least one")
            if images.ndim != 2 or images.shape[1] != self.spec.pixels:
                raise InputError(
                    f"task '{task.name}' has images of {tuple(images.shape[1:])} pixels, this model has "
                    f"{self.spec.pixels}; make a Trainer with the shape of the stream"
                )
            bounded = self.settings.model.decoder_bounds  # other numbers have no range
            if bounded and not low - slack <= images.min() <= images.max() <= high + slack:
                raise InputError(
                    f"task '{task.name}' has pixels in [{images.min():g}, {images.max():g}], outside pixel_range "
                    f"[{low:g}, {high:g}] of this model; make a Trainer with that of the stream"
                )

    def _begin(self, images: TaskImages) -> TaskProgress:
        """Prepare a task, or continue it from a loaded checkpoint."""
        training, tensors = self.settings.training, self.replicas.tensors()
        start = {name: tensor.clone() for name, tensor in tensors.items()}
        for part in self.method.own_layers_first:
            part.begin_task(self.replicas, images)
        state = self.method.state
        for name, tensor in state.items():
            if tensor.shape[:1] != (len(self.replicas),):
                raise InputError(
                    f"method '{self.method.name}': '{name}' of its state has shape {tuple(tensor.shape)}; it must "
                    f"begin with the number of replicas, {len(self.replicas)}"
                )
        chunk = validation_chunk(images.valid.shape[-2])
        chunks = -(-images.valid.shape[-2] // chunk)
        draws = self.objective.draws(chunk, training=False)
        noise = self.generators.draw_all(draws, images.index, "valid", steps=chunks)
        control = Control(np.full(len(self.replicas), training.learning_rate))
        control.active[self.frozen] = 0
        progress = TaskProgress(start, {}, control, Moments.zeros(self.replicas.parameters))
        self.engine = Engine(
            self.step,
            images.train,
            images.valid,
            training.batch_of(images.train.shape[-2]),
            state,
            noise,
            moments=progress.moments,
            totals=progress.totals,
            settled=self.method.settled,
            block=self._block_length(),
        )
        progress.best = {name: tensor.clone() for name, tensor in self._snapshot().items()}
        if self._saved is not None:  # the methods have begun the task again from its starting point
            (tensors, record), self._saved = self._saved, None
            with refused():
                put(self.replicas.tensors(), group(tensors, "model"))
                put(self.engine.state if self.method.tracks else {}, group(tensors, "state"))
                progress.load(tensors, record)
        return progress

    def _snapshot(self) -> dict[str, Tensor]:
        """Return what is saved and restored together: the model, and the tensors that the methods track."""
        return self.replicas.tensors() | prefixed("state", self.engine.state if self.method.tracks else {})

    def _block_length(self) -> int:
        return block_length(self.objective.draws(self.settings.training.batch_size, training=True))

    def _train_epoch(self, progress: TaskProgress, images: TaskImages, observer: Observer) -> None:
        engine, training, control = self.engine, self.settings.training, progress.control
        engine.set_active(np.flatnonzero(control.active).tolist())
        engine.rate.copy_(torch.from_numpy(control.learning_rate * self._annealed(progress.epoch)))
        warmup = self._warmup(progress)
        warmth = min(1.0, progress.epoch / warmup) if warmup else 1.0
        engine.kl_weight.fill_(training.kl_weight * warmth)
        key = (images.index, progress.epoch)
        steps, batch = engine.steps_per_epoch, engine.batch_size
        order = self.generators.order(engine.images, *key)[:, : steps * batch].unflatten(1, (steps, batch))
        draws = self.objective.draws(batch, training=True)
        if progress.block == 0:
            engine.reset_totals()
        for block, part in enumerate(order.split(self._block_length(), dim=1)):
            if block < progress.block:
                continue  # done before the restart
            observer.block(self)
            engine.run_block(part, self.generators.draw_all(draws, *key, block, steps=part.shape[1]))
            progress.block = block + 1
            self.task_steps += part.shape[1]

    def _annealed(self, epoch: int) -> float:
        """Return the share of the learning rate that an epoch gets: half a cosine from 1 towards 0, or always 1."""
        if self.settings.training.schedule == "plateau":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * epoch / self.settings.training.epochs))

    def _end_epoch(self, progress: TaskProgress, images: TaskImages, observer: Observer) -> None:
        training, control, epoch = self.settings.training, progress.control, progress.epoch
        numbers, plain, bound = self._measured()
        loss, active = numbers["valid"]["loss"], control.active > 0
        logged = epoch + progress.attempt * training.epochs  # a second attempt continues the curves
        event = epoch_end(images.index, logged, numbers, control.learning_rate * self._annealed(epoch), active)
        observer.event(event)
        broken = active & ~(np.isfinite(numbers["train"]["loss"]) & np.isfinite(loss))
        for replica in np.flatnonzero(broken):
            self._recover(int(replica), progress, images, observer)
        watched = loss if training.stop_by == "loss" else bound
        eligible = self.method.first_eligible
        improved = control.judge(training, epoch, plain, watched, broken, eligible, self._warmup(progress))
        progress.take_snapshot(improved, self._snapshot())
        if epoch + 1 < training.epochs:  # changes after the last one would be undone by `_finish`
            for part in self.method.parts:
                part.after_epoch(self.replicas, images, epoch)
        # Before the first eligible epoch, a replica that diverges is reset to the end of the previous epoch.
        progress.take_snapshot(active & ~broken & np.isinf(control.best), self._snapshot())
        _forward(self.method.events(), observer)
        observer.epoch(self, event)
        progress.epoch, progress.block = epoch + 1, 0

    def _measured(self) -> tuple[dict[str, dict[str, Array]], Array, Array]:
        """Return the loss terms of the epoch, {split: {term: (R,)}}, and of validation the plain ELBO and the bound."""
        training, engine = self.settings.training, self.engine
        several = training.bound_samples > 1
        if several:  # the gain of several samples depends on the weight, so use the full one
            engine.kl_weight.fill_(training.kl_weight)
        valid = engine.validate()
        train = {name: engine.totals[name] / engine.steps_per_epoch for name in valid}
        numbers = _to_host(train, valid)
        parts = numbers["valid"]
        plain = parts["reconstruction"] + parts["kl"]
        bound = parts["reconstruction"] + training.kl_weight * parts["kl"]
        # The penalty is the loss minus the bound with the epoch's weight. Summing the penalties instead would round
        # differently and change logged numbers and the choice of the best epoch.
        penalty = parts["loss"] - parts["reconstruction"] - engine.kl_weight[0].item() * parts["kl"]
        parts["loss"] = bound + penalty
        if several:  # the bound is tighter than the sum of its parts
            plain = bound = parts["loss"] - sum(values for name, values in parts.items() if name not in LOSS)
        return numbers, plain, bound

    def _recover(self, replica: int, progress: TaskProgress, images: TaskImages, observer: Observer) -> None:
        """Reset a diverged replica to its snapshot with half the learning rate, or give it up."""
        continues = progress.control.diverged(replica)
        progress.put_back(self._snapshot(), replica)
        progress.moments.forget(replica)
        self.frozen[replica] = not continues
        retry: int | str = int(progress.control.retries[replica]) if continues else "frozen"
        observer.event(divergence(images.index, progress.epoch, replica, retry))

    def _finish(self, progress: TaskProgress, images: TaskImages, observer: Observer) -> None:
        """Let the methods store their memory of the best snapshots."""
        self.method.end_task(self.replicas, images)
        _forward(self.method.events(), observer)
        self.sizes.append(images.own_images)
        self.progress = None
        observer.event(task_end(images.index, progress.control))

    # --- across restarts ----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything needed to continue: tensors, and a record of plain values for JSON."""
        if self._saved is not None:  # loaded, and not yet continued
            return self._saved
        tensors = prefixed("memory", self.method.memory()) | prefixed("model", self.replicas.tensors())
        record: dict[str, Any] = {
            "sizes": self.sizes,
            "frozen": self.frozen.tolist(),
            "task_steps": self.task_steps,
            "in_task": self.progress is not None,
        }
        if self.progress is not None:
            tensors |= self.progress.tensors()
            if self.method.tracks:
                tensors |= prefixed("state", self.engine.state)
            record |= {"epoch": self.epoch, "block": self.block, "attempt": self.progress.attempt}
        return tensors, record

    def load_state(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Restore a result of `state`; `learn` then continues an unfinished task."""
        with refused():
            self._load_state(tensors, record)
        self._unfinished = ""

    def _load_state(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        sizes, frozen, in_task = record["sizes"], record["frozen"], record["in_task"]
        check("sizes", sizes, all(whole(size) and size > 0 for size in sizes) and len(sizes) <= MOST_TASKS)
        check("frozen", frozen, len(frozen) == len(self.replicas) and all(isinstance(one, bool) for one in frozen))
        for name in ("task_steps", "epoch", "block") if in_task else ("task_steps",):
            check(name, record[name], whole(record[name]) and record[name] >= 0)
        self.sizes, self.frozen = list(sizes), np.array(frozen, dtype=bool)
        self.task_steps = record["task_steps"]
        self.method.see(len(self.sizes))
        self.method.load_memory(group(tensors, "memory"), self.replicas, len(self.sizes), self.spec.pixels)
        self.replicas.initialise()  # with capacities for the tasks seen
        put(self.replicas.tensors(), group(tensors, "start" if in_task else "model"))
        self.progress, self._saved = None, (tensors, record) if in_task else None


def _forward(events: list[Event], observer: Observer) -> None:
    for event in events:
        observer.event(event)


def _to_host(train: dict[str, Tensor], valid: dict[str, Tensor]) -> dict[str, dict[str, Array]]:
    """Bring all loss terms to the host in one transfer."""
    flat = torch.stack([*train.values(), *valid.values()]).double().cpu().numpy()
    return {"train": dict(zip(train, flat, strict=False)), "valid": dict(zip(valid, flat[len(train) :], strict=True))}
