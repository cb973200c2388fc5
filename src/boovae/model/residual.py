"""The networks `res:CHANNELS`: residual blocks with group normalisation for pictures of any size from 8 x 8 pixels.

Strided convolutions halve the sides (odd ones are rounded up) until the longer side has at most four positions.
Residual blocks (He et al., 2016, with normalisation first) work on grids of at most 16 x 16 positions; channels double
from grid to grid, at most twice. Larger grids have a single convolution each, so the cost hardly grows with the size of
a picture. The decoder mirrors the encoder: it doubles the sides and cuts off what rounding added.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boovae.errors import InputError
from boovae.model.normalisation import group_norm

#: The longer side of the smallest grid, and of the largest grid that has residual blocks.
SMALLEST, LARGEST_WITH_BLOCKS = 4, 16
#: The smallest side of a picture.
LEAST_SIDE = 8
#: Channels grow to this multiple of those of the first grid with blocks.
MOST_GROWTH = 4


class Grid(NamedTuple):
    """The feature maps of one size: their channels and sides, and whether a residual block works on them."""

    channels: int
    height: int
    width: int
    block: bool


class ResidualPlan(NamedTuple):
    """The picture's colours and sides, and the grids of the encoder, from large to small."""

    picture: tuple[int, int, int]
    grids: tuple[Grid, ...]

    @classmethod
    def of(cls, picture: tuple[int, int, int], channels: int) -> Self:
        """Plan the grids of a picture (colours, height, width).

        >>> [tuple(grid) for grid in ResidualPlan.of((3, 48, 64), 32).grids]
        [(16, 24, 32, False), (32, 12, 16, True), (64, 6, 8, True), (128, 3, 4, True)]
        """
        _, height, width = picture
        if min(height, width) < LEAST_SIDE:
            raise InputError(
                f"net 'res:{channels}' ({{net}}) needs pictures of at least {LEAST_SIDE} x {LEAST_SIDE} pixels, these "
                f"have {height} x {width}; use mlp:WIDTH"
            )
        grids: list[Grid] = []
        while max(height, width) > SMALLEST:
            height, width = -(-height // 2), -(-width // 2)
            blocks = sum(grid.block for grid in grids)
            if max(height, width) > LARGEST_WITH_BLOCKS:
                grids.append(Grid(max(1, channels // 2), height, width, block=False))
            else:
                grids.append(Grid(channels * min(1 << blocks, MOST_GROWTH), height, width, block=True))
        return cls(picture, tuple(grids))


class ResidualBlock(nn.Module):
    """x + conv(act(norm(conv(act(norm(x))))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            group_norm(channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            group_norm(channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def start_as_identity(self) -> None:
        """Set the last convolution to zero, so that a deep network starts as a shallow one."""
        last = self.body[-1]
        assert isinstance(last, nn.Conv2d)
        nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map feature maps (B, C, H, W) to the same shape."""
        output: Tensor = x + self.body(x)
        return output


def _finish(channels: int) -> nn.Sequential:
    return nn.Sequential(group_norm(channels), nn.SiLU())


class ResidualEncoder(nn.Module):
    """Maps images (..., D) to features (..., `features`)."""

    def __init__(self, plan: ResidualPlan) -> None:
        super().__init__()
        self.picture = plan.picture
        layers: list[nn.Module] = []
        channels = plan.picture[0]
        for grid in plan.grids:
            layers.append(nn.Conv2d(channels, grid.channels, 3, stride=2, padding=1))
            layers.append(ResidualBlock(grid.channels) if grid.block else nn.SiLU())
            channels = grid.channels
        self.body = nn.Sequential(*layers, _finish(channels))
        smallest = plan.grids[-1]
        self.features = channels * smallest.height * smallest.width

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images."""
        maps: Tensor = self.body(x.reshape(-1, *self.picture))
        return maps.reshape(*x.shape[:-1], -1)


class ResidualDecoder(nn.Module):
    """Maps latents (..., L) to `parameters` blocks of outputs (..., parameters . D)."""

    def __init__(self, plan: ResidualPlan, latent_dim: int, parameters: int) -> None:
        super().__init__()
        smallest = plan.grids[-1]
        self.smallest = smallest[:3]
        self.foot = nn.Linear(latent_dim, math.prod(self.smallest))
        self.sizes = [(grid.height, grid.width) for grid in reversed(plan.grids[:-1])]
        self.picture = plan.picture
        #: Number of values in the widest layer for one image, which determines the memory of a pass.
        self.widest = max(
            parameters * math.prod(plan.picture),
            *(4 * grid.channels * grid.height * grid.width for grid in plan.grids),
        )
        self.blocks, self.wider = nn.ModuleList(), nn.ModuleList()
        for grid, larger in zip(reversed(plan.grids), [*reversed(plan.grids[:-1]), None], strict=True):
            self.blocks.append(ResidualBlock(grid.channels) if grid.block else nn.SiLU())
            if larger is not None:
                self.wider.append(nn.Conv2d(grid.channels, larger.channels, 3, padding=1))
        channels = plan.grids[0].channels
        self.finish = _finish(channels)
        self.pixels = nn.ConvTranspose2d(channels, parameters * plan.picture[0], 4, stride=2, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Return the outputs at latents."""
        maps: Tensor = self.foot(z).reshape(-1, *self.smallest)
        for block, wider, (height, width) in zip(self.blocks, self.wider, self.sizes, strict=False):
            maps = F.interpolate(block(maps), scale_factor=2.0, mode="nearest")[..., :height, :width]
            maps = wider(maps)
        _, height, width = self.picture
        output: Tensor = self.pixels(self.finish(self.blocks[-1](maps)))[..., :height, :width]
        return torch.reshape(output, (*z.shape[:-1], -1))
