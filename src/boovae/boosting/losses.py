"""The minorisation step: learning a task's components h = q(z | u), their weights, and which of them to keep.

The optimal prior is the aggregated posterior q̂(z) = 1/n Σ_x q(z | x); the target π is q̂ of the current task, or its
mixture with the stored prior by numbers of images. A mixture r grows by (1 − β) r + β h, one component after another:

    h* = argmin KL[h ‖ π / r]               `literal_loss`, the paper's step: minimises −H[h] − E_h[log π − log r]
    h* = argmin KL[π ‖ (1 − β) r + β h]     `forward_loss`, the objective before it was linearised; well-posed
    β* = argmin KL[β h + (1 − β) r ‖ π]     `best_weight`
    v  = argmin KL[q̂ ‖ Σ_k v_k h_k]         `em_weights`, the step back: components that got no weight are dropped

or all components are fitted at once by the last divergence (`mixture_loss`, fully corrective). The loss functions are
written for one replica; `Descent` minimises one for all replicas at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from boovae.model.distributions import LOG_TWO_PI, DiagonalMixture, DiagonalNormal
from boovae.model.priors.boosted import EMPTY
from boovae.replicas.adam import adam_step
from boovae.replicas.engine import capture
from boovae.replicas.stacked import replica_of, side_by_side

#: Lloyd iterations of the latent clustering.
CLUSTER_STEPS = 10
#: A component's weight stays this far from 0 and 1 when it is added.
WEIGHT_MARGIN = 1e-3


# --- the losses -----------------------------------------------------------------------------------------------------


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
    joined = torch.logaddexp(F.logsigmoid(-logit) + log_mixture, F.logsigmoid(logit) + h.log_prob(z))
    return -joined.mean()


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


# --- the weights ----------------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Log-densities of h, r and π at samples, each (n,): the first half of the samples is from h, the other from r."""

    h: Tensor
    r: Tensor
    target: Tensor


def best_weight(scores: Scores, iterations: int = 40) -> Tensor:
    """Return β* = argmin KL[β h + (1 − β) r ‖ π], by bisection of its derivative on fixed samples.

    With samples of s = ½ (h + r) the derivative is E_s[(h − r)/s . log(m_β/π)], which grows with β for any samples.
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
        log_mixture = torch.logaddexp(beta.log() + pair.h, torch.log1p(-beta) + pair.r)
        ratio = log_mixture - pair.target
        beta = (beta - 0.5 / (step + 1) * (ratio[0] - ratio[1])).clamp(WEIGHT_MARGIN, 1 - WEIGHT_MARGIN)
    return beta


def em_weights(log_components: Tensor, log_weights: Tensor, iterations: int = 100) -> Tensor:
    """Return the log-weights (..., K) after EM: v_k ← v_k . mean_z[h_k(z) / Σ_j v_j h_j(z)]; never worse than before.

    `log_components` (..., n, K). Densities are taken relative to the largest at each sample, in float64.
    """
    # An empty place stays empty, however well a component there would fit.
    empty = (log_weights <= EMPTY / 2) & (log_weights < log_weights.amax(-1, keepdim=True))
    masked = log_components.double().masked_fill(empty.unsqueeze(-2), -math.inf)
    density = (masked - masked.amax(-1, keepdim=True)).exp()
    # Starting a hair above zero, no sample is ever left without any density.
    weights = log_weights.double().softmax(-1).clamp(min=1e-30).masked_fill(empty, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    for _ in range(iterations):
        weights = weights * (density / (density @ weights.unsqueeze(-1))).mean(-2)
    return weights.log().where(weights > 1e-30, EMPTY).to(log_weights.dtype)


def dropped(log_weights: Tensor, threshold: float) -> Tensor:
    """Return the log-weights (K,) without components under the threshold; the largest always stays."""
    small = (log_weights < math.log(max(threshold, 1e-30))) & (log_weights < log_weights.max())
    return torch.log_softmax(log_weights.masked_fill(small, EMPTY), dim=-1).clamp(min=EMPTY)


def merged(components: DiagonalNormal, log_weights: Tensor, distance: float = 1e-3) -> Tensor:
    """Return the log-weights (K,) with the weight of duplicates (symmetric KL under `distance`) given to the first."""
    one = DiagonalNormal(*(part.unsqueeze(1) for part in components))
    other = DiagonalNormal(*(part.unsqueeze(0) for part in components))
    # An empty place has no twin.
    empty = log_weights <= EMPTY / 2
    twin = (one.symmetric_kl(other) < distance) & ~(empty.unsqueeze(0) | empty.unsqueeze(1))
    first = twin.int().argmax(1)  # of each component: the first that equals it
    first = torch.where(empty, torch.arange(len(first), device=first.device), first)
    mine = torch.arange(len(first), device=first.device).unsqueeze(1) == first.unsqueeze(0)
    return torch.logsumexp(torch.where(mine, log_weights, EMPTY), dim=1).clamp(min=EMPTY)


def gain_curve(log_components: Tensor, iterations: int = 20) -> tuple[Tensor, Tensor]:
    """Return in which order components (..., K) pay most, and the divergence (..., K) with the first 1, 2, …, K.

    At each size the component is added that lowers −E_q̂[log m] most, with the weights of all by EM; `log_components`
    (..., n, K).
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


# --- where components start -----------------------------------------------------------------------------------------


def cluster_images(z: Tensor, images: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean images (K, D) of K latent clusters and their shares (K,).

    `z` (n, L) are codes of `images` (n, D); `uniform` (K,) chooses the first centres as k-means++ does (Arthur and
    Vassilvitskii, 2007): each next one with probability proportional to the squared distance to those before.
    """
    distance = torch.ones_like(z[:, 0])
    centres = []
    for choice in uniform:
        cumulative = distance.cumsum(0)
        index = (choice * cumulative[-1] >= cumulative[:-1]).sum(-1, keepdim=True)
        centres.append(z.index_select(0, index))
        nearest = (z - centres[-1]).square().sum(-1)
        distance = torch.minimum(distance, nearest) if len(centres) > 1 else nearest
    centre = torch.cat(centres)
    for _ in range(CLUSTER_STEPS):
        member = _members(z, centre)
        # An empty cluster keeps its centre.
        count = member.sum(0).unsqueeze(1)
        centre = torch.where(count > 0, member.mT @ z / count.clamp(min=1), centre)
    member = _members(z, centre)
    nearest_image = images[torch.cdist(z, centre).argmin(0)]
    count = member.sum(0).unsqueeze(1)
    means = torch.where(count > 0, member.mT @ images / count.clamp(min=1), nearest_image)
    return means, count.squeeze(1) / len(z)


def _members(z: Tensor, centre: Tensor) -> Tensor:
    """Return to which centre each code belongs, one-hot (n, K)."""
    nearest = torch.cdist(z, centre).argmin(1, keepdim=True)
    return torch.zeros(len(z), len(centre), device=z.device).scatter(1, nearest, 1.0)


# --- the descent ----------------------------------------------------------------------------------------------------


class Descent:
    """Adam on a few tensors of all replicas at once, without touching the networks.

    `loss(learned, arguments, noise)` is written for one replica. `learned[0]` stays in `box`. Replicas are one batched
    computation or, if not `stacked`, one after another, on a GPU side by side. There one step is recorded as a CUDA
    graph and replayed; calls with the same shapes share it.
    """

    def __init__(
        self,
        loss: Callable[[list[Tensor], Any, Tensor], Tensor],
        box: tuple[float, float] | None,
        *,
        stacked: bool = True,
    ) -> None:
        self.loss, self.box, self.stacked = loss, box, stacked
        self._graph: torch.cuda.CUDAGraph | None = None
        self._state: list[Tensor] = []

    @torch.no_grad()
    def __call__(
        self, start: list[Tensor], arguments: Any, *, steps: int, rate: float, noise: Tensor | None = None
    ) -> list[Tensor]:
        """Return where `steps` steps lead from `start` (R, ...); `arguments` (R, ...), `noise` (R, steps, ...)."""
        if steps == 0:  # nothing to record on a GPU either: there may be no noise
            return [tensor.clone() for tensor in start]
        replicas, device = len(start[0]), start[0].device
        if noise is None:
            noise = torch.zeros(replicas, steps, device=device)
        moments = [torch.zeros_like(tensor) for tensor in start * 2]
        fresh = [*(tensor.clone() for tensor in start), *moments, torch.zeros(replicas, device=device)]
        fresh += [torch.full((replicas,), rate, device=device), torch.zeros(1, dtype=torch.long, device=device), noise]
        leaves, self._structure = pytree.tree_flatten(arguments)
        self._load(fresh + leaves, learned=len(start))
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()
        return [tensor.clone() for tensor in self._state[: len(start)]]

    def _load(self, fresh: list[Tensor], learned: int) -> None:
        """Put the tensors of a call where the step reads them; record the step if it has not seen such shapes."""
        self._learned = learned
        if not fresh[0].is_cuda:
            self._state = fresh
            return
        if [tensor.shape for tensor in fresh] != [tensor.shape for tensor in self._state]:
            self._state = [tensor.clone() for tensor in fresh]
            self._graph = capture(self._step)
        for tensor, value in zip(self._state, fresh, strict=True):
            tensor.copy_(value)

    def _step(self) -> None:
        count = self._learned
        learned, first, second = (self._state[part * count : (part + 1) * count] for part in range(3))
        steps, rate, position, noise, *leaves = self._state[3 * count :]
        arguments = pytree.tree_unflatten(leaves, self._structure)
        now = noise.index_select(1, position % noise.shape[1]).squeeze(1)
        gradients = self._gradients((learned, arguments, now))
        steps.add_(1)
        position.add_(1)
        adam_step(learned, gradients, first, second, rate, steps)
        if self.box is not None:
            learned[0].clamp_(*self.box)

    def _gradients(self, everything: tuple[Any, ...]) -> list[Tensor]:
        """Return the gradients of what is learned, (R, ...) each."""
        gradients_of: Callable[..., list[Tensor]] = grad(self.loss)
        if self.stacked:
            return vmap(gradients_of)(*everything)
        ones = [functools.partial(gradients_of, *replica_of(everything, r)) for r in range(len(everything[0][0]))]
        rows = side_by_side(everything[0][0].device, ones)
        return [torch.stack(column) for column in zip(*rows, strict=True)]
