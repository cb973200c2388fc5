"""The record of a run, which reports and warnings read: typed events of its log, numbers and pictures.

`runs` reads run folders into these records (runs/reading.py); nothing here opens a file.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from boovae.metrics.evaluation import Evaluation
from boovae.metrics.schema import Count, Floats, PerReplica, TaskIndex, absent, axes

#: Most pixels of an image; more mean a broken file.
MOST_PIXELS = 10**8

Side = Annotated[int, msgspec.Meta(ge=1, lt=MOST_PIXELS)]


# --- events of the log ----------------------------------------------------------------------------------------------


class Split(msgspec.Struct, frozen=True):
    """How the data were split: the fields that are read again."""

    digest: str
    binarize: str = "none"
    borders: Any = None


class Head(msgspec.Struct, frozen=True, tag="run", tag_field="event"):
    """The first event: method, data and seeds of the run."""

    seeds: list[int]
    method: str
    dataset: str
    shape: Annotated[list[Side], msgspec.Meta(min_length=1, max_length=3)]
    tasks: list[str]
    split: Split
    format: int = 1
    pixel_range: tuple[float, float] = (0.0, 1.0)
    estimator: Any = None


class Extension(msgspec.Struct, frozen=True, tag="extend", tag_field="event"):
    """A task was added to a finished run."""

    task: TaskIndex
    name: str
    split: Split
    source: str | None = None


class TaskStart(msgspec.Struct, frozen=True, tag="task_start", tag_field="event"):
    """A task begins."""

    task: TaskIndex
    name: str
    classes: list[int] | None = None


class Terms(msgspec.Struct, frozen=True, eq=False):
    """Terms of the loss."""

    loss: PerReplica = absent()
    kl: PerReplica = absent()


class Epoch(msgspec.Struct, frozen=True, eq=False, tag="epoch", tag_field="event"):
    """One epoch of one task."""

    task: TaskIndex
    epoch: Count
    train: Terms = Terms()
    valid: Terms = Terms()
    active: PerReplica = absent()  # 0 for a replica that has stopped

    def term(self, split: str, name: str) -> Floats:
        """Return a term of the loss, [R]; NaN for a replica that has stopped."""
        return np.where(self.active == 0, np.nan, getattr(getattr(self, split), name))


class Divergence(msgspec.Struct, frozen=True, tag="divergence", tag_field="event"):
    """A replica diverged: its numbers are no longer finite."""

    task: TaskIndex
    epoch: Count
    replica: Count
    retry: int | str | None = None

    @property
    def frozen(self) -> bool:
        """Whether the replica was given up."""
        return self.retry == "frozen"


class ComponentsLearned(msgspec.Struct, frozen=True, eq=False, tag="components", tag_field="event"):
    """Either −E[log m] with different numbers of components, or how many were kept when a task ended."""

    task: TaskIndex
    sizes: Annotated[Floats, axes("sizes")] | None = None
    divergence: Annotated[Floats, axes("sizes", "replicas")] = absent()
    kept: PerReplica | None = None
    twins: PerReplica = absent()  # duplicates of others


class Pruning(msgspec.Struct, frozen=True, eq=False, tag="prune", tag_field="event"):
    """Components of a task were dropped after the task had ended."""

    task: TaskIndex
    dropped: PerReplica
    late: bool = False  # after the last evaluation


class Note(msgspec.Struct, frozen=True, tag="note", tag_field="event"):
    """A remark of a method."""

    task: TaskIndex
    text: str


class Choice(msgspec.Struct, frozen=True):
    """A setting that was chosen from the data, and why."""

    setting: str
    value: str | float | int | bool | list[float] | None
    reason: str


class Choices(msgspec.Struct, frozen=True, tag="choices", tag_field="event"):
    """The settings that were chosen for a task."""

    task: TaskIndex
    choices: list[Choice]


class Timing(msgspec.Struct, frozen=True, tag="task", tag_field="event"):
    """Wall time of one task."""

    task: TaskIndex
    train_seconds: float = float("nan")
    evaluate_seconds: float = float("nan")
    steps: float = float("nan")


#: Events that are read, by kind; methods may write other kinds, which are skipped.
EVENTS: dict[str, type[msgspec.Struct]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (Head, Extension, TaskStart, Epoch, Divergence, ComponentsLearned, Pruning, Note, Choices, Evaluation)
}


# --- other files ----------------------------------------------------------------------------------------------------


class Component(msgspec.Struct, frozen=True):
    """A stored component of the first replica, in `components.json`."""

    task: TaskIndex
    component: Annotated[int, msgspec.Meta(ge=0, lt=10**6)]  # its place in the task
    pseudo_input: bytes  # PNG; base64 in the file
    decoded: bytes  # PNG: its reconstruction by the decoder
    weight: float | None = None  # inside its task
    cost: float | None = None  # in nats, of dropping it; None if it is the task's only one


class ComponentsFile(msgspec.Struct, frozen=True):
    """The content of `components.json`."""

    components: list[Component]


class Codes(msgspec.Struct, frozen=True, eq=False):
    """Codes of some test images of one task."""

    task: TaskIndex
    points: Annotated[Floats, axes("points", "two")]


class Place(msgspec.Struct, frozen=True, eq=False):
    """A component of the prior; `task` is None where the prior is not divided among tasks."""

    at: Annotated[Floats, axes("two")]
    deviation: Annotated[Floats, axes("two")]
    mass: float | None = None
    task: TaskIndex | None = None


class LatentMap(msgspec.Struct, frozen=True, eq=False):
    """The plane in which the first replica's codes are spread most, in `latents.json`."""

    codes: list[Codes]
    components: list[Place]
    explained: Annotated[Floats, axes("two")] = absent()  # the axes' shares of the variance
    separate: bool = False  # every task has its own latent space


# --- the whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """−E[log m], the divergence of a task's mixture from its aggregated posterior, by number of components."""

    sizes: Floats  # n
    divergence: Floats  # n x [R]


@dataclass(frozen=True)
class RunRecord:
    """Everything that is read from a run, in order of the tasks."""

    path: str  # of the run folder
    head: Head
    planned: int  # number of tasks, including extensions
    task_names: dict[int, str]
    class_names: dict[int, str]
    epochs: list[Epoch]
    divergences: list[Divergence]
    evaluations: list[Evaluation]
    gains: dict[int, Gain]
    kept: dict[int, ComponentsLearned]
    prunings: list[Pruning]
    remarks: list[Note]
    choices: list[Choices]
    config: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    timings: dict[int, Timing] = field(default_factory=dict)
    samples: dict[int, bytes] = field(default_factory=dict)  # PNG
    components: list[Component] = field(default_factory=list)
    latents: LatentMap | None = None
    notes: list[str] = field(default_factory=list)  # files that could not be read

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.rpartition("/")[2]

    @property
    def wide(self) -> bool:
        """Whether its pictures are strips of colours, or much wider than high."""
        shape = self.head.shape
        return len(shape) == 1 or shape[-1] > 2 * shape[-2]

    @property
    def finished(self) -> bool:
        """Whether every planned task has been evaluated."""
        return bool(self.evaluations) and self.evaluations[-1].learned >= self.planned

    def task_name(self, task: int) -> str:
        """Return the name of a task, or its number from 1 if it has none."""
        return self.task_names.get(task, f"task {task + 1}")

    def classes(self, evaluation: Evaluation) -> list[str]:
        """Return the names of the classes whose samples were counted."""
        if evaluation.diversity is None:
            return []
        counted = evaluation.diversity.classes or range(evaluation.diversity.proportions.shape[1])
        return [self.class_names.get(number, str(number)) for number in counted]

    def seconds(self, what: str) -> float:
        """Return the wall time of all tasks; `what` is "train" or "evaluate"."""
        return float(sum(getattr(timing, f"{what}_seconds") for timing in self.timings.values()))
