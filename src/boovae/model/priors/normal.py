"""The standard-normal prior of the plain VAE (Kingma and Welling, 2014)."""

from __future__ import annotations

from torch import Tensor

from boovae.model.distributions import DiagonalNormal, StandardNormal
from boovae.model.priors.base import Density, Encoder, Prior


class NormalPrior(Prior):
    """N(0, I), the same for all tasks."""

    def __init__(self, latent_dim: int) -> None:
        super().__init__()
        self.latent_dim = latent_dim

    def forward(self, encoder: Encoder, task: int | None = None) -> Density:
        """Return N(0, I)."""
        return StandardNormal(self.latent_dim)

    def kl(self, posterior: DiagonalNormal, z: Tensor, encoder: Encoder) -> Tensor:
        """Return KL[q(z | x) | N(0, I)] exactly, or at each of several samples (S, B, L)."""
        if z.dim() > posterior.mean.dim():
            return super().kl(posterior, z, encoder)
        return posterior.kl_to_standard()
