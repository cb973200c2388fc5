"""Diagonal Gaussians and their mixtures, as functions of tensors: noise is passed in, nothing is drawn here.

These small classes replace `torch.distributions` because losses run under `vmap`, `torch.compile` and CUDA graphs,
where random numbers must enter as tensors. The tests compare them with `torch.distributions`.
"""

import math
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

LOG_TWO_PI = math.log(2 * math.pi)

#: Direction of a divergence: KL[first | second] (forward), KL[second | first] (reverse), or their mean.
Side = Literal["symmetric", "forward", "reverse"]


class DiagonalNormal(NamedTuple):
    """A Gaussian with diagonal covariance: `mean` and `log_variance` of shape (..., L)."""

    mean: Tensor
    log_variance: Tensor

    def rsample(self, noise: Tensor) -> Tensor:
        """Return z = mean + noise * standard deviation; `noise` is standard normal, (..., L)."""
        return self.mean + noise * (0.5 * self.log_variance).exp()

    def log_prob(self, z: Tensor) -> Tensor:
        """Return log N(z; mean, variance) summed over the last axis."""
        squares = ((z - self.mean) * (-0.5 * self.log_variance).exp()).square()
        return -0.5 * (squares + self.log_variance + LOG_TWO_PI).sum(-1)

    def kl_to_standard(self) -> Tensor:
        """Return KL[self | N(0, I)] in closed form, summed over the last axis."""
        return 0.5 * (self.mean.square() + self.log_variance.exp() - self.log_variance - 1).sum(-1)

    def kl(self, other: Self) -> Tensor:
        """Return KL[self | other] in closed form, summed over the last axis."""
        ratio = self.log_variance - other.log_variance
        distance = (self.mean - other.mean).square() * (-other.log_variance).exp()
        return 0.5 * (ratio.exp() - ratio - 1 + distance).sum(-1)

    def divergence(self, other: Self, side: Side = "symmetric") -> Tensor:
        """Return KL[self | other] (forward), KL[other | self] (reverse), or their mean (symmetric)."""
        if side == "symmetric":
            return self.symmetric_kl(other)
        return self.kl(other) if side == "forward" else other.kl(self)

    def symmetric_kl(self, other: Self) -> Tensor:
        """Return ½ (KL[self | other] + KL[other | self]), summed over the last axis."""
        ratio = self.log_variance - other.log_variance
        distance = (self.mean - other.mean).square()
        inverse = (-self.log_variance).exp() + (-other.log_variance).exp()
        return 0.25 * (ratio.exp() + (-ratio).exp() - 2 + distance * inverse).sum(-1)


class StandardNormal(NamedTuple):
    """N(0, I) in `latent_dim` dimensions."""

    latent_dim: int

    def log_prob(self, z: Tensor) -> Tensor:
        """Return log N(z; 0, I), summed over the last axis."""
        return -0.5 * (z.square() + LOG_TWO_PI).sum(-1)

    def sample(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return latents (n, L): `normal` itself; `uniform` (n,) is not used."""
        return normal


class DiagonalMixture(NamedTuple):
    """A mixture of C diagonal Gaussians: `log_weights` (C,), `mean` and `log_variance` (C, L).

    With leading axes (n, C, L) it holds n mixtures, and z (n, s, L) is scored by the mixture of its row. A weight of 0
    is written as a very negative log-weight, not as -inf: gradients stay finite.
    """

    log_weights: Tensor
    mean: Tensor
    log_variance: Tensor

    def log_prob(self, z: Tensor) -> Tensor:
        """Return the log-density at z (..., s, L), by logsumexp over the components."""
        return torch.logsumexp(self.log_weights.unsqueeze(-2) + self.component_log_probs(z), -1)

    def component_log_probs(self, z: Tensor) -> Tensor:
        """Return log N(z; mean_c, variance_c) of every component: (..., s, L) -> (..., s, C).

        The expanded quadratic form is a matrix product; it runs in float64, because in float32 (and more so in TF32) it
        loses tenths of a nat. With gradients on a GPU differences are used; compiled, they never store (..., C, L).
        """
        if z.is_cuda and torch.is_grad_enabled():
            mean, log_variance = self.mean.unsqueeze(-3), self.log_variance.unsqueeze(-3)
            squares = ((z.unsqueeze(-2) - mean) * (-0.5 * log_variance).exp()).square()
            return -0.5 * (squares + log_variance + LOG_TWO_PI).sum(-1)
        wide, mean, log_variance = z.double(), self.mean.double(), self.log_variance.double()
        precision = (-log_variance).exp()
        constant = (mean.square() * precision + log_variance + LOG_TWO_PI).sum(-1)
        squares = torch.cat([wide.square(), wide], -1) @ torch.cat([precision, -2 * mean * precision], -1).mT
        return (-0.5 * (squares + constant.unsqueeze(-2))).to(z.dtype)

    def sample(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return latents (n, L): `uniform` (n,) chooses the component, `normal` (n, L) the point in it."""
        weights = self.log_weights.softmax(-1)
        # A sum over a triangular matrix: torch.compile cannot scan a row this short on a GPU.
        cumulative = (weights * torch.ones_like(weights).expand(len(weights), -1).tril()).sum(-1)
        # With >= and the rounded sum as scale, neither 0 nor almost 1 can choose a component without weight.
        chosen = (uniform.unsqueeze(-1) * cumulative[-1] >= cumulative[:-1]).sum(-1)
        return DiagonalNormal(self.mean[chosen], self.log_variance[chosen]).rsample(normal)
