"""Many replicas of one module at once.

The module is written for one replica; its parameters and buffers are stacked along a leading replica axis. Functions of
one model run over all replicas either stacked (`torch.func.vmap`) or, where the matrices are large enough to keep a CPU
busy or the networks are convolutional, one after another.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils import _pytree as pytree

from boovae.errors import InputError
from boovae.model.vae import VAE
from boovae.replicas.randomness import Generators, seed_for

#: On a CPU, networks up to this many parameters are stacked; larger ones use all cores by themselves.
STACK_LIMIT = 150_000

Result = TypeVar("Result")
Tensors = dict[str, Tensor]


class _Call(nn.Module):
    """Lets `functional_call` run any function of the model, not only `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


class Replicas:
    """R replicas of a VAE: `parameters` and `buffers`, {name: (R, ...)}."""

    parameters: Tensors
    buffers: Tensors

    def __init__(self, build: Callable[[], VAE], seeds: Sequence[int], device: torch.device) -> None:
        self.seeds = tuple(seeds)
        self.device = device
        self.build = build
        self.initialise()

    def initialise(self) -> None:
        """Initialise the weights of every replica from its own seed."""
        models = []
        for seed in self.seeds:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed_for(seed, "weights"))
                models.append(self.build().requires_grad_(False))
        self.parameters, self.buffers = (
            {name: tensor.detach().to(self.device) for name, tensor in tensors.items()}
            for tensors in stack_module_state(models)
        )
        self.model = models[0].to(self.device)  # a template: its own weights are never used
        self._convolves = any(isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)) for layer in self.model.modules())
        self._call = _Call(self.model)

    def rebuild(self) -> None:
        """Rebuild the model at its current size; everything is kept except the prior's buffers, which are new."""
        with torch.random.fork_rng(devices=[]):
            self.model = self.build().requires_grad_(False).to(self.device)
        fresh = {name: torch.stack([buffer] * len(self)).contiguous() for name, buffer in self.model.named_buffers()}
        self.buffers = fresh | self.network_buffers
        self._call = _Call(self.model)

    def replaced(self, tensors: dict[str, Tensor]) -> Self:
        """Return these replicas with the named parameters and buffers replaced; nothing is copied."""
        other = copy.copy(self)
        other.parameters = {name: tensors.get(name, own) for name, own in self.parameters.items()}
        other.buffers = {name: tensors.get(name, own) for name, own in self.buffers.items()}
        return other

    def only(self, replica: int) -> Self:
        """Return one replica alone; nothing is copied."""
        part = slice(replica, replica + 1)
        other = self.replaced({name: tensor[part] for name, tensor in self.tensors().items()})
        other.seeds = self.seeds[part]
        return other

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def generators(self) -> Generators:
        """A generator for each replica."""
        return Generators(self.seeds, self.device)

    @property
    def stacked(self) -> bool:
        """Whether the replicas run as one batched computation.

        Convolutional networks do not: batched, they are slower than on parallel streams (measured on an H200).
        """
        return not self._convolves and (self.device.type != "cpu" or self.size <= STACK_LIMIT)

    @property
    def size(self) -> int:
        """The number of parameters of one replica."""
        return sum(tensor[0].numel() for tensor in self.parameters.values())

    @property
    def network_buffers(self) -> dict[str, Tensor]:
        """The buffers without the prior's."""
        return {name: buffer for name, buffer in self.buffers.items() if not name.startswith("prior.")}

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers of all replicas by name, each with a leading axis R."""
        return {**self.parameters, **self.buffers}

    def call(self, tensors: dict[str, Tensor], function: Callable[..., Result], *arguments: Any) -> Result:
        """Return `function(model, *arguments)` for the one model that has these parameters and buffers."""
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        result: Result = functional_call(self._call, named, (function, *arguments), tie_weights=False)  # none to tie
        return result

    def map(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return `function(model, *arguments)` of every replica, stacked: tensors in and out have a leading axis R."""
        tensors = self.tensors()
        for tensor in pytree.tree_leaves(arguments):
            if isinstance(tensor, Tensor) and tensor.shape[:1] != (len(self),):
                wanted = "it must begin with their number: expand a tensor that is the same for all"
                raise InputError(f"a tensor of shape {tuple(tensor.shape)} for {len(self)} replicas; {wanted}")

        def of_one(tensors: dict[str, Tensor], *arguments: Any) -> Result:
            return self.call(tensors, function, *arguments)

        everything = (tensors, *arguments)
        if self.stacked:
            return vmap(of_one)(*everything)
        results = [of_one(*replica_of(everything, r)) for r in range(len(self))]
        return cast(Result, pytree.tree_map(lambda *parts: torch.stack(parts), *results))


def side_by_side(device: torch.device, functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the functions and return their results; on a GPU each has its own stream: small kernels run in parallel.

    The results are ready on the current stream. The calls may be recorded in a CUDA graph, as its branches.
    """
    if device.type != "cuda":
        return [function() for function in functions]
    current, results = torch.cuda.current_stream(device), []
    streams = [_stream(device, number) for number in range(len(functions))]
    try:
        for stream, function in zip(streams, functions, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append(function())
    finally:  # their inputs must not be freed before they finish
        for stream in streams[: len(results) + 1]:
            current.wait_stream(stream)
    return results


@functools.cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Return a stream that lives as long as the process, because cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)


def replica_of(tensors: Any, replica: int) -> Any:
    """Return one replica's part of nested tensors (R, ...)."""
    return pytree.tree_map(lambda tensor: tensor[replica], tensors)
