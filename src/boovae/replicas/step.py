"""One gradient step of all replicas: loss, gradients, Adam, batch statistics and the methods' tracking."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from boovae.model.normalisation import follow, learning
from boovae.replicas.adam import Moments, adam_step
from boovae.replicas.stacked import Replicas, Tensors

Batch = dict[str, Any]


class Loss(NamedTuple):
    """The loss of one replica on a batch: the sum of `value` and all penalties; `parts` are only logged."""

    value: Tensor
    parts: dict[str, Tensor]
    penalties: dict[str, Tensor]

    @property
    def terms(self) -> dict[str, Tensor]:
        """The logged terms: `loss`, its parts and the penalties."""
        return {"loss": self.value + sum(self.penalties.values()), **self.parts, **self.penalties}


class Step(NamedTuple):
    """The parameters before and after a step, and the gradients of the loss."""

    before: dict[str, Tensor]
    gradients: dict[str, Tensor]
    after: dict[str, Tensor]


Objective = Callable[[Any, Batch], Loss]
#: Records a step in the method's state.
Track = Callable[[dict[str, Tensor], Step], None]


class GradientStep:
    """A step of Adam on `objective(model, batch)`; made once for all tasks, so that it is compiled once."""

    def __init__(
        self, replicas: Replicas, objective: Objective, *, track: Track | None = None, compile: bool = False
    ) -> None:
        self.replicas = replicas
        self.objective = objective
        self.track = track
        self.captures = replicas.device.type == "cuda"
        #: Whether `torch.func` computes the gradients, which can be compiled and recorded.
        self.functional = compile or self.captures
        self.compiled: Callable[..., dict[str, Tensor]] = self.plain
        if compile:
            # A growing prior changes shapes occasionally; beyond the limit torch would silently stop compiling.
            torch._dynamo.config.recompile_limit = 256
            # Convolutions on sizes that vary cannot always be compiled: guards on these fail inside torch.
            self.compiled = torch.compile(self.plain, dynamic=None if replicas.stacked else False)

    @torch.no_grad()
    def plain(
        self, parameters: Tensors, moments: Moments, buffers: Tensors, rate: Tensor, batch: Batch
    ) -> dict[str, Tensor]:
        """Take a step with all stacked replicas (`rate` (R,)) or with one (`rate` ()); return the terms of the loss."""
        gradients, terms, statistics = self._gradients(parameters, buffers, batch, stacked=rate.dim() == 1)
        before = {name: tensor.clone() for name, tensor in parameters.items()} if self.track is not None else {}
        everything = (parameters, gradients, moments.first, moments.second)
        p, g, m, v = ([tensors[name] for name in parameters] for tensors in everything)
        adam_step(p, g, m, v, rate, moments.steps)
        follow(buffers, statistics)
        if self.track is not None:
            self.track(batch["state"], Step(before, gradients, after=parameters))
        return terms

    def _gradients(
        self, parameters: Tensors, buffers: Tensors, batch: Batch, stacked: bool
    ) -> tuple[Tensors, Tensors, Tensors]:
        """Return gradients, loss terms and batch statistics of all stacked replicas, or of one."""
        if self.functional:
            gradient_of = grad(self._loss, has_aux=True)
            gradients, (terms, statistics) = (vmap(gradient_of) if stacked else gradient_of)(parameters, buffers, batch)
            return gradients, terms, statistics
        # The same numbers by plain autograd, with a quarter less overhead on small networks.
        with torch.enable_grad():
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
            loss, (terms, statistics) = (vmap(self._loss) if stacked else self._loss)(leaves, buffers, batch)
            found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        terms = {name: term.detach() for name, term in terms.items()}
        return dict(zip(leaves, found, strict=True)), terms, statistics

    def _loss(self, parameters: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, tuple[Tensors, Tensors]]:
        """Return the loss of one replica, with its terms and batch statistics."""
        terms, statistics = self.replicas.call({**parameters, **buffers}, self._learned, batch)
        return terms["loss"], (terms, statistics)

    def _learned(self, model: Any, batch: Batch) -> tuple[Tensors, Tensors]:
        with learning(model) as statistics:
            terms = self.terms(model, batch)
        return terms, statistics

    def terms(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of one replica's loss."""
        return self.objective(model, batch).terms
