"""One variational autoencoder: networks, likelihood, prior. Nothing here depends on tasks or replicas."""

from boovae.model.distributions import DiagonalMixture as DiagonalMixture
from boovae.model.distributions import DiagonalNormal as DiagonalNormal
from boovae.model.nets import Nets as Nets
from boovae.model.priors import FreeMixture as FreeMixture
from boovae.model.priors import Prior as Prior
from boovae.model.priors import VampPrior as VampPrior
from boovae.model.vae import VAE as VAE
