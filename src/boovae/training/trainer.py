"""The loop: tasks, epochs, learning rate, early stopping, recovery; for all replicas at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boovae.config import Settings
from boovae.errors import InputError
from boovae.methods import TaskImages, make_method
from boovae.methods.base import default_prior
from boovae.model.likelihoods import make_likelihood
from boovae.model.nets import make_nets
from boovae.model.vae import VAE
from boovae.replicas.adam import Array, Control
from boovae.replicas.devices import choose_device, matmul_precision, one_thread
from boovae.replicas.engine import Batch, Engine, block_length, validation_chunk
from boovae.replicas.randomness import Draw, Generators
from boovae.replicas.stacked import Replicas
from boovae.training import augment
from boovae.training.events import Event, Observer, Unwatched, divergence, epoch_end, task_end, task_start
from boovae.training.state import MOST_TASKS, check, group, prefixed, put, refused, whole

if TYPE_CHECKING:
    from boovae.data import Task


#: What a batch and a loss are made of; a method's draws and penalties have other names.
BATCH, LOSS = frozenset({"x", "weight", "kl_weight", "state"}), ("loss", "reconstruction", "kl")


class Trainer:
    """R replicas of a VAE that learn one task after another.

    `learn(task)` trains on one task and forgets its images; `state` and `load_state` carry everything across a restart,
    in the middle of a task too.
    """

    def __init__(
        self,
        settings: Settings,
        shape: tuple[int, ...],
        pixel_range: tuple[float, float] = (0.0, 1.0),
        *,
        binarize: str = "none",
        device: str | torch.device = "cpu",
        compile: bool = False,
        seeds: Sequence[int] | None = None,
        candidates: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """`seeds` and `candidates` (values of a setting), one per replica, are for comparing settings side by side."""
        self.settings = settings
        self.shape, self.pixel_range, self.binarize = shape, pixel_range, binarize
        self.device = choose_device(device) if isinstance(device, str) else device
        self.compile = compile
        self.likelihood = make_likelihood(settings.model.likelihood, pixel_range)
        augment.check(settings.training, shape, binarize)
        self._batch_statistics = settings.model.normalisation == "batch" and settings.model.net.startswith("conv")
        if settings.training.bound_samples > 1 and self._batch_statistics:
            raise InputError(
                "{bound_samples}: batch normalisation knows one pass of a batch, and several samples take two; use "
                "{normalisation=group}, or {bound_samples=1}"
            )
        self.method = make_method(settings)
        self.method.compare(candidates or {})
        self.replicas = Replicas(self.build, seeds or settings.training.seeds, self.device)
        for name, values in (candidates or {}).items():
            if len(values) != len(self.replicas):
                raise InputError(f"candidates: {len(values)} values of {name} for {len(self.replicas)} replicas")
        self.engine = Engine(
            self.replicas, self.objective, track=self.method.track if self.method.tracks else None, compile=compile
        )
        self.generators = Generators(self.replicas.seeds, self.device)
        self.sizes: list[int] = []  # training images of each finished task
        self.frozen = np.zeros(len(self.replicas), dtype=bool)  # replicas given up for good
        self.control: Control | None = None  # of the task in training
        self.epoch = self.block = 0
        self.task_steps = 0
        self._resume: Callable[[], None] | None = None
        self._unfinished = ""  # the task that `learn` was in when it was broken off

    def build(self) -> VAE:
        """Return one model as the settings describe it."""
        settings, pixels = self.settings, math.prod(self.shape)
        prior = self.method.make_prior(pixels, self.pixel_range)
        nets = make_nets(
            settings.model.net,
            self.shape,
            settings.model.latent_dim,
            settings.model.log_variance_range,
            bounds=self.pixel_range if settings.model.decoder_bounds and not self.likelihood.logits else None,
            normalisation=settings.model.normalisation,
        )
        nets = self.method.adapt(nets)
        if prior is None:
            prior = default_prior(settings, pixels, self.pixel_range)
        return VAE(*nets, self.likelihood, prior, settings.model.latent_dim)

    @property
    def tasks_done(self) -> int:
        """How many tasks are finished."""
        return len(self.sizes)

    # --- the loss -----------------------------------------------------------------------------------------------

    def objective(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of one replica's loss: the negative bound and the method's penalties.

        `reconstruction` and `kl` are the parts of the ELBO; with several samples per image the bound is tighter.
        """
        x, weight = (
            augment.changed(batch["x"], batch, self.settings.training, self.shape, self.pixel_range),
            batch["weight"],
        )
        if "pixels" in batch:  # last: what was changed must be black and white in the end, as the test images are
            x = (batch["pixels"] < x).to(x.dtype)
        samples, kl_weight = self.settings.training.bound_samples, batch["kl_weight"]
        with self.method.perturbed(model, batch):
            tight = None
            if samples == 1:
                bound = model.bound(x, batch["latent"])
            else:
                tight, bound = model.tight_bound(x, batch["latent"], kl_weight, batch.get("choice"))
        reconstruction, kl = ((part * (weight / samples)).sum() for part in bound)
        loss = reconstruction + kl_weight * kl if tight is None else (tight * weight).sum()
        penalties = self.method.penalty(model, batch)
        for name in LOSS:
            if name in penalties:
                raise InputError(f"method '{self.method.name}': a penalty is called '{name}', which every loss has")
        loss = loss + sum(penalties.values())
        return {"loss": loss, "reconstruction": reconstruction, "kl": kl, **penalties}

    def draws(self, batch_size: int, *, training: bool) -> dict[str, Draw]:
        """Return the random tensors of one step of one replica."""
        several = (self.settings.training.bound_samples,) if self.settings.training.bound_samples > 1 else ()
        draws = {"latent": Draw("normal", (*several, batch_size, self.settings.model.latent_dim))}
        if training and several:
            draws["choice"] = Draw("uniform", (*several, batch_size))
        if training and self.binarize == "dynamic":
            draws["pixels"] = Draw("uniform", (batch_size, math.prod(self.shape)))
        if training:
            draws |= augment.draws(self.settings.training, batch_size)
        own = self.method.draws(batch_size) | (self.method.training_draws(batch_size) if training else {})
        for name in own.keys() & (draws.keys() | BATCH):
            raise InputError(f"method '{self.method.name}': a draw is called '{name}', which every batch has")
        return draws | own

    # --- one task -----------------------------------------------------------------------------------------------

    def learn(self, task: Task, observer: Observer | None = None) -> None:
        """Learn one task; continues in its middle if `load_state` put us there. `observer` is told what happens."""
        if self._unfinished:
            raise InputError(
                f"task '{self._unfinished}' was broken off in its middle: load_state of what `state` returned before, "
                "or a new Trainer"
            )
        observer = observer or Unwatched()
        with matmul_precision(self.device), one_thread(when=self.device.type == "cpu" and self.replicas.stacked):
            images = self._task_images(task)
            self._unfinished, resumed = task.name, self.control is not None
            if not resumed:
                observer.event(task_start(self.tasks_done, task))
                self.epoch = self.block = self.task_steps = 0
            self._begin(images)
            events = self.method.events()
            if not resumed:  # a resumed task has logged its beginning
                self._forward(events, observer)
            while self.epoch < self.settings.training.epochs and self._control.active.any():
                self._train_epoch(images, observer)
                self._end_epoch(images, observer)
            self._finish(images, observer)
            self._unfinished = ""

    def _task_images(self, task: Task) -> TaskImages:
        index = self.tasks_done
        self._check_pixels(task)
        train, valid = (split.images.to(self.device) for split in (task.train, task.valid))
        for split, count in (("training", len(train)), ("validation", len(valid))):
            if count == 0:
                raise InputError(f"task '{task.name}' has no {split} images; it needs one, at least")
        if self._batch_statistics and self.settings.training.batch_of(len(train)) < 2:
            raise InputError(
                f"task '{task.name}': batch normalisation needs two images in a batch, at least; "
                "use {normalisation=group}, or a larger {batch_size}"
            )
        self._own_images = len(train)
        self.method.see(index + 1)
        images = TaskImages(index, task.name, train, valid, len(train), tuple(self.sizes))
        return self.method.images(self.replicas, images)

    def _check_pixels(self, task: Task) -> None:
        """Refuse images that this model cannot have learned or will learn wrongly."""
        low, high = self.pixel_range
        slack = 1e-5 * (high - low)
        for images in (task.train.images, task.valid.images):
            if images.ndim != 2 or images.shape[1] != math.prod(self.shape):
                raise InputError(
                    f"task '{task.name}' has images of {tuple(images.shape[1:])} pixels, this model has "
                    f"{math.prod(self.shape)}; make the Trainer with the shape of the stream"
                )
            bounded = self.settings.model.decoder_bounds and len(images) > 0  # other numbers have no range
            if bounded and not low - slack <= images.min() <= images.max() <= high + slack:
                raise InputError(
                    f"task '{task.name}' has pixels in [{images.min():g}, {images.max():g}], outside pixel_range "
                    f"[{low:g}, {high:g}] of this model; make the Trainer with that of the stream"
                )

    def _begin(self, images: TaskImages) -> None:
        """Prepare a task, or take it up again where a checkpoint left it."""
        settings = self.settings
        self._start = self._model_tensors()
        self.method.begin_task(self.replicas, images)
        state = self.method.state()
        for name, tensor in state.items():
            if tensor.shape[:1] != (len(self.replicas),):
                raise InputError(
                    f"method '{self.method.name}': '{name}' of its state has shape {tuple(tensor.shape)}; it must "
                    f"begin with the number of replicas, {len(self.replicas)}"
                )
        chunk = validation_chunk(images.valid.shape[-2])
        chunks = -(-images.valid.shape[-2] // chunk)
        noise = self.generators.draw_all(self.draws(chunk, training=False), images.index, "valid", steps=chunks)
        self.engine.load(
            images.train,
            images.valid,
            settings.training.batch_of(images.train.shape[-2]),
            state,
            noise,
            settled=self.method.tasks_seen >= self.method.settled_by,
            block=self._block_length(),
        )
        if self.control is None:
            self.control = Control(np.full(len(self.replicas), settings.training.learning_rate))
            self.control.active[self.frozen] = 0
            self.engine.reset_optimiser()
            self._best = {name: tensor.clone() for name, tensor in self._snapshot().items()}
        if self._resume is not None:
            self._resume()
            self._resume = None

    def _block_length(self) -> int:
        return block_length(self.draws(self.settings.training.batch_size, training=True))

    @property
    def _control(self) -> Control:
        assert self.control is not None
        return self.control

    def _train_epoch(self, images: TaskImages, observer: Observer) -> None:
        engine, settings = self.engine, self.settings
        engine.attend(np.flatnonzero(self._control.active).tolist())
        engine.rate.copy_(torch.from_numpy(self._control.learning_rate * self._annealed()))
        warmth = min(1.0, self.epoch / settings.training.kl_warmup) if settings.training.kl_warmup else 1.0
        engine.kl_weight.fill_(settings.training.kl_weight * warmth)
        key = (images.index, self.epoch)
        steps, batch = engine.steps_per_epoch, engine.batch_size
        order = self.generators.order(engine.images, *key)[:, : steps * batch].unflatten(1, (steps, batch))
        draws = self.draws(batch, training=True)
        if self.block == 0:
            engine.reset_totals()
        for block, part in enumerate(order.split(self._block_length(), dim=1)):
            if block < self.block:
                continue  # done before the restart
            observer.block(self)
            engine.run_block(part, self.generators.draw_all(draws, *key, block, steps=part.shape[1]))
            self.block = block + 1
            self.task_steps += part.shape[1]

    def _annealed(self) -> float:
        """Return the share of the learning rate that an epoch gets: half a cosine from 1 towards 0, or always 1."""
        if self.settings.training.schedule == "plateau":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * self.epoch / self.settings.training.epochs))

    def _end_epoch(self, images: TaskImages, observer: Observer) -> None:
        settings, control = self.settings, self._control
        if (
            settings.training.bound_samples > 1
        ):  # what several samples gain depends on the weight, so it is the full one
            self.engine.kl_weight.fill_(settings.training.kl_weight)
        valid = self.engine.validate()
        train = {name: self.engine.totals[name] / self.engine.steps_per_epoch for name in valid}
        numbers = _to_host(train, valid)
        parts = numbers["valid"]
        penalty = parts["loss"] - parts["reconstruction"]
        penalty = penalty - self.engine.kl_weight[0].item() * parts["kl"]
        plain = parts["reconstruction"] + parts["kl"]
        bound = parts["reconstruction"] + settings.training.kl_weight * parts["kl"]
        loss = parts["loss"] = bound + penalty
        if settings.training.bound_samples > 1:  # what is learned is tighter than its parts say
            penalties = [values for name, values in parts.items() if name not in ("loss", "reconstruction", "kl")]
            plain = bound = loss - sum(penalties)
        active = control.active > 0
        rate = control.learning_rate * self._annealed()
        event = epoch_end(images.index, self.epoch, numbers, rate, active)
        observer.event(event)
        broken = active & ~(np.isfinite(numbers["train"]["loss"]) & np.isfinite(loss))
        for replica in np.flatnonzero(broken):
            self._recover(int(replica), images, observer)
        self._watch(plain, loss if settings.training.stop_by == "loss" else bound, broken)
        if self.epoch + 1 < settings.training.epochs:  # what came after the last one would be undone by `_finish`
            self.method.after_epoch(self.replicas, images, self.epoch)
        # Until an epoch may be the best one, a replica that diverges goes back to where the epoch before it ended.
        self._keep(active & ~broken & np.isinf(control.best))
        self._forward(self.method.events(), observer)
        observer.epoch(self, event)
        self.epoch += 1
        self.block = 0

    @staticmethod
    def _forward(events: list[Event], observer: Observer) -> None:
        for event in events:
            observer.event(event)

    def _watch(self, plain: Array, watched: Array, broken: Any) -> None:
        """Lower learning rates, keep best snapshots, stop replicas; a broken one sits this epoch out."""
        settings, control = self.settings, self._control
        kept = Control.from_tensors(control.tensors())
        if settings.training.schedule == "plateau":
            control.plateau(plain, settings.training.plateau_patience)
        improved = control.early_stop(
            watched,
            self.epoch,
            settings.training.early_stop,
            eligible=self.epoch >= min(self.method.first_eligible, settings.training.epochs - 1),
            counting=self.epoch >= max(settings.training.kl_warmup, self.method.first_eligible),
        )
        for name in ("learning_rate", "plateau_best", "plateau_wait", "best", "best_epoch", "wait", "active"):
            getattr(control, name)[broken] = getattr(kept, name)[broken]
        self._keep(improved & ~broken)

    def _keep(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Take a snapshot of these replicas."""
        if chosen.any():
            mask = torch.from_numpy(chosen).to(self.device)
            for name, tensor in self._snapshot().items():
                axes = mask.view(-1, *[1] * (tensor.dim() - 1))
                self._best[name] = torch.where(axes, tensor, self._best[name])

    def _snapshot(self) -> dict[str, Tensor]:
        """Return what is kept and put back together: the model, and what the method tracks along its way."""
        tracked = self.engine.state if self.method.tracks else {}
        return self._model_tensors(copy=False) | prefixed("state", tracked)

    def _recover(self, replica: int, images: TaskImages, observer: Observer) -> None:
        """Put a diverged replica back to its snapshot with half the learning rate, or give it up."""
        goes_on = self._control.diverged(replica)
        for name, tensor in self._snapshot().items():
            tensor[replica] = self._best[name][replica]
        self.engine.reset_optimiser(replica)
        self.frozen[replica] = not goes_on
        retry: int | str = int(self._control.retries[replica]) if goes_on else "frozen"
        observer.event(divergence(images.index, self.epoch, replica, retry))

    def _finish(self, images: TaskImages, observer: Observer) -> None:
        """Restore the best snapshots and let the method remember what it wants to."""
        control = self._control
        for name, tensor in self._snapshot().items():
            tensor.copy_(self._best[name])
        self.method.end_task(self.replicas, images)
        self._forward(self.method.events(), observer)
        self.sizes.append(self._own_images)
        self.control = None
        self.epoch = self.block = 0
        observer.event(task_end(images.index, control))

    # --- across restarts ----------------------------------------------------------------------------------------

    def _model_tensors(self, *, copy: bool = True) -> dict[str, Tensor]:
        return {name: tensor.clone() if copy else tensor for name, tensor in self.replicas.tensors().items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything needed to go on: tensors, and what JSON can hold."""
        tensors = prefixed("memory", self.method.memory()) | prefixed("model", self._model_tensors(copy=False))
        record: dict[str, Any] = {
            "sizes": self.sizes,
            "frozen": self.frozen.tolist(),
            "task_steps": self.task_steps,
            "in_task": self.control is not None,
        }
        if self.control is not None:
            engine = self.engine
            tensors |= prefixed("start", self._start) | prefixed("best", self._best)
            tensors |= prefixed("first", engine.first) | prefixed("second", engine.second)
            tensors |= prefixed("totals", engine.totals) | {"steps": engine.steps}
            tensors |= prefixed("control", self.control.tensors())
            if self.method.tracks:
                tensors |= prefixed("state", self.method.state())
            record |= {"epoch": self.epoch, "block": self.block}
        return tensors, record

    def load_state(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Take back what `state` returned; `learn` then goes on with the task it was in."""
        with refused():
            self._load_state(tensors, record)
        self._unfinished = ""

    def _load_state(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        count = len(self.replicas)
        sizes, frozen, in_task = record["sizes"], record["frozen"], record["in_task"]
        check("sizes", sizes, all(whole(size) and size > 0 for size in sizes) and len(sizes) <= MOST_TASKS)
        check("frozen", frozen, len(frozen) == count and all(isinstance(one, bool) for one in frozen))
        for name in ("task_steps", "epoch", "block") if in_task else ("task_steps",):
            check(name, record[name], whole(record[name]) and record[name] >= 0)
        self.sizes, self.frozen = list(sizes), np.array(frozen, dtype=bool)
        self.task_steps = record["task_steps"]
        self.method.see(len(self.sizes))
        self._load_memory(group(tensors, "memory"))
        self.replicas.initialise()  # with the capacities of the tasks seen
        self._load_model(group(tensors, "start" if in_task else "model"))
        if in_task:
            self.control = Control.from_tensors(group(tensors, "control"))
            for name, values in self.control.tensors().items():
                check(f"control/{name}", tuple(values.shape), values.shape == (count,))
            self.epoch, self.block = record["epoch"], record["block"]
            self._best = {name: tensor.to(self.device) for name, tensor in group(tensors, "best").items()}
            self._resume = lambda: self._load_progress(tensors)

    def _load_memory(self, memory: dict[str, Tensor]) -> None:
        self.method.check_memory(memory, self.replicas, len(self.sizes), math.prod(self.shape))
        self.method.load_memory({name: tensor.to(self.device) for name, tensor in memory.items()})

    def _load_progress(self, tensors: dict[str, Tensor]) -> None:
        """Put back what a task had reached; called once the method has begun it anew from its starting point."""
        engine = self.engine
        with refused():
            self._load_model(group(tensors, "model"))
            put({"steps": engine.steps}, tensors)
            put(engine.state if self.method.tracks else {}, group(tensors, "state"))
            put(engine.first, group(tensors, "first"))
            put(engine.second, group(tensors, "second"))
            put({name: torch.empty_like(tensor) for name, tensor in self._snapshot().items()}, self._best)
            totals = group(tensors, "totals")
            put({name: torch.empty_like(self.engine.rate) for name in totals}, totals)
            engine.totals = {name: tensor.to(self.device) for name, tensor in totals.items()}

    def _load_model(self, saved: dict[str, Tensor]) -> None:
        put(self._model_tensors(copy=False), saved)


def _to_host(train: dict[str, Tensor], valid: dict[str, Tensor]) -> dict[str, dict[str, Array]]:
    """Bring all loss terms to the host in one transfer."""
    flat = torch.stack([*train.values(), *valid.values()]).double().cpu().numpy()
    return {
        "train": dict(zip(train, flat, strict=False)),
        "valid": dict(zip(valid, flat[len(train) :], strict=True)),
    }
