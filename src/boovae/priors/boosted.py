"""The prior of BooVAE: components are the encoder's posteriors at pseudo-inputs, a handful for each task."""

from __future__ import annotations

import torch
from torch import Tensor

from boovae.distributions import DiagonalMixture, DiagonalNormal
from boovae.priors.base import Density, Encoder, Prior

#: The log-weight of an empty place: no mass, and finite gradients.
EMPTY = -1e4


class BoostedPrior(Prior):
    """r(z) = Σ_s ρ_s Σ_k v_sk N(z; mean_sk, variance_sk): task masses ρ, weights v inside a task.

    There is room for `components` components of each task seen. Components of finished tasks are stored Gaussians.
    While a task is learned its own, the last row, are encoded anew from their pseudo-inputs at every use (`live`),
    with gradient.
    """

    shares_mass = True

    pseudo_inputs: Tensor  # (T, K, D)
    mean: Tensor  # (T, K, L)
    log_variance: Tensor  # (T, K, L)
    log_weights: Tensor  # (T, K), each row adds up to one
    log_masses: Tensor  # (T,), adds up to one

    def __init__(self, tasks: int, components: int, pixels: int, latent_dim: int) -> None:
        super().__init__()
        self.components = tasks * components
        self.live = False
        self.register_buffer("pseudo_inputs", torch.zeros(tasks, components, pixels))
        self.register_buffer("mean", torch.zeros(tasks, components, latent_dim))
        self.register_buffer("log_variance", torch.zeros(tasks, components, latent_dim))
        self.register_buffer("log_weights", torch.full((tasks, components), EMPTY))
        self.register_buffer("log_masses", torch.full((tasks,), EMPTY))

    def current(self, encoder: Encoder) -> DiagonalMixture:
        """Return the mixture of the last task's components as the encoder sees them now."""
        return DiagonalMixture(self.log_weights[-1], *encoder(self.pseudo_inputs[-1]))

    def forward(self, encoder: Encoder, task: int | None = None) -> Density:
        """Return the whole mixture, or one task's part of it."""
        stored = DiagonalNormal(self.mean, self.log_variance)
        if self.live:
            now = encoder(self.pseudo_inputs[-1:])
            stored = DiagonalNormal(*(torch.cat([old[:-1], new]) for old, new in zip(stored, now, strict=True)))
        if task is not None:
            return DiagonalMixture(self.log_weights[task], stored.mean[task], stored.log_variance[task])
        log_weights = self.log_masses.unsqueeze(1) + self.log_weights
        return DiagonalMixture(log_weights.flatten(), stored.mean.flatten(0, 1), stored.log_variance.flatten(0, 1))

    def before(self, encoder: Encoder) -> Density:
        """Return the stored mixture of all tasks but the last."""
        log_weights = torch.log_softmax(self.log_masses[:-1], 0).unsqueeze(1) + self.log_weights[:-1]
        return DiagonalMixture(
            log_weights.flatten(), self.mean[:-1].flatten(0, 1), self.log_variance[:-1].flatten(0, 1)
        )

    def own(self, encoder: Encoder, tasks: Tensor) -> Density:
        """Return the mixture with, for each image, the weights of its own task alone."""
        mine = tasks.unsqueeze(1) == torch.arange(len(self.log_masses), device=tasks.device)
        log_weights = torch.where(mine.unsqueeze(2), self.log_weights, EMPTY).flatten(1)
        return DiagonalMixture(log_weights.unsqueeze(1), self.mean.flatten(0, 1), self.log_variance.flatten(0, 1))

    def kl(self, posterior: DiagonalNormal, z: Tensor, encoder: Encoder) -> Tensor:
        """Return log q(z | x) − log r(z) under the task's own components.

        While a task is learned its images are scored by its own part of the prior alone (the mass of the task is then a
        constant): with the whole mixture, new images settle on old components.
        """
        density = self.current(encoder) if self.live else self.forward(encoder)
        return posterior.log_prob(z) - density.log_prob(z)
