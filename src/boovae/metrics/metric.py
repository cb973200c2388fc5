"""The interface of a metric: how it measures a model, and the names of its numbers wherever they are shown.

A metric is one file, in the package or outside it; `BOOVAE_METHODS` then names the file, as for methods:

    @register
    class Brightness(Metric):
        name = "brightness"

        def measure(self, context):
            return {"mean": context.samples.mean((1, 2))}

`--metric brightness` then puts it into `metrics.jsonl` (under `others`), the table on the terminal, the CSV, the
trackers and the report. Code that only reads numbers needs no torch: metrics import it inside `measure`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from boovae.errors import InputError, unknown_name
from boovae.metrics.evaluation import Evaluation
from boovae.metrics.schema import Floats, rounded

if TYPE_CHECKING:
    from torch import Tensor

    from boovae.data import Task
    from boovae.metrics.classifier import Classifier
    from boovae.metrics.partial_results import PartialResult
    from boovae.metrics.reference import Reference
    from boovae.training.trainer import Trainer

#: What may be missing: images of every task seen, the dataset's classifier, networks that give features.
Need = Literal["images", "classifier", "features"]
Kind = TypeVar("Kind", bound=type["Metric"])


@dataclass
class Context:
    """The model and data to measure, and the networks to measure with."""

    trainer: Trainer
    tasks: Sequence[Task | None]  # None if the images are not available
    history: Sequence[Evaluation] = ()
    classifier: Classifier | None = None
    references: Sequence[Reference] = ()
    progress: Callable[[float], None] = lambda share: None
    partial_results: MutableMapping[str, PartialResult] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)  # measured so far

    @cached_property
    def samples(self) -> Tensor:
        """Generated images of every replica (R, N, D), shared by all metrics."""
        from boovae.training.sampling import generate

        return generate(self.trainer, self.trainer.settings.evaluation.generated)

    @property
    def present(self) -> list[Task]:
        """The tasks whose images are available."""
        return [task for task in self.tasks if task is not None]

    def has(self, need: Need) -> bool:
        """Whether a need is met; none is if images are missing, because samples come from all tasks."""
        if len(self.present) < len(self.tasks):
            return False
        return {"images": True, "classifier": self.classifier is not None, "features": bool(self.references)}[need]


@dataclass(frozen=True)
class Number:
    """A number of an evaluation with its name in each place that shows it; an empty name hides it there."""

    values: Floats  # (R,), seen x (R,), or () if shared by all replicas
    name: str = ""  # in tables of numbers (CSV)
    tag: str = ""  # on trackers
    column: str = ""  # on the terminal
    curve: str = ""  # over the tasks seen, on the page of a report
    digits: int = 2  # on the terminal
    remark: str = ""  # after the number, on the terminal


class Metric(ABC):
    """A metric; `METRICS` holds one object of each."""

    #: Its name for `--metric`.
    name: ClassVar[str]
    #: The name of its numbers in texts; `name` if empty.
    title: ClassVar[str] = ""
    #: What it requires.
    needs: ClassVar[frozenset[Need]] = frozenset()
    #: The section of the evaluation that it fills; metrics from outside the package fill one in `others`.
    section: ClassVar[str] = ""

    #: Other names that request it.
    aliases: ClassVar[frozenset[str]] = frozenset()
    #: Whether it is always measured, requested or not.
    always: ClassVar[bool] = False

    @property
    def names(self) -> frozenset[str]:
        """All names that request it."""
        return self.aliases | {self.name}

    @abstractmethod
    def measure(self, context: Context) -> Any:
        """Return its section; outside the package a mapping of names to arrays (R,) or seen x (R,)."""

    def numbers(self, section: Any) -> Iterable[Number]:
        """Return the numbers of a section and where to show them; by default all of them everywhere."""
        return plain_numbers(self.name, self.title, section)


def plain_numbers(metric: str, title: str, section: Mapping[str, Floats]) -> Iterator[Number]:
    """Yield numbers under the name of their metric, followed by their own name if that differs."""
    for key, values in section.items():
        own = [key] if key not in (metric, "value") else []
        name, shown = "_".join([metric, *own]), " ".join([title or metric, *own])
        yield Number(values, name, name, shown, shown, 4) if values.ndim == 1 else Number(values, name, name)


METRICS: dict[str, Metric] = {}
#: The metrics measured by default.
USUAL = ("nll", "diversity", "frechet")


def register(kind: Kind) -> Kind:
    """Add a metric from outside the package; a class decorator."""
    from boovae.methods.registry import from_outside

    if not re.fullmatch(r"[\w-]+", kind.name):
        raise InputError(f"{kind.__name__}.name is {kind.name!r}; use letters, digits, '_' and '-'")
    if kind.section or any(kind.name in known.names for known in METRICS.values() if known.section):
        raise InputError(f"{kind.__name__}.name is {kind.name!r}, the name of a built-in metric; choose another name")
    METRICS[kind.name] = kind()
    from_outside.append(kind.name)
    return kind


def known_metrics() -> dict[str, Metric]:
    """Return all metrics by name, including those of files outside the package."""
    if os.environ.get("BOOVAE_METHODS"):
        from boovae.methods.registry import import_outside

        import_outside()
    return METRICS


def check_metrics(names: Sequence[str]) -> None:
    """Refuse names that no metric has."""
    known = {name for metric in known_metrics().values() for name in metric.names}
    for name in (each for each in names if each not in known):
        raise unknown_name("metric", str(name), known)


def requested(names: Sequence[str]) -> list[Metric]:
    """Return the metrics that these names request, in the order of measurement."""
    check_metrics(names)
    return [metric for metric in METRICS.values() if metric.always or metric.names & set(names)]


def numbers(evaluation: Evaluation) -> Iterator[Number]:
    """Yield all numbers of an evaluation, metric by metric; those of unknown metrics come last."""
    for name, metric in known_metrics().items():
        section = getattr(evaluation, metric.section) if metric.section else evaluation.others.get(name)
        if section is not None:
            yield from metric.numbers(section)
    for name, section in evaluation.others.items():
        if name not in METRICS:
            yield from plain_numbers(name, "", section)


def plain_section(metric: str, found: Any, seen: int, replicas: int) -> dict[str, Floats]:
    """Return the result of a metric from outside the package as arrays; refuse what a log cannot hold."""
    if not isinstance(found, Mapping) or not found:
        raise InputError(f"metric '{metric}' returns {found!r:.40}; it must return arrays by name")
    section = {str(name): rounded(values) for name, values in found.items()}
    for name, values in section.items():
        if values.shape not in ((replicas,), (seen, replicas)):
            raise InputError(
                f"metric '{metric}': '{name}' has shape {values.shape}; it must have a number for each of {replicas} "
                f"replicas, or for each of {seen} tasks and replicas"
            )
    return section
