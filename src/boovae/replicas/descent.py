"""Adam on a few tensors of all replicas at once, without touching the networks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from boovae.replicas.adam import adam_step
from boovae.replicas.engine import capture
from boovae.replicas.stacked import replica_of, side_by_side

#: The loss of one replica: of the learned tensors, further arguments, and the noise of a step.
Loss = Callable[[list[Tensor], Any, Tensor], Tensor]


class Descent:
    """Minimises a loss of a few tensors, for all replicas at once.

    `loss(learned, arguments, noise)` is written for one replica. `learned[0]` is clamped to `box`. Replicas run as one
    batched computation or, if not `stacked`, one after another, or in parallel streams on a GPU. On a GPU one step is
    recorded as a CUDA graph and replayed; calls with the same shapes share it.
    """

    def __init__(self, loss: Loss, box: tuple[float, float] | None, *, stacked: bool = True) -> None:
        self.loss, self.box, self.stacked = loss, box, stacked
        self._graph: torch.cuda.CUDAGraph | None = None
        self._state: tuple[Any, ...] = ()  # of a step: what it learns, and what it reads

    @torch.no_grad()
    def __call__(
        self, start: list[Tensor], arguments: Any, *, steps: int, rate: float, noise: Tensor | None = None
    ) -> list[Tensor]:
        """Take steps from `start` (R, ...) and return the end; `arguments` (R, ...), `noise` (R, steps, ...)."""
        if steps == 0:  # nothing to record on a GPU; there may be no noise
            return [tensor.clone() for tensor in start]
        replicas, device = len(start[0]), start[0].device
        if noise is None:
            noise = torch.zeros(replicas, steps, device=device)
        learned = [tensor.clone() for tensor in start]
        first, second = ([torch.zeros_like(tensor) for tensor in start] for _ in range(2))
        done, rates = torch.zeros(replicas, device=device), torch.full((replicas,), rate, device=device)
        position = torch.zeros(1, dtype=torch.long, device=device)
        self._load((learned, first, second, done, rates, position, noise, arguments))
        for _ in range(steps):
            (self._graph.replay if self._graph else self._step)()
        return [tensor.clone() for tensor in self._state[0]]

    def _load(self, fresh: tuple[Any, ...]) -> None:
        """Copy the tensors of a call to where the step reads them; record the step again for new shapes."""
        tensors = pytree.tree_leaves(fresh)
        if not tensors[0].is_cuda:
            self._state = fresh
            return
        if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in pytree.tree_leaves(self._state)]:
            self._state = pytree.tree_map(torch.clone, fresh)
            self._graph = capture(self._step)
        for tensor, value in zip(pytree.tree_leaves(self._state), tensors, strict=True):
            tensor.copy_(value)

    def _step(self) -> None:
        learned, first, second, steps, rate, position, noise, arguments = self._state
        now = noise.index_select(1, position % noise.shape[1]).squeeze(1)
        gradients = self._gradients((learned, arguments, now))
        steps.add_(1)
        position.add_(1)
        adam_step(learned, gradients, first, second, rate, steps)
        if self.box is not None:
            learned[0].clamp_(*self.box)

    def _gradients(self, everything: tuple[Any, ...]) -> list[Tensor]:
        """Return the gradients of the learned tensors, (R, ...) each."""
        gradients_of: Callable[..., list[Tensor]] = grad(self.loss)
        if self.stacked:
            return vmap(gradients_of)(*everything)
        ones = [functools.partial(gradients_of, *replica_of(everything, r)) for r in range(len(everything[0][0]))]
        rows = side_by_side(everything[0][0].device, ones)
        return [torch.stack(column) for column in zip(*rows, strict=True)]
