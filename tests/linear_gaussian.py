"""A linear VAE whose likelihood is known exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from boovae.model.distributions import DiagonalNormal
from boovae.model.likelihoods import Normal
from boovae.model.priors import NormalPrior
from boovae.model.vae import VAE
from boovae.replicas.stacked import Replicas, replica_of

PIXELS, LATENT = 6, 3
LOG_VARIANCE = -1.0


class LinearEncoder(nn.Module):
    """A posterior that is linear in x with constant variance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(PIXELS, LATENT)
        self.log_variance = nn.Parameter(torch.zeros(LATENT))

    def forward(self, x: Tensor) -> DiagonalNormal:
        mean = self.layer(x)
        return DiagonalNormal(mean, self.log_variance.expand_as(mean))


def linear_model(shift: float = 0.0, wider: float = 0.0) -> VAE:
    """Return x = W z + b + noise with orthogonal columns in W, so that the posterior is diagonal.

    `shift` and `wider` move the encoder's mean and log-variance away from the exact posterior's.
    """
    columns = torch.linalg.qr(torch.randn(PIXELS, LATENT)).Q * torch.linspace(0.5, 2.0, LATENT)
    variance = math.exp(LOG_VARIANCE)
    posterior_variance = 1 / (1 + columns.square().sum(0) / variance)
    encoder, decoder = LinearEncoder(), nn.Linear(LATENT, PIXELS)
    with torch.no_grad():
        decoder.weight.copy_(columns)
        decoder.bias.copy_(torch.randn(PIXELS))
        encoder.layer.weight.copy_(posterior_variance.unsqueeze(1) * columns.T / variance)
        encoder.layer.bias.copy_(shift - encoder.layer.weight @ decoder.bias)
        encoder.log_variance.copy_(posterior_variance.log() + wider)
    return VAE(encoder, decoder, Normal(LOG_VARIANCE), NormalPrior(LATENT), LATENT)


def exact_log_prob(replicas: Replicas, images: Tensor) -> Tensor:
    results = []
    for r in range(len(replicas)):
        tensors = replica_of(replicas.tensors(), r)
        weight, bias = tensors["decoder.weight"].double(), tensors["decoder.bias"].double()
        covariance = weight @ weight.T + math.exp(LOG_VARIANCE) * torch.eye(PIXELS, dtype=torch.float64)
        results.append(MultivariateNormal(bias, covariance).log_prob(images.double()))
    return torch.stack(results)


def linear_images(count: int = 9) -> Tensor:
    return 2 * torch.randn(count, PIXELS, generator=torch.Generator().manual_seed(5))
