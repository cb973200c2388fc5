"""The standard-normal prior of the plain VAE (Kingma and Welling, 2014)."""

from boovae.model.distributions import StandardNormal
from boovae.model.priors.prior import Density, Encoder, Prior


class NormalPrior(Prior):
    """N(0, I), the same for all tasks."""

    def __init__(self, latent_dim: int) -> None:
        super().__init__()
        self.latent_dim = latent_dim

    def forward(self, encoder: Encoder, task: int | None = None) -> Density:
        """Return N(0, I)."""
        return StandardNormal(self.latent_dim)
