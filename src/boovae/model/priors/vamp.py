"""Priors whose components are the encoder's own posteriors at learned images ("pseudo-inputs")."""

import math

import torch
from torch import Tensor, nn

from boovae.model.distributions import DiagonalMixture
from boovae.model.priors.prior import Density, Encoder, Prior

#: Standard deviation of the logits at the start: 0.15 of the pixel range, around its middle.
START_DEVIATION = 0.6


class VampPrior(Prior):
    """r(z) = 1/K Σ_k q(z | u_k) with trainable pseudo-inputs u_k (Tomczak and Welling, 2018).

    A sigmoid keeps the pixels in their range; unlike the hard clamp of the original it has a gradient everywhere.
    """

    def __init__(self, components: int, pixels: int, pixel_range: tuple[float, float] = (0.0, 1.0)) -> None:
        super().__init__()
        self.components = components
        self.low, self.high = pixel_range
        # Equal pseudo-inputs would have equal gradients and stay equal forever.
        with torch.random.fork_rng(devices=[]):  # so that the networks start as with other priors
            self.logits = nn.Parameter(START_DEVIATION * torch.randn(components, pixels))

    @property
    def pseudo_inputs(self) -> Tensor:
        """The learned images, (K, D)."""
        return self.images(self.logits)

    def images(self, logits: Tensor) -> Tensor:
        """Return the images (..., D) of parameters (..., D)."""
        return self.low + (self.high - self.low) * torch.sigmoid(logits)

    def share(self, images: Tensor) -> Tensor:
        """Return the relative position of pixels (..., D) in their range, from 0 to 1."""
        return (images - self.low) / (self.high - self.low)

    def logits_of(self, images: Tensor) -> Tensor:
        """Return the parameters that make `images` (..., D) the pseudo-inputs, moved slightly into the pixel range."""
        return torch.logit(0.02 + 0.96 * self.share(images))

    def forward(self, encoder: Encoder, task: int | None = None) -> Density:
        """Return the mixture; it is not divided among tasks."""
        components = encoder(self.pseudo_inputs)
        log_weights = torch.full_like(components.mean[:, 0], -math.log(len(components.mean)))
        return DiagonalMixture(log_weights, *components)
