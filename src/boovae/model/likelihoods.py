"""Likelihoods of pixels given the decoder's output.

Bernoulli on grey values; normal, logistic and Laplace (l1) densities of constant width; and a normal density whose
width the decoder predicts.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from boovae.errors import InputError, unknown_name
from boovae.model.distributions import DiagonalNormal, Side
from boovae.model.likelihood_base import Likelihood, inside
from boovae.model.logistics import DiscretisedLogistic, LogisticMixture, logistic_divergence

#: The log-variance of every pixel in the paper's colour model.
LOG_VARIANCE = -math.log(2 * math.pi)
#: The initial standard deviation of shared noise, as a share of the pixel range: about that of pictures.
SHARED_START = 0.35
#: The probability at which the evaluation clamps a pixel, so that one pixel costs at most 11.5 nats.
PROBABILITY_FLOOR = 1e-5


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
        quantile: Tensor = torch.special.ndtri(inside(uniform))
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
        return output + math.exp(self.log_scale) * torch.logit(inside(uniform))

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return Σ of the exact symmetric divergence of two logistic densities of equal scale.

        With d the distance of the means in scales, KL = d . coth(d/2) − 2, and it is symmetric.
        """
        return logistic_divergence(((output - other) / math.exp(self.log_scale)).abs()).sum(-1)


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
        centred = inside(uniform) - 0.5
        return output - self.scale * centred.sign() * torch.log1p(-2 * centred.abs())

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return Σ d + e^{−d} − 1, d the distance of the means in scales; it is symmetric."""
        distance = (output - other).abs() / self.scale
        return (distance + torch.expm1(-distance)).sum(-1)


class LearnedNormal(Likelihood):
    """Numbers with a Gaussian whose mean and log-variance the decoder gives: two blocks of outputs.

    The log-variance starts near `start` and has a `floor`, approached smoothly, or a column that is constant in a task
    would get an unbounded density.
    """

    name = "normal"
    parameters = 2

    def __init__(self, floor: float = -6.0, start: float = 0.0) -> None:
        self.floor, self.start = floor, start

    def gaussian(self, output: Tensor) -> DiagonalNormal:
        """Return mean and log-variance, each (..., D)."""
        mean, raw = output.chunk(2, dim=-1)
        return DiagonalNormal(mean, self.floor + F.softplus(raw + self.start - self.floor))

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Return Σ log N(x; mean, variance)."""
        return self.gaussian(output).log_prob(x)

    def mean(self, output: Tensor) -> Tensor:
        """Return the mean."""
        return output.chunk(2, dim=-1)[0]

    def draw(self, output: Tensor, uniform: Tensor) -> Tensor:
        """Return the quantiles of the Gaussian."""
        return self.gaussian(output).rsample(torch.special.ndtri(inside(uniform)))

    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return the divergence of the Gaussians in closed form."""
        return self.gaussian(output).divergence(self.gaussian(other), side)


KINDS: tuple[type[Likelihood], ...] = (Bernoulli, Normal, Logistic, Laplace, LogisticMixture)
LIKELIHOODS = {kind.name: kind for kind in KINDS}
Noise = Literal["fixed", "learned", "shared"]
#: The likelihoods whose width can be fixed, predicted for every number, or shared by all images.
WIDTHS: dict[Noise, tuple[str, ...]] = {
    "fixed": tuple(LIKELIHOODS),
    "learned": ("normal",),
    "shared": ("normal", "logistic"),
}


def make_likelihood(
    name: str,
    pixel_range: tuple[float, float] = (0.0, 1.0),
    *,
    shape: tuple[int, ...] = (),
    noise: Noise = "fixed",
    noise_floor: float = 0.0,
) -> Likelihood:
    """Return the likelihood called `name` for pixels in `pixel_range`, quantised in 256 steps.

    `shape` is that of an image, colours first. Unless `noise` is fixed, the decoder also gives the width: for every
    number (learned), or one for each colour of all images (shared), at least `noise_floor` of the pixel range.
    """
    if name not in LIKELIHOODS:
        raise unknown_name("likelihood", name, LIKELIHOODS)
    kind, (low, high) = LIKELIHOODS[name], pixel_range
    if name not in WIDTHS[noise]:
        raise InputError(
            f"{{noise={noise}}} is for {{likelihood}} {' or '.join(WIDTHS[noise])}, not for {name}; leave it out"
        )
    if kind.logits and (low, high) != (0.0, 1.0):
        raise InputError(f"{{likelihood}} {name} needs pixels in [0, 1], these are in [{low:g}, {high:g}]; use normal")
    colours = 3 if len(shape) == 3 and shape[0] == 3 else 1
    if noise == "learned":
        return LearnedNormal()
    if noise == "shared" and kind is Normal:
        floors = {"floor": 2 * math.log(noise_floor * (high - low))} if noise_floor > 0 else {}
        return LearnedNormal(**floors, start=2 * math.log(SHARED_START * (high - low)))
    if noise == "shared":
        return DiscretisedLogistic(pixel_range, colours=colours, floor=noise_floor)
    if kind is Logistic:
        return Logistic(bin_width=(high - low) / 255)
    if kind is LogisticMixture:
        return LogisticMixture(pixel_range, colours=colours)
    return kind()
