"""Normalisation of the channels of convolutional networks, in a form that works for stacked replicas.

Group normalisation (Wu and He, 2018) treats each image separately and has no state. Batch normalisation (Ioffe and
Szegedy, 2015) has one: the statistics of the training batches. They never change inside a network. `BatchNorm`
normalises with the stored statistics, except for the loss of a training step, which is computed inside `learning`.
There the first pass is that of the training batch: its statistics are returned, and the engine moves the stored ones
towards them. All later passes with a gradient (pseudo-inputs of a prior, images of earlier tasks) use the statistics of
the batch.

These must keep their gradient. Doubling the weights before a normalisation does not change the output for a batch that
is normalised by its own statistics, but it does for an image that is normalised by constants. A loss with both could be
lowered by letting the weights grow or shrink forever; the stored statistics would lag behind, and what was learned
would be lost once they catch up.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Normalisation = Literal["group", "batch"]

#: Channels that share their statistics in group normalisation.
GROUP = 16
#: Added to a variance.
EPSILON = 1e-5
#: Share by which the stored statistics move towards those of a batch.
MOMENTUM = 0.1


class BatchNorm(nn.Module):
    """Batch normalisation of images (B, C, H, W); the engine updates the buffers `mean` and `variance` (C,)."""

    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))
        self.learns = False
        #: Mean and variance (C,) of the training batch, kept until its loss is computed, and their number of values.
        self.batch: tuple[Tensor, Tensor] | None = None
        self.values = 0

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the stored statistics or, while a loss is computed, with those of the training batch."""
        if not torch.is_grad_enabled():  # teacher, validation, sampling
            return self._stored(x)
        if self.learns:
            self.learns = False
            variance, mean = torch.var_mean(x, dim=(0, 2, 3))
            self.batch = mean, variance
            self.values = x.numel() // len(mean)
            # Faster than the formula below on a GPU, although it computes the statistics twice.
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, EPSILON)
        if self.batch is None:
            return self._stored(x)
        mean, variance = self.batch
        scale = self.weight * (variance * (1 - 1 / self.values) + EPSILON).rsqrt()
        return torch.addcmul((self.bias - mean * scale).view(-1, 1, 1), x, scale.view(-1, 1, 1))

    def _stored(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, False, 0.0, EPSILON)


def group_norm(channels: int) -> nn.Module:
    """Return a group normalisation; with small groups nothing would be left of an image of one pixel."""
    groups = max(1, channels // GROUP)
    while channels % groups:
        groups -= 1
    return nn.GroupNorm(groups, channels, eps=EPSILON)


NORMALISATIONS: dict[Normalisation, Callable[[int], nn.Module]] = {"group": group_norm, "batch": BatchNorm}


@contextmanager
def learning(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Compute batch statistics in the first pass; afterwards the dictionary holds them by buffer name."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, BatchNorm)}
    for layer in layers.values():
        layer.learns = True
    seen: dict[str, Tensor] = {}
    try:
        yield seen
        for name, layer in layers.items():
            if layer.batch is not None:
                seen[f"{name}.mean"], seen[f"{name}.variance"] = (part.detach() for part in layer.batch)
    finally:
        for layer in layers.values():
            layer.learns, layer.batch = False, None


@torch.no_grad()
def follow(buffers: dict[str, Tensor], seen: dict[str, Tensor]) -> None:
    """Move the stored statistics towards those of a batch, in place."""
    for name, value in seen.items():
        buffers[name].lerp_(value, MOMENTUM)
