"""Weights of given components: how much each gets, and which of them to keep.

β* = argmin KL[β h + (1 − β) r ‖ π]     `best_weight`, by bisection; `sgd_weight`, as in the paper
v  = argmin KL[q̂ ‖ Σ_k v_k h_k]         `em_weights`, the backward step: components without weight are `dropped`
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from boovae.boosting.losses import cross_entropy
from boovae.model import DiagonalNormal
from boovae.model.priors.boosted import EMPTY

#: A component's weight stays this far from 0 and 1 when it is added.
WEIGHT_MARGIN = 1e-3


class Scores(NamedTuple):
    """Log-densities of h, r and π at samples, each (n,): the first half of the samples is from h, the second from r."""

    h: Tensor
    r: Tensor
    target: Tensor


def best_weight(scores: Scores, iterations: int = 40) -> Tensor:
    """Return β* = argmin KL[β h + (1 − β) r ‖ π], by bisection of its derivative on fixed samples.

    With samples of s = ½ (h + r) the derivative is E_s[(h − r)/s . log(m_β/π)], which increases with β for any samples.
    """
    low, high = torch.full_like(scores.h[0], WEIGHT_MARGIN), torch.full_like(scores.h[0], 1 - WEIGHT_MARGIN)
    for _ in range(iterations):
        beta = 0.5 * (low + high)
        falling = weight_slope(scores, beta) < 0
        low, high = torch.where(falling, beta, low), torch.where(falling, high, beta)
    return 0.5 * (low + high)


def weight_slope(scores: Scores, beta: Tensor) -> Tensor:
    """Return dKL[β h + (1 − β) r ‖ π] / dβ on the samples."""
    share = torch.sigmoid(scores.h - scores.r)  # h / (h + r)
    log_mixture = torch.logaddexp(beta.log() + scores.h, torch.log1p(-beta) + scores.r)
    return (2 * (2 * share - 1) * (log_mixture - scores.target)).mean()


def sgd_weight(scores: Scores) -> Tensor:
    """Return β after stochastic gradient descent from ½, one sample of h and one of r per step (the paper's text)."""
    half = len(scores.h) // 2
    beta = torch.full_like(scores.h[0], 0.5)
    for step in range(half):
        pair = Scores(*(torch.stack([part[step], part[half + step]]) for part in scores))
        ratio = torch.logaddexp(beta.log() + pair.h, torch.log1p(-beta) + pair.r) - pair.target
        beta = (beta - 0.5 / (step + 1) * (ratio[0] - ratio[1])).clamp(WEIGHT_MARGIN, 1 - WEIGHT_MARGIN)
    return beta


def em_weights(log_components: Tensor, log_weights: Tensor, iterations: int = 100) -> Tensor:
    """Return the log-weights (..., K) after EM: v_k ← v_k . mean_z[h_k(z) / Σ_j v_j h_j(z)]; never worse than before.

    `log_components` (..., n, K). Densities are taken relative to the largest at each sample, in float64.
    """
    # An empty slot stays empty, however well a component there would fit.
    empty = (log_weights <= EMPTY / 2) & (log_weights < log_weights.amax(-1, keepdim=True))
    masked = log_components.double().masked_fill(empty.unsqueeze(-2), -math.inf)
    density = (masked - masked.amax(-1, keepdim=True)).exp()
    # Weights start slightly above zero, so that every sample keeps some density.
    weights = log_weights.double().softmax(-1).clamp(min=1e-30).masked_fill(empty, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    for _ in range(iterations):
        weights = weights * (density / (density @ weights.unsqueeze(-1))).mean(-2)
    return weights.log().where(weights > 1e-30, EMPTY).to(log_weights.dtype)


def dropped(log_weights: Tensor, threshold: float) -> Tensor:
    """Return the log-weights (K,) without components below the threshold; the largest is always kept."""
    small = (log_weights < math.log(max(threshold, 1e-30))) & (log_weights < log_weights.max())
    return torch.log_softmax(log_weights.masked_fill(small, EMPTY), dim=-1).clamp(min=EMPTY)


def merged(components: DiagonalNormal, log_weights: Tensor, distance: float = 1e-3) -> Tensor:
    """Return the log-weights (K,) with the weight of duplicates (symmetric KL under `distance`) given to the first."""
    one = DiagonalNormal(*(part.unsqueeze(1) for part in components))
    other = DiagonalNormal(*(part.unsqueeze(0) for part in components))
    # An empty slot has no twin.
    empty = log_weights <= EMPTY / 2
    twin = (one.symmetric_kl(other) < distance) & ~(empty.unsqueeze(0) | empty.unsqueeze(1))
    first = twin.int().argmax(1)  # of each component: the first that equals it
    first = torch.where(empty, torch.arange(len(first), device=first.device), first)
    mine = torch.arange(len(first), device=first.device).unsqueeze(1) == first.unsqueeze(0)
    return torch.logsumexp(torch.where(mine, log_weights, EMPTY), dim=1).clamp(min=EMPTY)


def gain_curve(log_components: Tensor, iterations: int = 20) -> tuple[Tensor, Tensor]:
    """Return the greedy order of components (..., K), and the divergence (..., K) with the first 1, 2, …, K.

    Each step adds the component that lowers −E_q̂[log m] most, with the weights of all refitted by EM;
    `log_components` (..., n, K).
    """
    count, device = log_components.shape[-1], log_components.device
    chosen = torch.zeros(*log_components.shape[:-2], count, dtype=torch.bool, device=device)
    each = log_components.unsqueeze(-3)  # the candidates' axis
    order, curve = [], []
    for _ in range(count):
        candidates = chosen.unsqueeze(-2) | torch.eye(count, dtype=torch.bool, device=device)  # (..., candidate, K)
        log_weights = torch.where(candidates, 0.0, EMPTY).log_softmax(-1)
        fitted = em_weights(each, log_weights, iterations)
        loss, best = cross_entropy(each, fitted).masked_fill(chosen, math.inf).min(-1)
        chosen = chosen | (torch.arange(count, device=device) == best.unsqueeze(-1))
        order.append(best)
        curve.append(loss)
    return torch.stack(order, -1), torch.stack(curve, -1)
