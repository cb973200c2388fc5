"""Many replicas of one module at once.

The module is written for one replica. The parameters of all replicas live in one tensor `values` (R, P), so a snapshot is
one copy; every parameter is a view (R, *shape) into it. Functions of one model run over all replicas either stacked
(`torch.func.vmap`) or, where the matrices are large enough to keep a CPU busy, one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from boovae.training.randomness import seed_for
from boovae.vae import VAE

#: Floats to which every parameter is aligned: matrix kernels want 128-byte rows.
ALIGNMENT = 32
#: On a CPU, networks up to this many parameters are stacked; larger ones fill the cores by themselves.
STACK_LIMIT = 150_000


class _Call(nn.Module):
    """Lets `functional_call` run any function of the model, not only its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


class Layout:
    """Where each parameter of a module lies in one flat vector."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.offsets: dict[str, int] = {}
        self.size = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = self.size
            self.size += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        self.parameters = sum(math.prod(shape) for shape in self.shapes.values())

    def views(self, values: Tensor) -> dict[str, Tensor]:
        """Return each parameter as a view of `values` (..., P): (..., *shape)."""
        return {
            name: values.narrow(-1, self.offsets[name], math.prod(shape)).unflatten(-1, shape)
            for name, shape in self.shapes.items()
        }


class Replicas:
    """R replicas of a VAE: `values` (R, P) and `buffers` {name: (R, ...)}."""

    def __init__(self, build: Callable[[], VAE], seeds: Sequence[int], device: torch.device) -> None:
        self.seeds = tuple(seeds)
        self.device = device
        self.build = build
        self.initialise()

    def initialise(self) -> None:
        """Give every replica fresh weights from its own seed."""
        models = []
        for seed in self.seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_for(seed, "weights"))
                models.append(self.build())
        self.model = models[0].to(self.device).requires_grad_(False)
        self._call = _Call(self.model)
        self.layout = Layout(self.model)
        self.values = torch.zeros(len(models), self.layout.size, device=self.device)
        for row, model in zip(self.values, models, strict=True):
            for name, view in self.layout.views(row).items():
                view.copy_(model.get_parameter(name).detach())
        self.buffers = {
            name: torch.stack([dict(model.named_buffers())[name] for model in models]).to(self.device)
            for name, _ in models[0].named_buffers()
        }

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def stacked(self) -> bool:
        """Whether the replicas run as one batched computation."""
        return self.device.type != "cpu" or self.layout.size <= STACK_LIMIT

    def tensors(self, values: Tensor | None = None) -> dict[str, Tensor]:
        """Return parameters and buffers of all replicas by name, each with a leading axis R."""
        return {**self.layout.views(self.values if values is None else values), **self.buffers}

    def call(self, tensors: dict[str, Tensor], function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(model, *arguments)` for the one model that has these parameters and buffers."""
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        return functional_call(self._call, named, (function, *arguments))

    def map(self, function: Callable[..., Any], *arguments: Any, values: Tensor | None = None) -> Any:
        """Return `function(model, *arguments)` of every replica, stacked: tensors in and out have a leading axis R."""
        tensors = self.tensors(values)

        def of_one(tensors: dict[str, Tensor], *arguments: Any) -> Any:
            return self.call(tensors, function, *arguments)

        if self.stacked:
            return vmap(of_one)(tensors, *arguments)
        results = [of_one(*pytree.tree_map(lambda tensor: tensor[r], (tensors, *arguments))) for r in range(len(self))]
        return pytree.tree_map(lambda *parts: torch.stack(parts), *results)
