"""The variational autoencoder of ONE replica: an ordinary module, independent of tasks and replicas."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from boovae.model.distributions import DiagonalNormal
from boovae.model.likelihood_base import Likelihood
from boovae.model.priors.prior import Density, Prior, kl


class Bound(NamedTuple):
    """The two parts of the negative ELBO per image, each (B,); with S samples per image, each (S, B)."""

    reconstruction: Tensor
    kl: Tensor

    def weighted(self, kl_weight: Tensor | float) -> Tensor:
        """Return reconstruction + kl_weight . kl."""
        return self.reconstruction + kl_weight * self.kl


class VAE(nn.Module):
    """Encoder q(z | x), decoder p(x | z) and the prior over z.

    Random numbers are passed in as tensors, so every function here is deterministic and can be stacked, compiled and
    captured.
    """

    def __init__(
        self, encoder: nn.Module, decoder: nn.Module, likelihood: Likelihood, prior: Prior, latent_dim: int
    ) -> None:
        super().__init__()
        self.encoder, self.decoder, self.prior = encoder, decoder, prior
        self.likelihood, self.latent_dim = likelihood, latent_dim

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
        density = self.prior.for_training(self.posterior)[0]
        return self.bound_at(x, posterior, posterior.rsample(noise), density)

    def tight_bound(
        self,
        x: Tensor,
        posterior: DiagonalNormal,
        density: Density,
        noise: Tensor,
        kl_weight: Tensor,
        choice: Tensor | None = None,
    ) -> tuple[Tensor, Bound]:
        """Return −log (1/S) Σ_s w_s (B,) with log w_s = −reconstruction_s − kl_weight . kl_s, and these parts (S, B).

        `posterior` is that of the images x, `density` that of the prior, `noise` (S, B, L). With full weight the bound
        lies between the negative ELBO and −log p(x) (Burda, Grosse and Salakhutdinov, 2016). With uniform numbers
        `choice` (S, B) it has an unbiased gradient, computed from one latent per image that is drawn by
        w̄_s = w_s / Σ w (Cremer, Morris and Duvenaud, 2017): others need no backward pass. The encoder's gradient is
        doubly reparameterised (Tucker, Lawson, Gu and Maddison, 2019), because the noise of the plain one grows with
        the number of samples: it passes through z alone, scaled by 1 − kl_weight . (1 − w̄_s).
        """
        with torch.no_grad():
            parts = self.bound_at(x, posterior, posterior.rsample(noise), density)
            log_weights = -parts.weighted(kl_weight)
            bound = math.log(len(noise)) - torch.logsumexp(log_weights, 0)
        if choice is None:
            return bound, parts
        chosen = (log_weights - (-choice.log()).log()).argmax(0, keepdim=True)  # (1, B): a draw from w̄ (Gumbel-max)
        share = torch.take_along_dim(torch.softmax(log_weights, 0), chosen, 0)
        z = posterior.rsample(torch.take_along_dim(noise, chosen.unsqueeze(-1), 0))
        through = (1 - kl_weight * (1 - share)).unsqueeze(-1)
        z = z.detach() + through * (z - z.detach())  # same value, scaled gradient
        fixed = DiagonalNormal(posterior.mean.detach(), posterior.log_variance.detach())
        drawn = self.bound_at(x, fixed, z, density).weighted(kl_weight).squeeze(0)
        return bound + (drawn - drawn.detach()), parts

    def bound_at(self, x: Tensor, posterior: DiagonalNormal, z: Tensor, density: Density) -> Bound:
        """Return the negative ELBO of images at latents z of their posterior, under a density of the prior."""
        return Bound(-self.likelihood.log_prob(self.decode(z), x), kl(posterior, z, density))

    def sample_before(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return latents from the prior of the tasks before the current one; see `Density.sample`."""
        return self.prior.before(self.posterior).sample(uniform, normal)

    def images(self, z: Tensor) -> Tensor:
        """Return the mean images (..., D) of latents (..., L)."""
        return self.likelihood.mean(self.decode(z))
