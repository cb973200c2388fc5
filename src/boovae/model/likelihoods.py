"""Likelihoods of pixels given the decoder's output.

Bernoulli on grey values; normal, logistic and Laplace (l1) densities of constant width; a normal density whose width
the decoder predicts; and a mixture of discretised logistic distributions, a probability of 8-bit values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from boovae.errors import InputError, unknown_name
from boovae.model.distributions import DiagonalNormal, Side

#: The log-variance of every pixel in the paper's colour model.
LOG_VARIANCE = -math.log(2 * math.pi)
#: The probability at which the evaluation clamps a pixel, so that one pixel costs at most 11.5 nats.
PROBABILITY_FLOOR = 1e-5


class Likelihood(ABC):
    """p(x | z) for a decoder output of shape (..., D); stateless."""

    name: str
    #: Whether the decoder gives logits of pixels in [0, 1]; otherwise it gives mean pixels.
    logits = False
    #: Number of the decoder's outputs for each pixel; they come in blocks of the size of an image.
    parameters = 1
    #: Whether `log_prob` is the probability of an 8-bit value, which is comparable in bits per dimension.
    discrete = False

    @abstractmethod
    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Return log p(x | output) summed over the pixels: (..., D) -> (...)."""

    def mean(self, output: Tensor) -> Tensor:
        """Return the mean image (..., D): the decoder's output, unless that is logits."""
        return output

    @abstractmethod
    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return KL[p | p'] (forward), KL[p' | p] (reverse) or their mean, summed over pixels: (..., D) -> (...)."""

    @abstractmethod
    def draw(self, output: Tensor, uniform: Tensor) -> Tensor:
        """Return an image drawn from p(x | output), given uniform random numbers (..., D)."""

    def bounded(self, output: Tensor) -> Tensor:
        """Return `output` clamped as in the evaluation; training does not clamp it."""
        return output


class Bernoulli(Likelihood):
    """Grey values in [0, 1] as soft Bernoulli targets, as in the paper; the decoder gives logits."""

    name = "bernoulli"
    logits = True
    _bound = math.log((1 - PROBABILITY_FLOOR) / PROBABILITY_FLOOR)

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Return Σ x log p + (1 − x) log(1 − p) = Σ x.logit − softplus(logit)."""
        return (x * output - F.softplus(output)).sum(-1)

    def mean(self, output: Tensor) -> Tensor:
        """Return the probabilities."""
        return torch.sigmoid(output)

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return ½ Σ (p − p') (logit − logit'), without logarithms of probabilities; one direction needs softplus."""
        if side == "symmetric":
            return 0.5 * ((torch.sigmoid(output) - torch.sigmoid(other)) * (output - other)).sum(-1)
        p, q = (output, other) if side == "forward" else (other, output)
        return (torch.sigmoid(p) * (p - q) - F.softplus(p) + F.softplus(q)).sum(-1)

    def draw(self, output: Tensor, uniform: Tensor) -> Tensor:
        """Return pixels of 0 and 1."""
        return (uniform < self.mean(output)).to(output.dtype)

    def bounded(self, output: Tensor) -> Tensor:
        """Return logits whose probabilities lie in [1e-5, 1 − 1e-5]."""
        return output.clamp(-self._bound, self._bound)


class Normal(Likelihood):
    """Pixels with a Gaussian of constant variance around the decoder's mean.

    With the default log-variance −log 2π the log-density is −π‖x − mean‖², as in the paper's colour model.
    """

    name = "normal"

    def __init__(self, log_variance: float = LOG_VARIANCE) -> None:
        self.log_variance = log_variance

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Return Σ log N(x; output, variance)."""
        squares = (x - output).square() * math.exp(-self.log_variance)
        return -0.5 * (squares + self.log_variance + math.log(2 * math.pi)).sum(-1)

    def draw(self, output: Tensor, uniform: Tensor) -> Tensor:
        """Return the quantiles of the Gaussian."""
        quantile: Tensor = torch.special.ndtri(_inside(uniform))
        return output + math.exp(0.5 * self.log_variance) * quantile

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return Σ (output − other)² / (2 variance)."""
        return 0.5 * math.exp(-self.log_variance) * (output - other).square().sum(-1)


class Logistic(Likelihood):
    """Pixels in bins of width `bin_width` under a logistic density around the decoder's mean.

    The default scale is the exponential of the colour model's constant, as in the published code.
    """

    name = "logistic"

    def __init__(self, bin_width: float = 1 / 255, log_scale: float = LOG_VARIANCE) -> None:
        self.bin_width = bin_width
        self.log_scale = log_scale

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Return Σ log[σ((x + w/2 − m)/s) − σ((x − w/2 − m)/s)], in a form without cancellation."""
        scale = math.exp(self.log_scale)
        width = self.bin_width / scale
        centre = (x - output) / scale
        upper, lower = centre + width / 2, centre - width / 2
        # σ(a) − σ(b) = σ(a) σ(−b) (1 − e^{−(a−b)}), and a − b is the constant bin width.
        return (F.logsigmoid(upper) + F.logsigmoid(-lower) + math.log(-math.expm1(-width))).sum(-1)

    def draw(self, output: Tensor, uniform: Tensor) -> Tensor:
        """Return the quantiles of the logistic density, not rounded to bins."""
        return output + math.exp(self.log_scale) * torch.logit(_inside(uniform))

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return Σ of the exact symmetric divergence of two logistic densities of equal scale.

        With d the distance of the means in scales, KL = d . coth(d/2) − 2, and it is symmetric.
        """
        distance = ((output - other) / math.exp(self.log_scale)).abs()
        near = distance.square() / 6  # the limit at 0, the pole of coth
        safe = distance.clamp(min=1e-2)
        return torch.where(distance < 1e-2, near, safe / torch.tanh(safe / 2) - 2).sum(-1)


def _inside(uniform: Tensor) -> Tensor:
    """Keep uniform random numbers away from 0 and 1, whose quantiles are infinite."""
    return uniform.clamp(1e-7, 1 - 1e-7)


class Laplace(Likelihood):
    """Pixels with a Laplace density of constant variance around the decoder's mean: −log p grows with the distance."""

    name = "l1"

    def __init__(self, log_variance: float = LOG_VARIANCE) -> None:
        self.scale = math.sqrt(0.5 * math.exp(log_variance))

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Return Σ −|x − output| / b − log 2b; the variance is 2b²."""
        return -((x - output).abs() / self.scale + math.log(2 * self.scale)).sum(-1)

    def draw(self, output: Tensor, uniform: Tensor) -> Tensor:
        """Return the quantiles of the Laplace density."""
        centred = _inside(uniform) - 0.5
        return output - self.scale * centred.sign() * torch.log1p(-2 * centred.abs())

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return Σ d + e^{−d} − 1, d the distance of the means in scales; it is symmetric."""
        distance = (output - other).abs() / self.scale
        return (distance + torch.expm1(-distance)).sum(-1)


class LearnedNormal(Likelihood):
    """Numbers with a Gaussian whose mean and log-variance the decoder gives: two blocks of outputs.

    The variance has a floor, or a column that is constant in a task would get an unbounded density.
    """

    name = "normal"
    parameters = 2
    #: The lowest log-variance, approached smoothly.
    floor = -6.0

    def gaussian(self, output: Tensor) -> DiagonalNormal:
        """Return mean and log-variance, each (..., D)."""
        mean, raw = output.chunk(2, dim=-1)
        return DiagonalNormal(mean, self.floor + F.softplus(raw - self.floor))

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Return Σ log N(x; mean, variance)."""
        return self.gaussian(output).log_prob(x)

    def mean(self, output: Tensor) -> Tensor:
        """Return the mean."""
        return output.chunk(2, dim=-1)[0]

    def draw(self, output: Tensor, uniform: Tensor) -> Tensor:
        """Return the quantiles of the Gaussian."""
        return self.gaussian(output).rsample(torch.special.ndtri(_inside(uniform)))

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return the divergence of the Gaussians in closed form."""
        return self.gaussian(output).divergence(self.gaussian(other), side)


class Logistics(NamedTuple):
    """A mixture for every pixel: log-weights, means and log-scales, each (..., K, D), in units of half the range."""

    log_weights: Tensor
    mean: Tensor
    log_scale: Tensor


class LogisticMixture(Likelihood):
    """A mixture of discretised logistic distributions for each colour of each pixel (Salimans et al., 2017).

    It is a probability of the 256 values in the range of the pixels: the lowest and the highest have the tails. The
    decoder gives 3 K blocks of outputs, K for each of log-weights, means and log-scales.
    """

    name = "logistic_mixture"
    discrete = True
    #: Components for each pixel.
    count = 3
    parameters = 3 * count
    #: Limits of the log-scale: a component is at least a tenth of a bin wide, and at most much wider than the range.
    limits = (-7.0, 2.0)
    #: The initial log-scale; the means start spread over the range.
    start = -1.5

    def __init__(self, low: float = 0.0, high: float = 1.0) -> None:
        self.centre, self.half = 0.5 * (low + high), 0.5 * (high - low)

    def mixture(self, output: Tensor) -> Logistics:
        """Return the mixture that an output (..., 3 K D) describes."""
        logits, mean, log_scale = output.unflatten(-1, (3, self.count, -1)).unbind(-3)
        spread = torch.linspace(-0.5, 0.5, self.count, dtype=output.dtype, device=output.device).unsqueeze(-1)
        return Logistics(logits.log_softmax(-2), mean + spread, (log_scale + self.start).clamp(*self.limits))

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Return Σ log of the probability of the bins around x (..., D)."""
        log_weights, mean, log_scale = self.mixture(output)
        value = ((x - self.centre) / self.half).unsqueeze(-2)
        precision = (-log_scale).exp()
        width = precision * (2 / 255)  # of a bin, in scales
        centred = (value - mean) * precision
        upper, lower = centred + width / 2, centred - width / 2
        # σ(a) − σ(b) = σ(a) σ(−b) (1 − e^{−(a−b)}), a form without cancellation.
        below, above = F.logsigmoid(upper), F.logsigmoid(-lower)
        inside = below + above + (-torch.expm1(-width)).log()
        edge = 1 - 1 / 255
        inside = torch.where(value < -edge, below, torch.where(value > edge, above, inside))
        return torch.logsumexp(log_weights + inside, -2).sum(-1)

    def mean(self, output: Tensor) -> Tensor:
        """Return the weighted means of the components, within the range."""
        log_weights, mean, _ = self.mixture(output)
        return self.centre + self.half * (log_weights.exp() * mean.clamp(-1, 1)).sum(-2)

    def draw(self, output: Tensor, uniform: Tensor) -> Tensor:
        """Return 8-bit values: a uniform number chooses the component, and the rest of it the quantile."""
        log_weights, mean, log_scale = self.mixture(output)
        weights, uniform = log_weights.exp(), uniform.unsqueeze(-2)
        upper = weights.cumsum(-2)
        chosen = (uniform >= upper[..., :-1, :]).sum(-2, keepdim=True)
        weight, top, mean, log_scale = (
            torch.take_along_dim(part, chosen, -2) for part in (weights, upper, mean, log_scale)
        )
        rest = _inside((uniform - (top - weight)) / weight.clamp(min=1e-12))
        value = (mean + log_scale.exp() * torch.logit(rest)).squeeze(-2).clamp(-1, 1)
        return self.centre + self.half * ((value * 127.5 + 127.5).round() / 127.5 - 1)

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return a bound on the divergence that is 0 only if all parameters agree.

        By the chain rule, KL of two mixtures is at most that of their weights plus the weighted KL of components with
        the same index. That of two logistic densities is taken for Gaussians of the same mean and variance.
        """
        one, two = self.mixture(output), self.mixture(other)
        if side == "symmetric":
            return 0.5 * (_matched(one, two) + _matched(two, one))
        return _matched(one, two) if side == "forward" else _matched(two, one)


def _matched(one: Logistics, two: Logistics) -> Tensor:
    """Return the bound on KL[one | two], summed over pixels."""
    ratio = 2 * (one.log_scale - two.log_scale)
    distance = (one.mean - two.mean).square() * (3 / math.pi**2) * (-2 * two.log_scale).exp()
    components = 0.5 * (ratio.exp() - ratio - 1 + distance)
    return (one.log_weights.exp() * (one.log_weights - two.log_weights + components)).sum((-2, -1))


KINDS = (Bernoulli, Normal, Logistic, Laplace, LogisticMixture)
LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {kind.name: kind for kind in KINDS}


def make_likelihood(
    name: str, pixel_range: tuple[float, float] = (0.0, 1.0), *, noise: Literal["fixed", "learned"] = "fixed"
) -> Likelihood:
    """Return the likelihood called `name` for pixels in `pixel_range`, quantised in 256 steps.

    With `noise` learned, the decoder predicts the variance of a normal one.
    """
    if name not in LIKELIHOODS:
        raise unknown_name("likelihood", name, LIKELIHOODS)
    if noise == "learned":
        if name != "normal":
            raise InputError(
                f"{{noise=learned}} is for {{likelihood=normal}}, and {{likelihood}} is {name}; leave it out"
            )
        return LearnedNormal()
    low, high = pixel_range
    if LIKELIHOODS[name] is Logistic:
        return Logistic(bin_width=(high - low) / 255)
    if LIKELIHOODS[name] is LogisticMixture:
        return LogisticMixture(low, high)
    likelihood = LIKELIHOODS[name]()
    if likelihood.logits and (low, high) != (0.0, 1.0):
        raise InputError(f"{{likelihood}} {name} needs pixels in [0, 1], these are in [{low:g}, {high:g}]; use normal")
    return likelihood
