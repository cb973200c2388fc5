"""Partial sums of a long metric: kept in a checkpoint, they let a killed evaluation continue where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from boovae.training.state import check, group, prefixed, whole

Step = TypeVar("Step")


@dataclass
class PartialResult:
    """What a computation has come to so far, and how many of its steps are in that.

    The plan says how the work is cut, in words of JSON: what was kept of another one is of no use.
    """

    plan: dict[str, Any] = field(default_factory=dict)
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    done: int = 0

    def begin(self, plan: dict[str, Any], values: Tensor) -> Tensor:
        """Return where to add up: `values`, or, if this plan was begun before, what it had come to."""
        if plan != self.plan:
            self.plan, self.values, self.done = plan, values, 0
        found, wanted = ((tuple(one.shape), one.dtype) for one in (self.values, values))
        check("tally", found, found == wanted)
        self.values = self.values.to(values.device)
        return self.values

    def rest(self, steps: Sequence[Step], progress: Callable[[float], None] | None = None) -> Iterator[Step]:
        """Yield the steps that are not done yet; each is done when the next is asked for, and `progress` is told."""
        check("done", self.done, self.done <= len(steps))
        for step in steps[self.done :]:
            yield step
            self.done += 1
            if progress is not None:
                progress(self.done / len(steps))


def state(partial: Mapping[str, PartialResult]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what a checkpoint keeps of them: tensors, and what JSON can hold."""
    if not partial:
        return {}, {}
    record = {name: {"plan": sums.plan, "done": sums.done} for name, sums in partial.items()}
    return prefixed("tally", {name: sums.values for name, sums in partial.items()}), {"tally": record}


def load_state(tensors: dict[str, Tensor], record: dict[str, Any]) -> dict[str, PartialResult]:
    """Take back what `state` returned; what a stranger changed is refused, here or where it is used."""
    values, partial = group(tensors, "tally"), {}
    for name, kept in record.get("tally", {}).items():
        plan, done = kept["plan"], kept["done"]
        check("done", done, whole(done) and done >= 0)
        partial[name] = PartialResult(dict(plan), values[name], done)
    return partial
