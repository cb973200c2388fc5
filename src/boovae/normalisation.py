"""Normalisation of the channels of convolutional networks, in a form that runs as replicas.

Group normalisation (Wu and He, 2018) knows one image at a time and has no state. Batch normalisation (Ioffe and
Szegedy, 2015) has: the statistics of the training batches. They never change inside a network. A layer of `BatchNorm`
normalises with the stored statistics, always, but for one pass: the first one inside `learning`, which is that of the
training batch. That one uses the statistics of the batch and hands them out, and the engine moves the stored ones
towards them. So whatever else goes through the network while a loss is computed (pseudo-inputs of a prior, images of a
teacher) is normalised as it will be in an evaluation, and a penalty is zero at its own reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Normalisation = Literal["group", "batch"]

#: Channels that share their statistics in group normalisation.
GROUP = 16
#: What is added to a variance.
EPSILON = 1e-5
#: How far the stored statistics move towards those of a batch.
MOMENTUM = 0.1


class BatchNorm(nn.Module):
    """Batch normalisation of images (B, C, H, W); `mean` and `variance` (C,) are buffers that others update."""

    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))
        self.learns = False
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the stored statistics, or with those of x where it is the batch to learn from."""
        if not self.learns:
            return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, False, 0.0, EPSILON)
        self.learns = False
        variance, mean = torch.var_mean(x.detach(), dim=(0, 2, 3))
        self.seen = {"mean": mean, "variance": variance}
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, EPSILON)


def group_norm(channels: int) -> nn.Module:
    """Return a group normalisation; a group of few channels would leave nothing of an image of one pixel."""
    return nn.GroupNorm(max(1, channels // GROUP), channels, eps=EPSILON)


NORMALISATIONS: dict[Normalisation, Callable[[int], nn.Module]] = {"group": group_norm, "batch": BatchNorm}


@contextmanager
def learning(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Let the first pass learn statistics; the dictionary holds them afterwards, by the names of their buffers."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, BatchNorm)}
    for layer in layers.values():
        layer.learns = True
    seen: dict[str, Tensor] = {}
    try:
        yield seen
        seen.update({f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.seen.items()})
    finally:
        for layer in layers.values():
            layer.learns, layer.seen = False, {}


@torch.no_grad()
def follow(buffers: dict[str, Tensor], seen: dict[str, Tensor]) -> None:
    """Move stored statistics towards those of a batch, in place."""
    for name, value in seen.items():
        buffers[name].lerp_(value, MOMENTUM)
