"""Inception-v3 (Szegedy et al., 2016) as used by the common FID: the network of 2015-12-05, ported to plain torch.

It differs from the usual network in three ways (Heusel et al., 2017, used it with these weights): average pooling does
not count the padding, the last block uses max pooling, and there are 1008 classes. Layers have the names of the usual
weights file, `pt_inception-2015-12-05-6726825d.pth`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 299
FEATURES = 2048
CLASSES = 1008


class Unit(nn.Module):
    """Convolution without bias, batch normalisation, ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: tuple[int, int], stride: int, padding: tuple[int, int]
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h', w')."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Layer(NamedTuple):
    """A unit of a block: the end of its name, its outputs, its kernel and stride."""

    name: str
    outputs: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1


#: Consecutive steps of a branch; the layers of one step run in parallel on the same input.
Branch = tuple[tuple[Layer, ...], ...]


class Block(nn.Module):
    """Parallel branches, the last of which pools the input and may apply a unit to the result."""

    def __init__(self, inputs: int, branches: tuple[Branch, ...], pool: str, pool_outputs: int = 0) -> None:
        super().__init__()
        self.branches, self.pool = branches, pool
        for branch in branches:
            width = inputs
            for step in branch:
                for layer in step:
                    height_pad, width_pad = (k // 2 if layer.stride == 1 else 0 for k in layer.kernel)
                    unit = Unit(width, layer.outputs, layer.kernel, layer.stride, (height_pad, width_pad))
                    self.add_module(layer.name, unit)
                width = sum(layer.outputs for layer in step)
        if pool_outputs:
            self.branch_pool = Unit(inputs, pool_outputs, (1, 1), 1, (0, 0))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to the outputs of all branches, concatenated along the channels."""
        outputs = []
        for branch in self.branches:
            y = x
            for step in branch:
                y = torch.cat([self.get_submodule(layer.name)(y) for layer in step], 1)
            outputs.append(y)
        return torch.cat([*outputs, self._pooled(x)], 1)

    def _pooled(self, x: Tensor) -> Tensor:
        if self.pool == "halve":
            return F.max_pool2d(x, 3, 2)
        mean = self.pool == "mean"
        pooled = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) if mean else F.max_pool2d(x, 3, 1, 1)
        output: Tensor = self.branch_pool(pooled)
        return output


def _chain(*layers: Layer) -> Branch:
    return tuple((layer,) for layer in layers)


def block_a(inputs: int, pool_outputs: int) -> Block:
    """Return a block of the 35 x 35 stage."""
    branches = (
        _chain(Layer("branch1x1", 64)),
        _chain(Layer("branch5x5_1", 48), Layer("branch5x5_2", 64, (5, 5))),
        _chain(Layer("branch3x3dbl_1", 64), Layer("branch3x3dbl_2", 96, (3, 3)), Layer("branch3x3dbl_3", 96, (3, 3))),
    )
    return Block(inputs, branches, "mean", pool_outputs)


def block_b(inputs: int) -> Block:
    """Return the block that halves 35 to 17."""
    branches = (
        _chain(Layer("branch3x3", 384, (3, 3), 2)),
        _chain(
            Layer("branch3x3dbl_1", 64), Layer("branch3x3dbl_2", 96, (3, 3)), Layer("branch3x3dbl_3", 96, (3, 3), 2)
        ),
    )
    return Block(inputs, branches, "halve")


def block_c(inputs: int, width: int) -> Block:
    """Return a block of the 17 x 17 stage."""
    row, column = (1, 7), (7, 1)
    branches = (
        _chain(Layer("branch1x1", 192)),
        _chain(Layer("branch7x7_1", width), Layer("branch7x7_2", width, row), Layer("branch7x7_3", 192, column)),
        _chain(
            Layer("branch7x7dbl_1", width),
            Layer("branch7x7dbl_2", width, column),
            Layer("branch7x7dbl_3", width, row),
            Layer("branch7x7dbl_4", width, column),
            Layer("branch7x7dbl_5", 192, row),
        ),
    )
    return Block(inputs, branches, "mean", 192)


def block_d(inputs: int) -> Block:
    """Return the block that halves 17 to 8."""
    branches = (
        _chain(Layer("branch3x3_1", 192), Layer("branch3x3_2", 320, (3, 3), 2)),
        _chain(
            Layer("branch7x7x3_1", 192),
            Layer("branch7x7x3_2", 192, (1, 7)),
            Layer("branch7x7x3_3", 192, (7, 1)),
            Layer("branch7x7x3_4", 192, (3, 3), 2),
        ),
    )
    return Block(inputs, branches, "halve")


def block_e(inputs: int, pool: str) -> Block:
    """Return a block of the 8 x 8 stage."""
    row, column = (1, 3), (3, 1)
    branches: tuple[Branch, ...] = (
        ((Layer("branch1x1", 320),),),
        ((Layer("branch3x3_1", 384),), (Layer("branch3x3_2a", 384, row), Layer("branch3x3_2b", 384, column))),
        (
            (Layer("branch3x3dbl_1", 448),),
            (Layer("branch3x3dbl_2", 384, (3, 3)),),
            (Layer("branch3x3dbl_3a", 384, row), Layer("branch3x3dbl_3b", 384, column)),
        ),
    )
    return Block(inputs, branches, pool, 192)


class Inception(nn.Module):
    """Network from colour pictures (n, 3, h, w) in [0, 1] to the 2048 features after the last pooling."""

    def __init__(self) -> None:
        super().__init__()
        stem = {
            "Conv2d_1a_3x3": Unit(3, 32, (3, 3), 2, (0, 0)),
            "Conv2d_2a_3x3": Unit(32, 32, (3, 3), 1, (0, 0)),
            "Conv2d_2b_3x3": Unit(32, 64, (3, 3), 1, (1, 1)),
            "pool_1": nn.MaxPool2d(3, 2),
            "Conv2d_3b_1x1": Unit(64, 80, (1, 1), 1, (0, 0)),
            "Conv2d_4a_3x3": Unit(80, 192, (3, 3), 1, (0, 0)),
            "pool_2": nn.MaxPool2d(3, 2),
        }
        blocks = {
            "Mixed_5b": block_a(192, 32),
            "Mixed_5c": block_a(256, 64),
            "Mixed_5d": block_a(288, 64),
            "Mixed_6a": block_b(288),
            "Mixed_6b": block_c(768, 128),
            "Mixed_6c": block_c(768, 160),
            "Mixed_6d": block_c(768, 160),
            "Mixed_6e": block_c(768, 192),
            "Mixed_7a": block_d(768),
            "Mixed_7b": block_e(1280, "mean"),
            "Mixed_7c": block_e(2048, "largest"),
        }
        self._order = [*stem, *blocks]
        for name, module in (stem | blocks).items():
            self.add_module(name, module)
        self.fc = nn.Linear(FEATURES, CLASSES)  # in the weights file, but unused

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the features (n, 2048)."""
        # Like the common FID: bilinear without antialiasing, even when pictures get smaller.
        x = F.interpolate(pictures, (SIDE, SIDE), mode="bilinear", align_corners=False)
        x = 2 * x - 1
        for name in self._order:
            x = self.get_submodule(name)(x)
        return x.mean((2, 3))
