"""The networks `res:CHANNELS`: residual blocks with group normalisation for pictures of any size from 8 x 8 pixels.

One strided convolution maps a picture to a grid of at most 16 x 16 positions. Residual blocks (He et al., 2016, with
normalisation first) work on this grid and on smaller ones: strided convolutions halve the sides (odd ones are rounded
up) until the longer side has at most four positions, and double the channels, at most twice. So the cost hardly grows
with the size of a picture. The decoder mirrors the encoder and cuts off what rounding added.
"""

import math
from itertools import pairwise
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boovae.errors import InputError
from boovae.model.normalisation import group_norm

#: The longer sides of the smallest grid and of the largest one.
SMALLEST, LARGEST = 4, 16
#: The smallest side of a picture.
LEAST_SIDE = 8
#: Channels grow to this multiple of those of the largest grid.
MOST_GROWTH = 4


class Grid(NamedTuple):
    """The feature maps of one size: their channels and sides."""

    channels: int
    height: int
    width: int


class ResidualPlan(NamedTuple):
    """The colours and sides of a picture, the stride that maps it to the largest grid, and the grids, largest first."""

    picture: tuple[int, int, int]
    stride: int
    grids: tuple[Grid, ...]

    @classmethod
    def of(cls, picture: tuple[int, int, int], channels: int) -> Self:
        """Plan the grids of a picture (colours, height, width).

        >>> plan = ResidualPlan.of((3, 48, 64), 32)
        >>> plan.stride, [tuple(grid) for grid in plan.grids]
        (4, [(32, 12, 16), (64, 6, 8), (128, 3, 4)])
        """
        _, height, width = picture
        if min(height, width) < LEAST_SIDE:
            wanted = f"pictures of at least {LEAST_SIDE} x {LEAST_SIDE} pixels, these have {height} x {width}"
            raise InputError(f"net 'res:{channels}' ({{net}}) needs {wanted}; use mlp:WIDTH")
        stride = 1
        while max(height, width) > LARGEST * stride:
            stride *= 2
        height, width = -(-height // stride), -(-width // stride)
        grids = [Grid(channels, height, width)]
        while max(height, width) > SMALLEST:
            height, width = -(-height // 2), -(-width // 2)
            grids.append(Grid(channels * min(1 << len(grids), MOST_GROWTH), height, width))
        return cls(picture, stride, tuple(grids))

    @property
    def window(self) -> tuple[int, int]:
        """Kernel size and padding of the convolutions between picture and largest grid: windows overlap by half."""
        return (2 * self.stride, self.stride // 2) if self.stride > 1 else (3, 1)


def _activated(channels: int) -> tuple[nn.Module, nn.Module]:
    return group_norm(channels), nn.SiLU()


class ResidualBlock(nn.Module):
    """x + conv(act(norm(conv(act(norm(x))))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first, last = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.body = nn.Sequential(*_activated(channels), first, *_activated(channels), last)

    def start_as_identity(self) -> None:
        """Set the last convolution to zero, so that a deep network starts as a shallow one."""
        last = self.body[-1]
        assert isinstance(last, nn.Conv2d)
        nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map feature maps (B, C, H, W) to the same shape."""
        output: Tensor = x + self.body(x)
        return output


class ResidualEncoder(nn.Module):
    """Maps images (..., D) to features (..., `features`)."""

    def __init__(self, plan: ResidualPlan) -> None:
        super().__init__()
        self.picture, self.stride = plan.picture, plan.stride
        kernel, padding = plan.window
        first, *_, smallest = *plan.grids, plan.grids[-1]
        layers: list[nn.Module] = [nn.Conv2d(plan.picture[0], first.channels, kernel, plan.stride, padding)]
        layers.append(ResidualBlock(first.channels))
        for larger, grid in pairwise(plan.grids):
            layers.append(nn.Conv2d(larger.channels, grid.channels, 3, stride=2, padding=1))
            layers.append(ResidualBlock(grid.channels))
        self.body = nn.Sequential(*layers, nn.Sequential(*_activated(smallest.channels)))
        self.features = math.prod(smallest)
        # Pad to whole strides, so that the last rows and columns are seen too.
        self._pad = tuple(-side % plan.stride for side in plan.picture[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images."""
        bottom, right = self._pad
        pictures = F.pad(x.reshape(-1, *self.picture), (0, right, 0, bottom))
        maps: Tensor = self.body(pictures)
        return maps.reshape(*x.shape[:-1], -1)


class ResidualDecoder(nn.Module):
    """Maps latents (..., L) to `parameters` blocks of outputs (..., parameters . D)."""

    def __init__(self, plan: ResidualPlan, latent_dim: int, parameters: int) -> None:
        super().__init__()
        kernel, padding = plan.window
        colours, first = plan.picture[0], plan.grids[0]
        self.picture, self.smallest = plan.picture, plan.grids[-1]
        self.foot = nn.Linear(latent_dim, math.prod(self.smallest))
        self.sizes = [(grid.height, grid.width) for grid in reversed(plan.grids[:-1])]
        #: Number of values in the widest layer for one image, which determines the memory of a pass.
        self.widest = max(parameters * math.prod(plan.picture), 6 * math.prod(first))
        self.blocks = nn.ModuleList(ResidualBlock(grid.channels) for grid in reversed(plan.grids))
        self.wider = nn.ModuleList(
            nn.Conv2d(grid.channels, larger.channels, 3, padding=1) for grid, larger in pairwise(reversed(plan.grids))
        )
        self.finish = nn.Sequential(*_activated(first.channels))
        self.pixels = nn.ConvTranspose2d(first.channels, parameters * colours, kernel, plan.stride, padding)

    def forward(self, z: Tensor) -> Tensor:
        """Return the outputs at latents."""
        maps: Tensor = self.foot(z).reshape(-1, *self.smallest)
        for block, wider, (height, width) in zip(self.blocks, self.wider, self.sizes, strict=False):
            maps = F.interpolate(block(maps), scale_factor=2.0, mode="nearest")[..., :height, :width]
            maps = wider(maps)
        _, height, width = self.picture
        output: Tensor = self.pixels(self.finish(self.blocks[-1](maps)))[..., :height, :width]
        return torch.reshape(output, (*z.shape[:-1], -1))
