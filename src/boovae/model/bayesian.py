"""Layers whose weights and biases are Gaussian, for VCL.

A Bayesian layer is an ordinary layer whose weights are the means, with a log-variance for every weight and bias. It
computes with the means unless noise is set for the pass (`noisy`). Then its outputs are drawn as if each input used its
own sample of the weights, but no weights are sampled (local reparameterisation; Kingma, Salimans and Welling, 2015):
the outputs of independent Gaussian weights are Gaussian,

    mean = layer(x; mean weights),   variance = layer(x²; variances),   output = mean + √variance . noise.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boovae.model.distributions import DiagonalNormal

#: Below this the variance of an output counts as zero; the root of zero has no gradient.
SMALLEST_VARIANCE = 1e-20


class Bayesian(nn.Module, ABC):
    """Base of the layers below; `noise` (of the output's shape) is consumed by the first pass after it was set.

    The noise of a batch thus applies to that batch only: other inputs of the network while the loss is computed (such
    as the pseudo-inputs of a prior) are computed with the means.
    """

    weight: Tensor
    bias: Any  # a tensor or None; torch's layers each type it in their own way
    weight_log_variance: nn.Parameter
    bias_log_variance: nn.Parameter | None
    noise: Tensor | None

    def __init__(self, *arguments: Any, log_variance: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.spread(log_variance)

    def spread(self, log_variance: float) -> None:
        """Give every weight and bias this log-variance."""
        self.noise = None
        self.weight_log_variance = nn.Parameter(torch.full_like(self.weight, log_variance))
        self.bias_log_variance = None if self.bias is None else nn.Parameter(torch.full_like(self.bias, log_variance))

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of an ordinary layer with these weights for x."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the mean weights, or draw the outputs with the noise that was set."""
        if self.noise is None:
            return self.product(input, self.weight, self.bias)
        noise, self.noise = self.noise, None
        bias_variance = None if self.bias_log_variance is None else self.bias_log_variance.exp()
        mean, variance = self.moments(input, self.weight_log_variance.exp(), bias_variance)
        return mean + variance.clamp_min(SMALLEST_VARIANCE).sqrt() * noise

    def moments(self, x: Tensor, weight_variance: Tensor, bias_variance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the outputs for inputs x."""
        return self.product(x, self.weight, self.bias), self.product(x.square(), weight_variance, bias_variance)


class BayesianLinear(Bayesian, nn.Linear):
    """A linear layer with Gaussian weights."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W' + b."""
        return F.linear(x, weight, bias)

    def moments(self, x: Tensor, weight_variance: Tensor, bias_variance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return both for inputs x (B, in) with one batched product: on a GPU fewer small products are faster."""
        both = torch.stack([x, x.square()]) @ torch.stack([self.weight, weight_variance]).mT
        if bias_variance is not None:
            both = both + torch.stack([self.bias, bias_variance]).unsqueeze(1)
        return both[0], both[1]


class BayesianConv2d(Bayesian, nn.Conv2d):
    """A convolution with Gaussian weights."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of images x (B, C, H, W)."""
        output: Tensor = self._conv_forward(x, weight, bias)
        return output


class BayesianConvTranspose2d(Bayesian, nn.ConvTranspose2d):  # type: ignore[misc]
    """A transposed convolution with Gaussian weights; its forward takes no `output_size`."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the transposed convolution of images x (B, C, H, W)."""
        assert not isinstance(self.padding, str)
        return F.conv_transpose2d(
            x, weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


#: The layers, by the ordinary layer that each extends.
_KINDS: dict[type, type[Bayesian]] = {
    kind.__bases__[1]: kind for kind in (BayesianLinear, BayesianConv2d, BayesianConvTranspose2d)
}


def make_bayesian(module: nn.Module, log_variance: float, *, skip: tuple[str, ...] = ()) -> None:
    """Turn the layers of a module into Bayesian ones, in place, except those whose names start with one in `skip`.

    The layers keep their weights and no random numbers are drawn, so a network starts at the same means either way.
    """
    for name, layer in module.named_modules():
        kind = _KINDS.get(type(layer))
        if kind is not None and not f"{name}.weight".startswith(skip):
            layer.__class__ = kind
            assert isinstance(layer, Bayesian)
            layer.spread(log_variance)


def bayesian_layers(module: nn.Module) -> dict[str, Bayesian]:
    """Return the Bayesian layers of a module by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, Bayesian)}


@contextmanager
def noisy(module: nn.Module, noise: Mapping[str, Tensor]) -> Iterator[None]:
    """Set noise on the Bayesian layers that it names; remove what was not consumed."""
    layers = {name: layer for name, layer in bayesian_layers(module).items() if name in noise}
    for name, layer in layers.items():
        layer.noise = noise[name]
    try:
        yield
    finally:
        for layer in layers.values():
            layer.noise = None


def gaussians(module: nn.Module) -> dict[str, DiagonalNormal]:
    """Return the distributions of all Gaussian weights and biases by name."""
    normals = {}
    for name, layer in bayesian_layers(module).items():
        normals[f"{name}.weight"] = DiagonalNormal(layer.weight, layer.weight_log_variance)
        if layer.bias is not None and layer.bias_log_variance is not None:
            normals[f"{name}.bias"] = DiagonalNormal(layer.bias, layer.bias_log_variance)
    return normals


@contextmanager
def recorded_shapes(module: nn.Module) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield a dictionary that is filled with the shape of each Bayesian layer's output for one input.

    The module is in evaluation mode meanwhile, because batch normalisation cannot use a batch of one.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    with torch.no_grad(), ExitStack() as hooks:
        for name, layer in bayesian_layers(module).items():

            def record(layer: nn.Module, inputs: Any, output: Tensor, name: str = name) -> None:
                shapes[name] = tuple(output.shape[1:])

            hooks.callback(layer.register_forward_hook(record).remove)
        for part in module.modules():
            hooks.callback(setattr, part, "training", part.training)
            part.training = False
        yield shapes
