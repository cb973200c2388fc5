"""A mixture of discretised logistic distributions for 8-bit pictures (Salimans et al., 2017)."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from boovae.model.distributions import Side
from boovae.model.likelihood_base import Likelihood, inside


class Logistics(NamedTuple):
    """A mixture for every value: log-weights, means and log-scales, each (..., K, D), in units of half the range."""

    log_weights: Tensor
    mean: Tensor
    log_scale: Tensor


class LogisticMixture(Likelihood):
    """For each value of an 8-bit picture a mixture of K logistic distributions, integrated over a bin.

    Colours are first separated into brightness and two differences by a transform of whole numbers that loses nothing
    (YCoCg-R; Malvar and Sullivan, 2003), because the three colours of a pixel err together: Y = t + ⌊Cg / 2⌋ with
    Co = R − B, t = B + ⌊Co / 2⌋ and Cg = G − t. So `log_prob` is the log-probability of a picture, comparable in bits
    per dimension. The decoder gives 3 K blocks of outputs, K for each of log-weights, means and log-scales.
    """

    name = "logistic_mixture"
    discrete = True
    #: Components for each value.
    count = 2
    parameters = 3 * count
    #: Limits of the log-scale: a component is at least a tenth of a bin wide, and at most much wider than the range.
    limits = (-7.0, 2.0)
    #: The initial log-scale.
    start = -1.5

    def __init__(self, pixel_range: tuple[float, float] = (0.0, 1.0), *, colours: int = 1) -> None:
        low, high = pixel_range
        self.low, self.extent, self.colours = low, high - low, colours

    def mixture(self, output: Tensor) -> Logistics:
        """Return the mixture that an output (..., 3 K D) describes."""
        logits, mean, log_scale = output.unflatten(-1, (3, self.count, -1)).unbind(-3)
        # Components start apart, or they would learn the same.
        spread = torch.linspace(-0.25, 0.25, self.count, dtype=output.dtype, device=output.device).unsqueeze(-1)
        return Logistics(logits.log_softmax(-2), mean + spread, (log_scale + self.start).clamp(*self.limits))

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Return Σ log of the probability of the bins around x (..., D)."""
        log_weights, mean, log_scale = self.mixture(output)
        level = self._separated(x)
        lowest, highest = self._edges(level)
        precision = (-log_scale).exp()
        width = precision * (2 / 255)  # of a bin, in scales
        centred = ((level / 127.5).unsqueeze(-2) - mean) * precision
        # log of σ(u) − σ(l) = σ(u) σ(−l) (1 − e^{−(u−l)}), a form without cancellation; the outer bins have the tails.
        below, above = F.logsigmoid(centred + width / 2), F.logsigmoid(width / 2 - centred)
        zero = torch.zeros((), dtype=output.dtype, device=output.device)
        log_bin = torch.where(lowest | highest, zero, (-torch.expm1(-width)).log())
        log_bin = log_bin + torch.where(highest, zero, below) + torch.where(lowest, zero, above)
        return torch.logsumexp(log_weights + log_bin, -2).sum(-1)

    def mean(self, output: Tensor) -> Tensor:
        """Return the weighted means of the components as a picture, within the range."""
        log_weights, mean, _ = self.mixture(output)
        return self._joined((log_weights.exp() * mean).sum(-2) * 127.5, whole=False)

    def draw(self, output: Tensor, uniform: Tensor) -> Tensor:
        """Return 8-bit values: a uniform number chooses the component, and the rest of it the quantile."""
        log_weights, mean, log_scale = self.mixture(output)
        weights, uniform = log_weights.exp(), uniform.unsqueeze(-2)
        upper = weights.cumsum(-2)
        chosen = (uniform >= upper[..., :-1, :]).sum(-2, keepdim=True)
        weight, top, mean, log_scale = (
            torch.take_along_dim(part, chosen, -2) for part in (weights, upper, mean, log_scale)
        )
        rest = inside((uniform - (top - weight)) / weight.clamp(min=1e-12))
        return self._joined((mean + log_scale.exp() * torch.logit(rest)).squeeze(-2) * 127.5, whole=True)

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return a bound on the divergence that is 0 only if all parameters agree.

        By the chain rule, KL of two mixtures is at most that of their weights plus the weighted KL of components with
        the same index. That of two logistic densities is taken for Gaussians of the same mean and variance.
        """
        one, two = self.mixture(output), self.mixture(other)
        if side == "symmetric":
            return 0.5 * (_matched(one, two) + _matched(two, one))
        return _matched(one, two) if side == "forward" else _matched(two, one)

    def _separated(self, x: Tensor) -> Tensor:
        """Return the levels (..., D) of images: brightness less 127.5, then the differences of the colours."""
        value = ((x - self.low) * (255 / self.extent)).round().clamp(0, 255)
        if self.colours == 1:
            return value - 127.5
        red, green, blue = value.unflatten(-1, (3, -1)).unbind(-2)
        orange = red - blue
        middle = blue + (orange / 2).floor()
        greenness = green - middle
        return torch.cat((middle + (greenness / 2).floor() - 127.5, orange, greenness), -1)

    def _joined(self, level: Tensor, *, whole: bool) -> Tensor:
        """Return the image of levels (..., D), the inverse of `_separated`; `whole` rounds to 8-bit values."""
        if self.colours == 1:
            value = level + 127.5
            value = value.round() if whole else value
        else:
            bright, orange, greenness = level.unflatten(-1, (3, -1)).unbind(-2)
            bright = bright + 127.5
            if whole:
                bright, orange, greenness = bright.round(), orange.round(), greenness.round()
            # Without rounding, what ⌊c / 2⌋ is in the mean.
            middle = bright - (torch.floor(greenness / 2) if whole else greenness / 2 - 0.25)
            blue = middle - (torch.floor(orange / 2) if whole else orange / 2 - 0.25)
            value = torch.cat((blue + orange, greenness + middle, blue), -1)
        return self.low + self.extent * (value.clamp(0, 255) / 255)

    def _edges(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the brightness is black and where it is white, each (..., 1, D)."""
        pixels = level.shape[-1] // self.colours
        bright = torch.arange(level.shape[-1], device=level.device) < pixels
        return ((level < -127) & bright).unsqueeze(-2), ((level > 127) & bright).unsqueeze(-2)


class DiscretisedLogistic(LogisticMixture):
    """One logistic distribution for each value: the decoder gives means and log-scales, in two blocks.

    Its standard deviation is at least `floor` of the pixel range.
    """

    name = "logistic"
    parameters = 2

    def __init__(self, pixel_range: tuple[float, float] = (0.0, 1.0), *, colours: int = 1, floor: float = 0.0) -> None:
        super().__init__(pixel_range, colours=colours)
        if floor > 0:  # a standard deviation is π / √3 scales, and the range two units
            self.limits = (math.log(2 * floor * math.sqrt(3) / math.pi), self.limits[1])

    def mixture(self, output: Tensor) -> Logistics:
        """Return the distributions that an output (..., 2 D) describes, as mixtures of one component."""
        mean, log_scale = (block.unsqueeze(-2) for block in output.chunk(2, dim=-1))
        return Logistics(torch.zeros_like(mean), mean, (log_scale + self.start).clamp(*self.limits))

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return the divergence, exact for equal scales; for others the part of the scales is that of Gaussians.

        It grows with the distance of the means, like the density's tails, not with its square: an old image that is
        far off weighs as much as a new one that is.
        """
        one, two = self.mixture(output), self.mixture(other)
        if side == "symmetric":
            return 0.5 * (_apart(one, two) + _apart(two, one))
        return _apart(one, two) if side == "forward" else _apart(two, one)


def _apart(one: Logistics, two: Logistics) -> Tensor:
    """Return KL[one | two] of single components, summed over values."""
    ratio = 2 * (one.log_scale - two.log_scale)
    distance = (one.mean - two.mean).abs() * (-two.log_scale).exp()
    return (0.5 * (ratio.exp() - ratio - 1) + logistic_divergence(distance)).sum((-2, -1))


def logistic_divergence(distance: Tensor) -> Tensor:
    """Return the divergence of logistic densities of one scale, d . coth(d/2) − 2, at distances d in scales."""
    safe = distance.clamp(min=1e-2)
    return torch.where(distance < 1e-2, distance.square() / 6, safe / torch.tanh(safe / 2) - 2)  # coth has a pole at 0


def _matched(one: Logistics, two: Logistics) -> Tensor:
    """Return the bound on KL[one | two], summed over values."""
    ratio = 2 * (one.log_scale - two.log_scale)
    distance = (one.mean - two.mean).square() * (3 / math.pi**2) * (-2 * two.log_scale).exp()
    components = 0.5 * (ratio.exp() - ratio - 1 + distance)
    return (one.log_weights.exp() * (one.log_weights - two.log_weights + components)).sum((-2, -1))
