"""Fitting the components of a task to its aggregated posterior: the minorisation step, in its fully corrective form.

The optimal prior is the aggregated posterior q̂(z) = 1/n Σ_x q(z | x). With samples z of it, a mixture
m(z) = Σ_k v_k q(z | u_k) is fitted by the forward divergence KL[q̂ ‖ m] = const − E_q̂[log m(z)], which is well-posed
where the paper's linearised objective runs away: start at the mean images of latent clusters, weights by EM, then all
pseudo-inputs and weights together by gradient. Every function is written for one replica unless it says otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from boovae.distributions import DiagonalMixture
from boovae.training.engine import capture
from boovae.training.optim import adam_step
from boovae.training.replicas import Replicas

#: Lloyd iterations of the latent clustering.
CLUSTER_STEPS = 10


def cross_entropy(log_components: Tensor, log_weights: Tensor) -> Tensor:
    """Return −E_q̂[log Σ_k v_k h_k(z)] from log h_k(z) (n, K) at samples of q̂: KL[q̂ ‖ m] up to a constant."""
    return -torch.logsumexp(log_components + log_weights, dim=-1).mean()


def em_weights(log_components: Tensor, log_weights: Tensor, iterations: int = 100) -> Tensor:
    """Return the log-weights (K,) after EM: v_k ← v_k · mean_z[h_k(z) / Σ_j v_j h_j(z)]; never worse than before."""
    for _ in range(iterations):
        log_share = torch.log_softmax(log_components + log_weights, dim=-1)
        log_weights = torch.logsumexp(log_share, dim=0) - math.log(len(log_components))
    return log_weights


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


def fit_components(
    replicas: Replicas,
    pseudo_inputs: Tensor,
    log_weights: Tensor,
    z: Tensor,
    *,
    steps: int,
    rate: float,
    box: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Fit pseudo-inputs (R, K, D) and log-weights (R, K) of a task to samples z (R, n, L) of its q̂, for all replicas.

    Adam on E_q̂[−log m], pixels put back into their box after every step; the weights end with EM.
    """
    u, logits = pseudo_inputs.clone(), log_weights.clone()
    learned = [u, logits]
    moments = [[torch.zeros_like(tensor) for tensor in learned] for _ in range(2)]
    count, rates = torch.zeros(len(u), device=u.device), torch.full((len(u),), rate, device=u.device)
    tensors = replicas.tensors()

    def loss(parts: list[Tensor], own: dict[str, Tensor], z: Tensor) -> Tensor:
        log_components = replicas.call(own, component_log_probs, parts[0], z)
        return cross_entropy(log_components, torch.log_softmax(parts[1], -1))

    def step() -> None:
        gradients = vmap(grad(loss))(learned, tensors, z)
        count.add_(1)
        adam_step(learned, gradients, moments[0], moments[1], rates, count)
        u.clamp_(*box)

    with torch.no_grad():
        if u.is_cuda and steps > 0:
            before = [tensor.clone() for tensor in (*learned, *moments[0], *moments[1], count)]
            graph = capture(step)
            for tensor, old in zip((*learned, *moments[0], *moments[1], count), before, strict=True):
                tensor.copy_(old)
        for _ in range(steps):
            if u.is_cuda:
                graph.replay()
            else:
                step()
        log_components = replicas.map(component_log_probs, u, z)
        return u, vmap(em_weights)(log_components, torch.log_softmax(logits, -1))


def component_log_probs(model: Any, pseudo_inputs: Tensor, z: Tensor) -> Tensor:
    """Return log q(z_i | u_k) (n, K) for samples z (n, L) and pseudo-inputs u (K, D)."""
    return DiagonalMixture(z.new_zeros(()), *model.posterior(pseudo_inputs)).component_log_probs(z)
