"""Inception-v3 (Szegedy et al., 2016) as used by the common FID: the network of 2015-12-05, ported to plain torch.

It differs from the usual network in three ways (Heusel et al., 2017, used it with these weights): average pooling does
not count the padding, the last block uses max pooling, and there are 1008 classes. Layers have the names of the usual
weights file, `pt_inception-2015-12-05-6726825d.pth`.
"""

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 299
FEATURES = 2048
CLASSES = 1008

# The branches of each kind of block, by the beginning of their layers' names. A branch lists the outputs of its
# steps with the kernel, unless it is 1 x 1; "/2" halves the sides, and layers joined by "|" share their input.
GRID_35 = {"branch1x1": "64", "branch5x5": "48 64:5x5", "branch3x3dbl": "64 96:3x3 96:3x3"}
TO_17 = {"branch3x3": "384:3x3/2", "branch3x3dbl": "64 96:3x3 96:3x3/2"}
GRID_17 = {
    "branch1x1": "192",
    "branch7x7": "WIDTH WIDTH:1x7 192:7x1",
    "branch7x7dbl": "WIDTH WIDTH:7x1 WIDTH:1x7 WIDTH:7x1 192:1x7",
}
TO_8 = {"branch3x3": "192 320:3x3/2", "branch7x7x3": "192 192:1x7 192:7x1 192:3x3/2"}
GRID_8 = {"branch1x1": "320", "branch3x3": "384 384:1x3|384:3x1", "branch3x3dbl": "448 384:3x3 384:1x3|384:3x1"}

#: How the last branch of a block pools its input: to half the sides, or among neighbours.
HALVE = nn.MaxPool2d(3, 2)
LARGEST = nn.MaxPool2d(3, 1, 1)
MEAN = nn.AvgPool2d(3, 1, 1, count_include_pad=False)


class Unit(nn.Module):
    """Convolution without bias, batch normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int], stride: int = 1, pad: bool = True) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if pad else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h', w')."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Block(nn.Module):
    """Parallel branches, the last of which pools the input and may apply a unit to the result."""

    def __init__(
        self, inputs: int, branches: dict[str, str], pool: nn.Module = HALVE, pool_outputs: int = 0, width: int = 0
    ) -> None:
        super().__init__()
        self.pool = pool
        self.branches = [self._add(name, inputs, steps, width) for name, steps in branches.items()]
        self.branch_pool = Unit(inputs, pool_outputs, (1, 1)) if pool_outputs else nn.Identity()

    def _add(self, name: str, inputs: int, steps: str, width: int) -> list[list[str]]:
        """Add the layers of a branch; return their names, step by step."""
        texts = steps.replace("WIDTH", str(width)).split()
        names: list[list[str]] = []
        for place, text in enumerate(texts, start=1):
            layers = text.split("|")
            names.append([])
            total = 0
            for letter, layer in zip("ab" if len(layers) > 1 else [""], layers, strict=True):
                numbers = [int(number) for number in re.findall(r"\d+", layer)]
                outputs, height, across, stride = [*numbers, 1, 1, 1][:4]  # what is left out is 1
                names[-1].append(name if len(texts) == 1 else f"{name}_{place}{letter}")
                self.add_module(names[-1][-1], Unit(inputs, outputs, (height, across), stride, stride == 1))
                total += outputs
            inputs = total
        return names

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to the outputs of all branches, concatenated along the channels."""
        outputs = []
        for branch in self.branches:
            y = x
            for names in branch:
                y = torch.cat([self.get_submodule(name)(y) for name in names], 1)
            outputs.append(y)
        return torch.cat([*outputs, self.branch_pool(self.pool(x))], 1)


class Inception(nn.Module):
    """Network from colour pictures (n, 3, h, w) in [0, 1] to the 2048 features after the last pooling."""

    def __init__(self) -> None:
        layers = {
            "Conv2d_1a_3x3": Unit(3, 32, (3, 3), 2, pad=False),
            "Conv2d_2a_3x3": Unit(32, 32, (3, 3), pad=False),
            "Conv2d_2b_3x3": Unit(32, 64, (3, 3)),
            "pool_1": HALVE,
            "Conv2d_3b_1x1": Unit(64, 80, (1, 1)),
            "Conv2d_4a_3x3": Unit(80, 192, (3, 3), pad=False),
            "pool_2": HALVE,
            "Mixed_5b": Block(192, GRID_35, MEAN, 32),
            "Mixed_5c": Block(256, GRID_35, MEAN, 64),
            "Mixed_5d": Block(288, GRID_35, MEAN, 64),
            "Mixed_6a": Block(288, TO_17),
            "Mixed_6b": Block(768, GRID_17, MEAN, 192, width=128),
            "Mixed_6c": Block(768, GRID_17, MEAN, 192, width=160),
            "Mixed_6d": Block(768, GRID_17, MEAN, 192, width=160),
            "Mixed_6e": Block(768, GRID_17, MEAN, 192, width=192),
            "Mixed_7a": Block(768, TO_8),
            "Mixed_7b": Block(1280, GRID_8, MEAN, 192),
            "Mixed_7c": Block(2048, GRID_8, LARGEST, 192),
        }
        super().__init__()
        self.layers = list(layers)
        for name, module in layers.items():
            self.add_module(name, module)
        self.fc = nn.Linear(FEATURES, CLASSES)  # in the weights file, but unused

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the features (n, 2048)."""
        # Like the common FID: bilinear without antialiasing, even when pictures get smaller.
        x = F.interpolate(pictures, (SIDE, SIDE), mode="bilinear", align_corners=False)
        x = 2 * x - 1
        for name in self.layers:
            x = self.get_submodule(name)(x)
        return x.mean((2, 3))
