"""The base class of continual-learning methods: hooks at the start of a task, in the loss, after an epoch and at the
end, and the memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from boovae.config import Settings
from boovae.config.section import Section, hints
from boovae.errors import InputError
from boovae.model import VAE, Nets, Prior
from boovae.replicas import Batch, Draw, Replicas, Step, Teacher


@dataclass(frozen=True)
class TaskImages:
    """The images a task is trained with, on the device: (N, D), the same for all replicas, or (R, N, D)."""

    index: int
    name: str
    train: Tensor
    valid: Tensor
    own_images: int
    sizes_before: tuple[int, ...]
    pixel_range: tuple[float, float] = (0.0, 1.0)

    @property
    def images_before(self) -> int:
        """Training images of all earlier tasks."""
        return sum(self.sizes_before)

    def with_images(self, train: Tensor, valid: Tensor) -> Self:
        """Return the task with `train` and `valid` put before its own images."""
        train, valid = (torch.cat(parts, dim=-2) for parts in ((train, self.train), (valid, self.valid)))
        return replace(self, train=train, valid=valid)


class Method:
    """One continual-learning idea; a method overrides the hooks that it needs.

    All tensors have a leading replica axis R, except in `penalty`, which sees one replica under `vmap`.
    """

    name = ""
    #: One sentence for `boovae methods`.
    summary = ""
    #: Whether images of finished tasks are kept.
    stores_examples = False
    #: Memory that all replicas share, stored without the replica axis.
    shared_memory: frozenset[str] = frozenset()
    #: The first epoch whose snapshot may be the best one.
    first_eligible = 0
    #: Number of tasks seen, including the current one. Capacities follow it, never the number of planned tasks.
    tasks_seen = 0
    #: The task, counted from 1, from which a step has its final form; it is not compiled before.
    settled_by = 1
    #: Whether the task of an image must be known to score it.
    knows_task = False
    #: Whether tasks have equal shares of the prior, regardless of their numbers of images.
    equal_masses = False
    #: Whether `track` is called after every step.
    tracks = False
    #: Name prefixes of parameters that belong to a single task and are frozen with it.
    private: tuple[str, ...] = ()
    #: Its sections of settings, each a frozen dataclass beside the method; `own` holds the values of the first.
    sections: tuple[type[Section], ...] = ()
    own: Any = None
    #: The settings that `boovae tune` chooses, the main one first, with the values to try.
    search: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    #: Settings that keep their defaults with this method instead of being chosen from the data.
    unchosen: frozenset[str] = frozenset()
    #: Methods it cannot be combined with, and why.
    clashes: Mapping[str, str] = MappingProxyType({})

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if self.sections:
            self.own = settings.of(self.sections[0])
        #: All tensors kept between tasks besides the networks, {name: (R, ...)}; `memory_shapes` declares them.
        self.memory: dict[str, Tensor] = {}
        #: The tensors in `batch["state"]` for `penalty`, {name: (R, ...)}; their shapes are fixed within a task.
        self.state: dict[str, Tensor] = {}
        self.teacher = Teacher()
        self._candidates: Mapping[str, Sequence[float]] = {}
        self._events: list[dict[str, Any]] = []

    # --- helpers for methods ------------------------------------------------------------------------------------

    def log(self, event: dict[str, Any]) -> None:
        """Write an event to the run's log."""
        self._events.append(event)

    def say(self, task: TaskImages, text: str) -> None:
        """Show the user a note about a task and log it."""
        self.log({"event": "note", "task": task.index, "text": f"{self.name}: {text}"})

    def events(self) -> list[dict[str, Any]]:
        """Return the events logged since the last call."""
        events, self._events = self._events, []
        return events

    def strength(self, name: str, replicas: Replicas) -> Tensor:
        """Return a setting for each replica, (R,): the same for all, unless several values are compared."""
        values = self._candidates.get(name)
        if not values:
            kind = next(kind for kind in self.sections if name in hints(kind))
            values = [getattr(self.settings.of(kind), name)] * len(replicas)
        return torch.tensor([float(value) for value in values], device=replicas.device)

    def hold_to_past(self, name: str, replicas: Replicas, task: TaskImages, part: str = "") -> None:
        """From the second task on, give `penalty` a frozen copy of the current networks (or a part of them).

        Its `weight` is the setting `name` times (images before / images now): the past counts by its number of images.
        """
        if self.tasks_seen > 1:
            weight = self.strength(name, replicas) * (task.images_before / task.own_images)
            self.state = {**self.teacher.freeze(replicas, part), "weight": weight}

    def shared(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the networks' tensors that all tasks share."""
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(("prior.", *self.private))}

    def shapes_of(self, replicas: Replicas, *kinds: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of tensors `kind.name` with the sizes of the shared parameters."""
        shared = self.shared(replicas.parameters)
        return {f"{kind}.{name}": tuple(tensor.shape) for kind in kinds for name, tensor in shared.items()}

    # --- the model ----------------------------------------------------------------------------------------------

    def compare(self, candidates: Mapping[str, Sequence[float]]) -> None:
        """Give each replica its own value of some settings."""
        self._candidates = candidates

    def check(self) -> None:
        """Refuse settings that are invalid in this combination; called once all parts are known."""

    def make_prior(self, pixels: int, pixel_range: tuple[float, float]) -> Prior | None:
        """Return the method's own prior, or None for the one the settings name."""
        return None

    def adapt(self, nets: Nets) -> Nets:
        """Return the encoder and decoder, with layers changed if need be."""
        return nets

    def view(self, replicas: Replicas, task: int) -> Replicas:
        """Return the model for images of a task."""
        return replicas

    # --- the life of a task -------------------------------------------------------------------------------------

    def images(self, replicas: Replicas, task: TaskImages) -> TaskImages:
        """Return the images to train on: the task's, and others if need be; `replicas` are those before the task."""
        return task

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Prepare for a task; `task` was returned by `images`."""

    def after_epoch(self, replicas: Replicas, task: TaskImages, epoch: int) -> None:
        """Act between two epochs."""

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Finish a task; `replicas` hold the best snapshots. Store what is kept in `memory`."""

    # --- a step -------------------------------------------------------------------------------------------------

    def draws(self, batch_size: int) -> dict[str, Draw]:
        """Return the random tensors that `penalty` needs in its batch, for one step of one replica."""
        return {}

    def training_draws(self, batch_size: int) -> dict[str, Draw]:
        """Return random tensors that are in the batch only in training, not in validation."""
        return {}

    @property
    def wants_old_components(self) -> bool:
        """Whether `penalty` reads `batch["old_components"]`: the current encodings of finished tasks' pseudo-inputs."""
        return False

    @contextmanager
    def perturbed(self, model: VAE, batch: Batch) -> Iterator[None]:
        """Perturb the model of one replica while the ELBO is computed; without draws it must change nothing."""
        yield  # not `nullcontext`, which torch.compile cannot trace in an ExitStack

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return named terms, each a scalar, that are added to the loss of one replica."""
        return {}

    def track(self, state: dict[str, Tensor], step: Step) -> None:
        """Record a step: update `state` in place.

        Tensors have the leading axis R, or none where replicas run one after another.
        """

    # --- the memory ---------------------------------------------------------------------------------------------

    def images_stored(self) -> int:
        """Return the number of images of finished tasks that one replica keeps."""
        return 0

    def memory_shapes(self, replicas: Replicas, tasks: int, pixels: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `memory` after `tasks` tasks, with -1 for any size."""
        return {}

    def load_memory(self, memory: dict[str, Tensor], replicas: Replicas, tasks: int, pixels: int) -> None:
        """Load a saved memory; refuse one that does not fit this method, as a checkpoint may come from anywhere."""
        shapes = self.memory_shapes(replicas, tasks, pixels)
        for name in shapes.keys() | memory.keys():
            wanted, found = shapes.get(name), tuple(memory[name].shape) if name in memory else None
            if not (wanted and found and memory[name].dtype in (torch.float32, torch.int64) and fits(found, wanted)):
                raise InputError(
                    f"the checkpoint's memory '{name}' is {found or 'missing'}, but method '{self.name}' expects "
                    f"{wanted or 'none of this name'}; continue with the configuration it was made with"
                )
        self.memory = {name: tensor.to(replicas.device) for name, tensor in memory.items()}


def fits(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a shape is the expected one, in which -1 stands for any size."""
    return len(found) == len(wanted) and all(size in (-1, own) for size, own in zip(wanted, found, strict=True))
