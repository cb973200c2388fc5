"""Images from the priors of many replicas."""

import torch
from torch import Tensor

from boovae.model.vae import VAE
from boovae.replicas.stacked import Replicas

#: Number of pixels drawn at once.
SAMPLE_PIXELS = 10_000 * 784


def drawn_images(replicas: Replicas, noise: dict[str, Tensor], pixels: int, task: int | None = None) -> Tensor:
    """Return mean images (R, n, D) of latents from the prior, or from a task's part of it, in chunks.

    `noise` holds `uniform` (R, n) and `normal` (R, n, L); with `pixels` (R, n, D) too, images are drawn from p(x | z).
    """

    def drawn(model: VAE, uniform: Tensor, normal: Tensor, *pixels: Tensor) -> Tensor:
        output = model.decode(model.prior(model.posterior, task).sample(uniform, normal))
        return model.likelihood.draw(output, *pixels) if pixels else model.likelihood.mean(output)

    # The activations of an image take far more memory than the image.
    chunk = max(1, SAMPLE_PIXELS // pixels)
    names = [name for name in ("uniform", "normal", "pixels") if name in noise]
    chunks = zip(*(noise[name].split(chunk, dim=1) for name in names), strict=True)
    return torch.cat([replicas.map(drawn, *chunk) for chunk in chunks], dim=1)
