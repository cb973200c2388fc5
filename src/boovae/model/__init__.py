"""One variational autoencoder: networks, likelihood, prior. Nothing here depends on tasks or replicas."""

from boovae.model.distributions import DiagonalMixture, DiagonalNormal
from boovae.model.nets import Nets
from boovae.model.priors import FreeMixture, Prior, VampPrior
from boovae.model.vae import VAE

__all__ = ["VAE", "DiagonalMixture", "DiagonalNormal", "FreeMixture", "Nets", "Prior", "VampPrior"]
