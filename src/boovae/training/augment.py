"""Augment training images, randomly for every step; random numbers are passed in as tensors.

The trainer uses three functions: `check` refuses invalid settings, `draws` returns the random tensors of a step, and
`changed` applies them.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from boovae.config import TrainingSettings
from boovae.data import ImageSpec
from boovae.errors import InputError
from boovae.replicas.randomness import Draw

#: Luma weights of red, green and blue (ITU-R BT.601), as in picture libraries.
GREY = (0.299, 0.587, 0.114)

#: The share of images that `deform` changes, and the size of the shift relative to its strength.
DEFORMED, SHIFT = 0.7, 0.6


def check(settings: TrainingSettings, spec: ImageSpec) -> None:
    """Refuse augmentations that do not fit the image shape, or that would make binary pixels grey."""
    shape = spec.shape
    colour = len(shape) == 3 and shape[0] == 3
    if settings.mirror and len(shape) == 1:
        raise InputError(f"{{mirror}} needs pictures, these have shape {shape}; leave it out")
    kinds = {"jitter": ("colour images", colour), "deform": ("pictures", len(shape) > 1), "input_noise": ("", True)}
    for name, (wanted, fits) in kinds.items():
        strength = getattr(settings, name)
        if strength > 0 and not fits:
            raise InputError(f"{{{name}={strength:g}}} needs {wanted}, these have shape {shape}; set it to 0")
        if strength > 0 and spec.binarize == "threshold":
            raise InputError(
                f"{{{name}}} makes grey pixels, but {{binarize=threshold}} allows none: use {{binarize=dynamic}}"
            )


def draws(settings: TrainingSettings, spec: ImageSpec, batch_size: int) -> dict[str, Draw]:
    """Return the random tensors of one step of one replica."""
    found: dict[str, Draw] = {}
    if settings.mirror:
        found["mirror"] = Draw("uniform", (batch_size,))
    if settings.deform > 0:
        found |= {"deform": Draw("normal", (batch_size, 6)), "deformed": Draw("uniform", (batch_size,))}
    if settings.jitter > 0:
        found["jitter"] = Draw("uniform", (batch_size, 3))
    if settings.input_noise > 0:
        found["input_noise"] = Draw("normal", (batch_size, spec.pixels))
    return found


def changed(x: Tensor, batch: Mapping[str, Any], settings: TrainingSettings, spec: ImageSpec) -> Tensor:
    """Return images (B, D) augmented by the random tensors in `batch`; without these, they are unchanged."""
    if "mirror" in batch:
        x = mirror(x, batch["mirror"], spec.shape)
    if "deform" in batch:
        x = deform(x, batch["deform"], batch["deformed"], settings.deform, spec)
    if "jitter" in batch:
        x = colour_jitter(x, batch["jitter"], settings.jitter, spec)
    if "input_noise" in batch:
        x = x + settings.input_noise * batch["input_noise"]
    return x


def mirror(x: Tensor, uniform: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flip images (B, D) horizontally where `uniform` (B,) is below one half."""
    return torch.where(uniform[:, None] < 0.5, x.unflatten(-1, shape).flip(-1).flatten(-len(shape)), x)


def colour_jitter(x: Tensor, uniform: Tensor, strength: float, spec: ImageSpec) -> Tensor:
    """Scale brightness, contrast and saturation of images (B, D) by random factors in 1 ± `strength`, in this order.

    `uniform` (B, 3) in [0, 1] chooses the three factors of every image. Contrast is relative to the image's mean grey,
    saturation to each pixel's own grey; pixels are clamped to their range.
    """
    low, high = spec.pixel_range
    picture = (x.unflatten(-1, spec.shape) - low) / (high - low)  # (B, 3, H, W)
    factors = 1 + strength * (2 * uniform - 1)
    brightness, contrast, saturation = factors.reshape(-1, 3, 1, 1, 1).unbind(1)
    picture = (brightness * picture).clamp(0, 1)
    mean = _grey(picture).mean(dim=(1, 2, 3), keepdim=True)
    picture = torch.lerp(mean.expand_as(picture), picture, contrast).clamp(0, 1)
    picture = torch.lerp(_grey(picture).expand_as(picture), picture, saturation).clamp(0, 1)
    return (low + (high - low) * picture).flatten(-3)


def deform(x: Tensor, normal: Tensor, uniform: Tensor, strength: float, spec: ImageSpec) -> Tensor:
    """Apply a small random affine map to most of the images (B, D); the others are unchanged.

    A pixel at (a, b), in units of half the picture, takes the value at (a, b) + strength * (M (a, b) + SHIFT * m), the
    2 x 2 matrix M and the vector m from `normal` (B, 6), bilinearly interpolated. Outside the picture a grey one is
    black, the usual background; a colour one is reflected, or the network would learn black corners. An image changes
    where `uniform` (B,) is below DEFORMED: a network that never sees unchanged images would learn the smoothing of the
    interpolation.
    """
    low, high = spec.pixel_range
    height, width = spec.shape[-2:]
    across, down = ((2 * torch.arange(n, dtype=x.dtype, device=x.device) + 1) / n - 1 for n in (width, height))
    places = torch.stack(torch.meshgrid(across, down, indexing="xy"), dim=-1)  # (H, W, 2)
    matrix, shift = normal[:, :4].reshape(-1, 1, 1, 2, 2), normal[:, 4:].reshape(-1, 1, 1, 2)
    # Sums instead of a matrix product, which may be rounded to ten bits (TF32) on a GPU.
    places = places + strength * ((matrix * places[..., None, :]).sum(-1) + SHIFT * shift)  # (B, H, W, 2)
    # `grid_sample` pads with 0, so shift the darkest value to 0.
    pictures = (x - low).reshape(len(x), -1, height, width)
    outside = "reflection" if pictures.shape[1] > 1 else "zeros"
    moved = low + F.grid_sample(pictures, places, padding_mode=outside, align_corners=False).flatten(1)
    return torch.where(uniform[:, None] < DEFORMED, moved.clamp(low, high), x)


def _grey(picture: Tensor) -> Tensor:
    """Convert colours (B, 3, H, W) to grey (B, 1, H, W)."""
    red, green, blue = (picture[:, channel : channel + 1] for channel in range(3))
    return GREY[0] * red + GREY[1] * green + GREY[2] * blue
