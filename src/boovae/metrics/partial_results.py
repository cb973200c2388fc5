"""Partial results of long metrics: saved in a checkpoint, they let a killed evaluation continue where it stopped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from boovae.training.state import check, group, prefixed, whole

Step = TypeVar("Step")


@dataclass
class PartialResult:
    """The values that a computation has accumulated, and how many of its steps they include.

    The plan, as JSON, describes how the work is cut into steps; values of another plan are discarded. `progress` is
    called with the share that is done, after each step.
    """

    plan: dict[str, Any] = field(default_factory=dict)
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    done: int = 0
    progress: Callable[[float], None] = lambda share: None

    def begin(self, plan: dict[str, Any], values: Tensor) -> Tensor:
        """Return the tensor to accumulate in: `values`, or the saved one if this plan was begun before."""
        if plan != self.plan:
            self.plan, self.values, self.done = plan, values, 0
        found, wanted = ((tuple(one.shape), one.dtype) for one in (self.values, values))
        check("tally", found, found == wanted)
        self.values = self.values.to(values.device)
        return self.values

    def rest(self, steps: Sequence[Step]) -> Iterator[Step]:
        """Yield the remaining steps; a step is done when the next is requested."""
        check("done", self.done, self.done <= len(steps))
        for step in steps[self.done :]:
            yield step
            self.done += 1
            self.progress(self.done / len(steps))


def state(partial: Mapping[str, PartialResult]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what a checkpoint saves: tensors and a JSON record."""
    if not partial:
        return {}, {}
    record = {name: {"plan": sums.plan, "done": sums.done} for name, sums in partial.items()}
    return prefixed("tally", {name: sums.values for name, sums in partial.items()}), {"tally": record}


def load_state(tensors: dict[str, Tensor], record: dict[str, Any]) -> dict[str, PartialResult]:
    """Restore the result of `state`; forged values are refused, here or when they are used."""
    values, partial = group(tensors, "tally"), {}
    for name, kept in record.get("tally", {}).items():
        plan, done = kept["plan"], kept["done"]
        check("done", done, whole(done) and done >= 0)
        partial[name] = PartialResult(dict(plan), values[name], done)
    return partial
