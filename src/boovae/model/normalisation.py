"""Normalisation of the channels of convolutional networks, in a form that runs as replicas.

Group normalisation (Wu and He, 2018) knows one image at a time and has no state. Batch normalisation (Ioffe and
Szegedy, 2015) has: the statistics of the training batches. They never change inside a network. A layer of `BatchNorm`
normalises with the stored statistics, but for the loss of a training step, which is computed inside `learning`: there
the first pass is that of the training batch, it hands its statistics out, and the engine moves the stored ones towards
them. All later passes that have a gradient (pseudo-inputs of a prior, images of earlier tasks) use the same statistics.

These keep their gradient, and have to. The network of a batch does not change if the weights before a normalisation are
all doubled; that of an image normalised with numbers at rest does. A loss with both is lowered by letting the weights
grow or shrink forever, while the stored statistics come too late, and what was learned is gone when they arrive.
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
        #: Mean and variance (C,) of the training batch, from its pass to the end of its loss, and of how many values.
        self.batch: tuple[Tensor, Tensor] | None = None
        self.values = 0

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the stored statistics, while a loss is computed with those of the training batch."""
        if not torch.is_grad_enabled():  # a teacher, a validation, samples
            return self._stored(x)
        if self.learns:
            self.learns = False
            variance, mean = torch.var_mean(x, dim=(0, 2, 3))
            self.batch = mean, variance
            self.values = x.numel() // len(mean)
            # Not by the formula below: on a GPU this is quicker, although it takes the statistics once more.
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, EPSILON)
        if self.batch is None:
            return self._stored(x)
        mean, variance = self.batch
        scale = self.weight * (variance * (1 - 1 / self.values) + EPSILON).rsqrt()
        return torch.addcmul((self.bias - mean * scale).view(-1, 1, 1), x, scale.view(-1, 1, 1))

    def _stored(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, False, 0.0, EPSILON)


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
        for name, layer in layers.items():
            if layer.batch is not None:
                seen[f"{name}.mean"], seen[f"{name}.variance"] = (part.detach() for part in layer.batch)
    finally:
        for layer in layers.values():
            layer.learns, layer.batch = False, None


@torch.no_grad()
def follow(buffers: dict[str, Tensor], seen: dict[str, Tensor]) -> None:
    """Move stored statistics towards those of a batch, in place."""
    for name, value in seen.items():
        buffers[name].lerp_(value, MOMENTUM)
