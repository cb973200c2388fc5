"""Changes of the training images, drawn anew for every step; random numbers come in as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

#: How bright red, green and blue look (ITU-R BT.601), as picture libraries turn colours to grey.
GREY = (0.299, 0.587, 0.114)


def colour_jitter(
    x: Tensor, uniform: Tensor, strength: float, shape: tuple[int, ...], pixel_range: tuple[float, float]
) -> Tensor:
    """Return images (B, D) whose brightness, contrast and saturation are each scaled by 1 ± `strength`, in this order.

    `uniform` (B, 3) in [0, 1] chooses the three factors of every image. Contrast is taken about the image's mean grey,
    saturation about each pixel's own grey; pixels stay in `pixel_range`.
    """
    low, high = pixel_range
    picture = (x.unflatten(-1, shape) - low) / (high - low)  # (B, 3, H, W)
    factors = 1 + strength * (2 * uniform - 1)
    brightness, contrast, saturation = factors.reshape(-1, 3, 1, 1, 1).unbind(1)
    picture = (brightness * picture).clamp(0, 1)
    mean = _grey(picture).mean(dim=(1, 2, 3), keepdim=True)
    picture = torch.lerp(mean.expand_as(picture), picture, contrast).clamp(0, 1)
    picture = torch.lerp(_grey(picture).expand_as(picture), picture, saturation).clamp(0, 1)
    return (low + (high - low) * picture).flatten(-3)


def _grey(picture: Tensor) -> Tensor:
    """Return the grey (B, 1, H, W) of colours (B, 3, H, W)."""
    red, green, blue = (picture[:, channel : channel + 1] for channel in range(3))
    return GREY[0] * red + GREY[1] * green + GREY[2] * blue
