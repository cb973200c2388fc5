"""What a continual-learning method is: what happens when a task begins, in the loss, after an epoch, when it ends,
and what it remembers. Methods combine: `a+b` is a and b at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from boovae.config import Settings
from boovae.config.section import Section, hints
from boovae.errors import InputError
from boovae.model.nets import Nets
from boovae.model.priors import NormalPrior, Prior, VampPrior
from boovae.model.vae import VAE
from boovae.replicas.engine import Batch, Step
from boovae.replicas.randomness import Draw
from boovae.replicas.stacked import Replicas


@dataclass(frozen=True)
class TaskImages:
    """The images a task is trained with, on the device: (N, D) for all replicas alike, or (R, N, D)."""

    index: int
    name: str
    train: Tensor
    valid: Tensor
    own_images: int
    sizes_before: tuple[int, ...]

    @property
    def images_before(self) -> int:
        """Training images of all earlier tasks."""
        return sum(self.sizes_before)


class Method:
    """One continual-learning idea; a method overrides what it needs.

    Everything here has a leading replica axis R, except what `penalty` sees: that is one replica under `vmap`.
    """

    name = ""
    #: One sentence for `boovae methods`.
    summary = ""
    #: Whether images of finished tasks are kept.
    stores_examples = False
    #: Memory that all replicas share, stored without the replica axis.
    shared_memory: frozenset[str] = frozenset()
    #: Snapshots taken before this epoch are not eligible as the best one.
    first_eligible = 0
    #: Tasks seen, the current one included. Capacities follow it, never the number of tasks planned.
    tasks_seen = 0
    #: The task, counting from 1, from which on a step has its final form; it is not compiled before.
    settled_by = 1
    #: Whether the task of an image must be known to score it.
    knows_task = False
    #: Whether tasks share the prior equally, whatever their numbers of images.
    equal_masses = False
    #: Whether `track` is called after every step.
    tracks = False
    #: Names (their beginnings) of parameters that belong to one task alone and are frozen with it.
    private: tuple[str, ...] = ()
    #: Its settings, each section a frozen dataclass beside the method.
    sections: tuple[type[Section], ...] = ()
    #: The strengths that `boovae tune` chooses, the main one first, and the values it tries.
    search: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    #: Methods it cannot be combined with, and why.
    clashes: Mapping[str, str] = MappingProxyType({})

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._candidates: Mapping[str, Sequence[float]] = {}
        self._events: list[dict[str, Any]] = []

    def log(self, event: dict[str, Any]) -> None:
        """Put an event into the run's log."""
        self._events.append(event)

    def say(self, task: TaskImages, text: str) -> None:
        """Tell the user something about a task, in the log too."""
        self.log({"event": "note", "task": task.index, "text": f"{self.name}: {text}"})

    def events(self) -> list[dict[str, Any]]:
        """Return what was logged since the last call."""
        events, self._events = self._events, []
        return events

    def compare(self, candidates: Mapping[str, Sequence[float]]) -> None:
        """Give each replica its own value of some settings."""
        self._candidates = candidates

    def strength(self, name: str, replicas: Replicas) -> Tensor:
        """Return a setting for each replica, (R,): the same for all, unless values are compared."""
        values = self._candidates.get(name) or [self._number(name)] * len(replicas)
        return torch.tensor([float(value) for value in values], device=replicas.device)

    def _number(self, name: str) -> float:
        return next(float(getattr(self.settings.of(kind), name)) for kind in self.sections if name in hints(kind))

    def check(self) -> None:
        """Refuse settings that make no sense in this combination; called once all parts are known."""

    def see(self, tasks: int) -> None:
        """Take note of how many tasks have been seen, the current one included."""
        self.tasks_seen = tasks

    def make_prior(self, pixels: int, pixel_range: tuple[float, float]) -> Prior | None:
        """Return the method's own prior, or None for the one the settings name."""
        return None

    def adapt(self, nets: Nets) -> Nets:
        """Return the encoder and decoder, perhaps with other layers."""
        return nets

    def images(self, replicas: Replicas, task: TaskImages) -> TaskImages:
        """Return what is trained on: the task's images, perhaps with others mixed in; `replicas` are as they were."""
        return task

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Prepare for a task; `task` is what `images` returned."""

    def draws(self, batch_size: int) -> dict[str, Draw]:
        """Return the random tensors that `penalty` wants in its batch, for one step of one replica."""
        return {}

    def training_draws(self, batch_size: int) -> dict[str, Draw]:
        """Return random tensors that are in the batch in training only; validation goes without."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Return what `penalty` finds in `batch["state"]`, {name: (R, ...)}; shapes stay the same within a task."""
        return {}

    @contextmanager
    def perturbed(self, model: VAE, batch: Batch) -> Iterator[None]:
        """Let the model of one replica be noisy while the ELBO is computed; without draws it must change nothing."""
        yield

    def track(self, state: dict[str, Tensor], step: Step) -> None:
        """Take note of a step: update `state` in place.

        Everything has the leading axis R, or none where replicas run one after another.
        """

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return named terms, each a scalar, that are added to the loss of one replica."""
        return {}

    def after_epoch(self, replicas: Replicas, task: TaskImages, epoch: int) -> None:
        """Act between two epochs."""

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Act when a task is learned; `replicas` hold the best snapshots. What is kept must show in `memory`."""

    def view(self, replicas: Replicas, task: int) -> Replicas:
        """Return the model as it is for images of a task."""
        return replicas

    def shared(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the networks' tensors that all tasks share."""
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(("prior.", *self.private))}

    def memory(self) -> dict[str, Tensor]:
        """Return all that survives a task besides the networks: {name: (R, ...)}."""
        return {}

    def images_stored(self) -> int:
        """Return how many images of finished tasks one replica keeps."""
        return 0

    def memory_shapes(self, replicas: Replicas, tasks: int, pixels: int) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes that `memory` has after so many tasks, -1 for any size; None says nothing about them."""
        return None

    def check_memory(self, memory: dict[str, Tensor], replicas: Replicas, tasks: int, pixels: int) -> None:
        """Refuse a memory that is not this method's; a checkpoint may come from anywhere."""
        shapes = self.memory_shapes(replicas, tasks, pixels)
        if shapes is None:
            return
        for name in shapes.keys() | memory.keys():
            wanted, found = shapes.get(name), tuple(memory[name].shape) if name in memory else None
            fits = wanted and found and len(wanted) == len(found) and memory[name].dtype in (torch.float32, torch.int64)
            if not fits or any(size not in (-1, own) for size, own in zip(wanted or (), found or (), strict=True)):
                raise InputError(
                    f"the checkpoint's memory '{name}' is {found or 'missing'}, that of method '{self.name}' is "
                    f"{wanted or 'not called so'}; continue with the configuration it was made with"
                )

    def load_memory(self, memory: dict[str, Tensor]) -> None:
        """Take back what `memory` returned."""
        if memory:
            raise InputError(f"the checkpoint remembers {sorted(memory)}, which method '{self.name}' does not know")


class Combination(Method):
    """Several methods at once: their penalties add up, each sees the images the one before it returns."""

    def __init__(self, settings: Settings, parts: Sequence[Method]) -> None:
        super().__init__(settings)
        self.parts = {part.name: part for part in parts}
        self.name = "+".join(self.parts)
        self.summary = "; ".join(part.summary for part in parts)
        self.stores_examples = any(part.stores_examples for part in parts)
        self.first_eligible = max(part.first_eligible for part in parts)
        self.shared_memory = frozenset(f"{part.name}.{name}" for part in parts for name in part.shared_memory)
        self.settled_by = max(part.settled_by for part in parts)
        self.knows_task = any(part.knows_task for part in parts)
        self.equal_masses = any(part.equal_masses for part in parts)
        self.tracks = any(part.tracks for part in parts)
        self.private = tuple(name for part in parts for name in part.private)
        for part in parts:
            part.private = self.private
            for other, reason in part.clashes.items():
                if other in self.parts:
                    raise InputError(f"{{method={self.name}}}: {reason}; leave out '{other}' or '{part.name}'")
            part.check()

    def compare(self, candidates: Mapping[str, Sequence[float]]) -> None:
        """Tell all parts."""
        for part in self.parts.values():
            part.compare(candidates)

    def events(self) -> list[dict[str, Any]]:
        """Return what all parts logged."""
        return [event for part in self.parts.values() for event in part.events()]

    def see(self, tasks: int) -> None:
        """Tell all parts."""
        super().see(tasks)
        for part in self.parts.values():
            part.see(tasks)

    def make_prior(self, pixels: int, pixel_range: tuple[float, float]) -> Prior | None:
        """Return the one prior that a part brings."""
        priors = {name: part.make_prior(pixels, pixel_range) for name, part in self.parts.items()}
        brought = {name: prior for name, prior in priors.items() if prior is not None}
        if len(brought) > 1:
            raise InputError(f"{{method={self.name}}}: {' and '.join(brought)} each bring a prior; use one of them")
        return next(iter(brought.values()), None)

    def adapt(self, nets: Nets) -> Nets:
        """Let all parts change the layers; first those that give a task layers of its own."""
        for part in self._own_layers_first():
            nets = part.adapt(nets)
        return nets

    def images(self, replicas: Replicas, task: TaskImages) -> TaskImages:
        """Hand the images through all parts."""
        for part in self.parts.values():
            task = part.images(replicas, task)
        return task

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Prepare all parts; what looks at codes of the new images needs the encoder that will learn them."""
        for part in self._own_layers_first():
            part.begin_task(replicas, task)

    def _own_layers_first(self) -> list[Method]:
        return sorted(self.parts.values(), key=lambda part: not part.knows_task)

    def draws(self, batch_size: int) -> dict[str, Draw]:
        """Return all parts' draws under `part.name`."""
        return {
            f"{key}.{name}": draw for key, part in self.parts.items() for name, draw in part.draws(batch_size).items()
        }

    def training_draws(self, batch_size: int) -> dict[str, Draw]:
        """Return all parts' draws under `part.name`."""
        return {
            f"{key}.{name}": draw
            for key, part in self.parts.items()
            for name, draw in part.training_draws(batch_size).items()
        }

    def state(self) -> dict[str, Tensor]:
        """Return all parts' state under `part.name`."""
        return _joined({key: part.state() for key, part in self.parts.items()})

    @contextmanager
    def perturbed(self, model: VAE, batch: Batch) -> Iterator[None]:
        """Let all parts make noise."""
        with ExitStack() as stack:
            for key, part in self.parts.items():
                stack.enter_context(part.perturbed(model, {**batch, **_part(batch, key)}))
            yield

    def track(self, state: dict[str, Tensor], step: Step) -> None:
        """Let all parts take note; each sees its own state."""
        for key, part in self.parts.items():
            part.track(_part(state, key), step)

    def view(self, replicas: Replicas, task: int) -> Replicas:
        """Return the model as the part that knows tasks has it."""
        for part in self.parts.values():
            replicas = part.view(replicas, task)
        return replicas

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return all parts' terms; each part sees its own draws and state under their plain names."""
        terms = {}
        for key, part in self.parts.items():
            own = {**batch, **_part(batch, key), "state": _part(batch["state"], key)}
            terms.update({f"{key}.{name}": term for name, term in part.penalty(model, own).items()})
        return terms

    def after_epoch(self, replicas: Replicas, task: TaskImages, epoch: int) -> None:
        """Let all parts act."""
        for part in self.parts.values():
            part.after_epoch(replicas, task, epoch)

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Let all parts end the task."""
        for part in self.parts.values():
            part.end_task(replicas, task)

    def memory(self) -> dict[str, Tensor]:
        """Return all parts' memory under `part.name`."""
        return _joined({key: part.memory() for key, part in self.parts.items()})

    def images_stored(self) -> int:
        """Return the images of all parts."""
        return sum(part.images_stored() for part in self.parts.values())

    def check_memory(self, memory: dict[str, Tensor], replicas: Replicas, tasks: int, pixels: int) -> None:
        """Let each part look at its memory."""
        for key, part in self.parts.items():
            part.check_memory(_part(memory, key), replicas, tasks, pixels)

    def load_memory(self, memory: dict[str, Tensor]) -> None:
        """Give each part its memory back."""
        for key, part in self.parts.items():
            part.load_memory(_part(memory, key))


def _joined(parts: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{key}.{name}": tensor for key, part in parts.items() for name, tensor in part.items()}


def _part(tensors: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{key}."): tensor for name, tensor in tensors.items() if name.startswith(f"{key}.")}


def default_prior(settings: Settings, pixels: int, pixel_range: tuple[float, float]) -> Prior:
    """Return the prior that the settings name."""
    if settings.model.prior == "vamp":
        return VampPrior(settings.model.components, pixels, pixel_range)
    return NormalPrior(settings.model.latent_dim)


def merged(task: TaskImages, train: Tensor, valid: Tensor) -> TaskImages:
    """Return the task with more images: `train` and `valid` in front of its own."""
    return replace(task, train=torch.cat([train, task.train], dim=-2), valid=torch.cat([valid, task.valid], dim=-2))
