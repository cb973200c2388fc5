"""Encoders and decoders, by name: `mlp:300` is the paper's network for MNIST, `mlp:1024` for the other two sets."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch
from torch import Tensor, nn

from boovae.distributions import DiagonalNormal
from boovae.errors import InputError


class Nets(NamedTuple):
    """The two networks of a VAE."""

    encoder: nn.Module
    decoder: nn.Module


class MLPEncoder(nn.Module):
    """Two hidden layers with LeakyReLU, then mean and clamped log-variance of q(z | x)."""

    def __init__(self, pixels: int, width: int, latent_dim: int, log_variance_range: tuple[float, float]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(pixels, width), nn.LeakyReLU(), nn.Linear(width, width), nn.LeakyReLU())
        self.head = nn.Linear(width, 2 * latent_dim)  # mean and log-variance in one product
        self.log_variance_range = log_variance_range

    def forward(self, x: Tensor) -> DiagonalNormal:
        """Map images (..., D) to q(z | x) with parameters (..., L)."""
        mean, log_variance = self.head(self.body(x)).chunk(2, dim=-1)
        return DiagonalNormal(mean, log_variance.clamp(*self.log_variance_range))


class MLPDecoder(nn.Sequential):
    """Two hidden layers with LeakyReLU; gives the likelihood's parameters, one per pixel."""

    def __init__(self, pixels: int, width: int, latent_dim: int) -> None:
        super().__init__(
            nn.Linear(latent_dim, width),
            nn.LeakyReLU(),
            nn.Linear(width, width),
            nn.LeakyReLU(),
            nn.Linear(width, pixels),
        )


def initialise(module: nn.Module) -> None:
    """Xavier-normal weights, PyTorch's own biases; the encoder's two heads each as its own layer."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
    for part in module.modules():
        if isinstance(part, MLPEncoder):
            for half in part.head.weight.detach().chunk(2):
                nn.init.xavier_normal_(half)


def make_nets(name: str, shape: tuple[int, ...], latent_dim: int, log_variance_range: tuple[float, float]) -> Nets:
    """Return encoder and decoder called `name` for images of `shape`."""
    pixels = math.prod(shape)
    match = re.fullmatch(r"mlp:([1-9]\d{0,4})", name)
    if match is None:
        raise InputError(
            f"unknown net '{name}' (--net): use mlp:WIDTH, for example mlp:300 (MNIST) or mlp:1024 (the others)"
        )
    width = int(match.group(1))
    encoder = MLPEncoder(pixels, width, latent_dim, log_variance_range)
    decoder = MLPDecoder(pixels, width, latent_dim)
    with torch.no_grad():
        initialise(encoder)
        initialise(decoder)
    return Nets(encoder, decoder)
