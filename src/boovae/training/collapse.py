"""Posterior collapse: no latent dimension varies between the images, so codes and samples say nothing about them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boovae.model.vae import VAE
from boovae.replicas.stacked import Replicas

#: A latent dimension is active if the variance of its means over the images is larger (Burda et al., 2016).
ACTIVE = 0.01
#: Images to measure on.
IMAGES = 1000
#: Images whose pixels vary less in total hold nothing to encode, in units of the squared pixel range.
LEAST_VARIANCE = 1e-3
#: After fewer epochs a model has hardly begun to learn.
LEAST_EPOCHS = 10


@torch.no_grad()
def active_units(replicas: Replicas, images: Tensor) -> Tensor:
    """Return the number of latent dimensions (R,) that vary between images (N, D) or (R, N, D)."""
    some = images[..., torch.linspace(0, images.shape[-2] - 1, min(images.shape[-2], IMAGES)).long(), :]
    means: Tensor = replicas.map(VAE.posterior, some.expand(len(replicas), -1, -1)).mean
    return (means.double().var(1, correction=0) > ACTIVE).sum(1)


def collapsed(replicas: Replicas, images: Tensor, pixel_range: tuple[float, float]) -> npt.NDArray[np.bool_]:
    """Return which replicas (R,) encode all of the images alike, though these differ."""
    variance = images[..., :IMAGES, :].var(-2, correction=0).sum(-1).max()
    if variance < LEAST_VARIANCE * (pixel_range[1] - pixel_range[0]) ** 2:
        return np.zeros(len(replicas), dtype=np.bool_)
    return (active_units(replicas, images) == 0).cpu().numpy()
