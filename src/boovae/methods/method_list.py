"""The methods of a run: a single one, or the parts of a combination such as `boo+distill`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from boovae.config import Settings
from boovae.errors import InputError
from boovae.methods.method import Method, TaskImages
from boovae.model import Prior
from boovae.replicas import Batch, Replicas, Step

T = TypeVar("T")


class MethodList:
    """Combines methods: their penalties are summed, and each gets the images that the one before it returns.

    In a combination all names of a part (draws, state, memory, penalties) are prefixed as `part.name` outside of it and
    plain inside; the names of a single method are plain everywhere.
    """

    def __init__(self, settings: Settings, parts: Sequence[Method]) -> None:
        self.settings, self.name = settings, settings.method
        self.parts = list(parts)
        self.stores_examples = any(part.stores_examples for part in parts)
        self.knows_task = any(part.knows_task for part in parts)
        self.equal_masses = any(part.equal_masses for part in parts)
        self.tracks = any(part.tracks for part in parts)
        self.first_eligible = max(part.first_eligible for part in parts)
        self.shared_memory = frozenset(self.joined(lambda part: dict.fromkeys(part.shared_memory)))
        private = tuple(name for part in parts for name in part.private)
        for part in parts:
            part.private = private
            for other, reason in part.clashes.items():
                if other in (each.name for each in parts):
                    raise InputError(f"{{method={self.name}}}: {reason}; leave out '{other}' or '{part.name}'")
            part.check()

    @property
    def own_layers_first(self) -> list[Method]:
        """The parts, those with layers per task first: others use codes of the encoder that will be trained."""
        return sorted(self.parts, key=lambda part: not part.knows_task)

    @property
    def settled(self) -> bool:
        """Whether a step has its final form, that of all later tasks."""
        return all(part.tasks_seen >= part.settled_by for part in self.parts)

    # --- names inside and outside a part ------------------------------------------------------------------------

    def joined(self, of: Callable[[Method], Mapping[str, T]]) -> dict[str, T]:
        """Return the entries of all parts, by their outside names."""
        return {self._prefix(part) + name: value for part in self.parts for name, value in of(part).items()}

    def own(self, part: Method, everything: Mapping[str, T]) -> dict[str, T]:
        """Return the entries of a part, by their inside names."""
        start = self._prefix(part)
        return {name.removeprefix(start): value for name, value in everything.items() if name.startswith(start)}

    def batch_of(self, part: Method, batch: Batch) -> Batch:
        """Return the batch for a part: its own draws and state by their plain names."""
        if len(self.parts) == 1:
            return batch
        return {**batch, **self.own(part, batch), "state": self.own(part, batch["state"])}

    def _prefix(self, part: Method) -> str:
        return f"{part.name}." if len(self.parts) > 1 else ""

    # --- all parts at once --------------------------------------------------------------------------------------

    def see(self, tasks: int) -> None:
        """Set the number of tasks seen, including the current one."""
        for part in self.parts:
            part.tasks_seen = tasks

    def make_prior(self, pixels: int, pixel_range: tuple[float, float]) -> Prior | None:
        """Return the prior of the part that has one, or None for the one the settings name."""
        made = ((part.name, part.make_prior(pixels, pixel_range)) for part in self.parts)
        brought = {name: prior for name, prior in made if prior is not None}
        if len(brought) > 1:
            raise InputError(f"{{method={self.name}}}: {' and '.join(brought)} each have a prior; use one of them")
        return next(iter(brought.values()), None)

    def view(self, replicas: Replicas, task: int) -> Replicas:
        """Return the model for images of a task."""
        for part in self.parts:
            replicas = part.view(replicas, task)
        return replicas

    def track(self, state: dict[str, Tensor], step: Step) -> None:
        """Let all parts record a step; each sees its own state."""
        for part in self.parts:
            part.track(self.own(part, state), step)

    def events(self) -> list[dict[str, Any]]:
        """Return the events that all parts logged since the last call."""
        return [event for part in self.parts for event in part.events()]

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors that the penalties read in a step."""
        return self.joined(lambda part: part.state)

    def memory(self) -> dict[str, Tensor]:
        """Return all tensors kept between tasks besides the networks."""
        return self.joined(lambda part: part.memory)

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """End the task in all parts; all that they remember must be declared, so that a run can be continued."""
        for part in self.parts:
            part.end_task(replicas, task)
            shapes = part.memory_shapes(replicas, task.index + 1, task.train.shape[-1])
            if unknown := part.memory.keys() - shapes.keys():
                problem = f"remembers {', '.join(sorted(unknown))}, which its memory_shapes does not have"
                raise InputError(f"method '{part.name}' {problem}: its runs could not be continued; add it there")

    def load_memory(self, memory: dict[str, Tensor], replicas: Replicas, tasks: int, pixels: int) -> None:
        """Load the memory of each part; refuse one that does not fit."""
        for part in self.parts:
            part.load_memory(self.own(part, memory), replicas, tasks, pixels)

    def images_stored(self) -> int:
        """Return the number of images of finished tasks that one replica keeps."""
        return sum(part.images_stored() for part in self.parts)
