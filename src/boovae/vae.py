"""The variational autoencoder of ONE replica: an ordinary module that knows nothing of tasks or replicas."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from boovae.distributions import DiagonalNormal
from boovae.likelihoods import Likelihood
from boovae.priors import Prior


class Bound(NamedTuple):
    """The two parts of the negative ELBO per image, each (B,); with S samples of every image, each (S, B)."""

    reconstruction: Tensor
    kl: Tensor

    def importance_weighted(self, kl_weight: Tensor) -> Tensor:
        """Return −log (1/S) Σ_s exp(−reconstruction_s − kl_weight · kl_s), (B,), of S samples.

        It lies between the negative ELBO and −log p(x) (Burda, Grosse and Salakhutdinov, 2016).
        """
        each = self.reconstruction + kl_weight * self.kl
        return math.log(len(each)) - torch.logsumexp(-each, 0)


class VAE(nn.Module):
    """Encoder q(z | x), decoder p(x | z) and the prior over z.

    Random numbers come in as tensors, so every function here is deterministic and can be stacked, compiled and
    captured.
    """

    def __init__(
        self, encoder: nn.Module, decoder: nn.Module, likelihood: Likelihood, prior: Prior, latent_dim: int
    ) -> None:
        super().__init__()
        self.latent_dim = latent_dim
        self.encoder = encoder
        self.decoder = decoder
        self.likelihood = likelihood
        self.prior = prior

    def posterior(self, x: Tensor) -> DiagonalNormal:
        """Return q(z | x) for images (B, D): parameters (B, L)."""
        posterior: DiagonalNormal = self.encoder(x)
        return posterior

    def decode(self, z: Tensor) -> Tensor:
        """Return the parameters of p(x | z) for latents (..., L): (..., D); see `likelihood`."""
        output: Tensor = self.decoder(z)
        return output

    def bound(self, x: Tensor, noise: Tensor) -> Bound:
        """Return the negative ELBO of images (B, D); `noise` (B, L), or (S, B, L) for S samples, is standard normal."""
        posterior = self.posterior(x)
        z = posterior.rsample(noise)
        reconstruction = -self.likelihood.log_prob(self.decode(z), x)
        return Bound(reconstruction, self.prior.kl(posterior, z, self.posterior))

    def images(self, z: Tensor) -> Tensor:
        """Return the mean images (..., D) of latents (..., L)."""
        return self.likelihood.mean(self.decode(z))
