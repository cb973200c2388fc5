"""Objectives for a task's components h = q(z | u), each for one replica.

The optimal prior is the aggregated posterior q̂(z) = 1/n Σ_x q(z | x); the target π is q̂ of the current task, or its
mixture with the stored prior, weighted by numbers of images. A mixture r grows by one component after another, as
(1 − β) r + β h:

    h* = argmin KL[h ‖ π / r]               `literal_loss`, the paper's step: minimises −H[h] − E_h[log π − log r]
    h* = argmin KL[π ‖ (1 − β) r + β h]     `forward_loss`, the objective before it was linearised; well-posed

or all components are fitted at once by KL[q̂ ‖ Σ_k v_k h_k] (`mixture_loss`, fully corrective).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from boovae.model import DiagonalMixture, DiagonalNormal
from boovae.model.distributions import LOG_TWO_PI


def literal_loss(h: DiagonalNormal, noise: Tensor, target: DiagonalMixture, mixture: DiagonalMixture) -> Tensor:
    """Return −H[h] − E_h[log π(z) − log r(z)] for one component h (L,), by reparameterised samples: noise (S, L).

    This is KL[h ‖ π/r] up to a constant. For a free Gaussian it has no minimum where r has the lighter tails; the box
    of the pixels, or a broad component in r (`with_floor`), bounds it.
    """
    z = h.rsample(noise)
    entropy = 0.5 * (1 + LOG_TWO_PI + h.log_variance).sum(-1)
    return -entropy - (target.log_prob(z) - mixture.log_prob(z)).mean()


def forward_loss(h: DiagonalNormal, logit: Tensor, z: Tensor, log_mixture: Tensor) -> Tensor:
    """Return −E_π[log((1 − β) r(z) + β h(z))], β = σ(logit), at samples z (n, L) of π with log r(z) (n,)."""
    return -torch.logaddexp(F.logsigmoid(-logit) + log_mixture, F.logsigmoid(logit) + h.log_prob(z)).mean()


def mixture_loss(components: DiagonalNormal, log_weights: Tensor, z: Tensor) -> Tensor:
    """Return −E_q̂[log Σ_k v_k h_k(z)] for all components (K, L) at once, at samples z (n, L)."""
    return cross_entropy(component_log_probs(components, z), log_weights)


def cross_entropy(log_components: Tensor, log_weights: Tensor) -> Tensor:
    """Return −E_q̂[log Σ_k v_k h_k(z)] (...) from log h_k(z) (..., n, K) at samples: KL[q̂ ‖ m] up to a constant."""
    return -torch.logsumexp(log_components + log_weights.unsqueeze(-2), dim=-1).mean(-1)


def component_log_probs(components: DiagonalNormal, z: Tensor) -> Tensor:
    """Return log h_k(z_i) (n, K) for samples z (n, L) and components (K, L)."""
    return DiagonalMixture(z.new_zeros(()), *components).component_log_probs(z)


def with_floor(mixture: DiagonalMixture, target: DiagonalMixture, share: float) -> DiagonalMixture:
    """Return (1 − ε) r + ε N(m, (2s)²), m and s the mean and deviation of the target: r's tails cannot vanish."""
    weights = target.log_weights.exp().unsqueeze(-1)
    mean = (weights * target.mean).sum(0, keepdim=True)
    variance = (weights * (target.log_variance.exp() + (target.mean - mean).square())).sum(0, keepdim=True)
    log_weights = torch.cat([mixture.log_weights + math.log1p(-share), mean.new_full((1,), math.log(share))])
    means = torch.cat([mixture.mean, mean])
    return DiagonalMixture(log_weights, means, torch.cat([mixture.log_variance, (4 * variance).log()]))
