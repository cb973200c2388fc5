"""Colour jitter: against Pillow's own enhancements, one image at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torch.func import vmap

from boovae.augment import colour_jitter

SHAPE = (3, 6, 5)


def images(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 90), generator=generator) / 127.5 - 1


def test_equals_pillow_up_to_its_rounding() -> None:
    x = images(40)
    uniform = torch.rand(40, 3, generator=torch.Generator().manual_seed(1))
    got = (colour_jitter(x, uniform, 0.3, SHAPE, (-1.0, 1.0)) + 1) * 127.5
    for before, draw, after in zip(x, uniform.tolist(), got, strict=True):
        pixels = ((before + 1) * 127.5).round().reshape(SHAPE).permute(1, 2, 0).numpy().astype(np.uint8)
        picture = Image.fromarray(pixels)
        enhancements = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for enhance, share in zip(enhancements, draw, strict=True):
            picture = enhance(picture).enhance(1 + 0.3 * (2 * share - 1))
        wanted = np.asarray(picture, np.float64).transpose(2, 0, 1).ravel()
        np.testing.assert_allclose(after.numpy(), wanted, atol=4)  # Pillow rounds after each step


def test_the_middle_of_the_draw_changes_nothing_and_pixels_stay_in_range() -> None:
    x = images(8)
    torch.testing.assert_close(colour_jitter(x, torch.full((8, 3), 0.5), 0.1, SHAPE, (-1.0, 1.0)), x)
    wild = colour_jitter(x, torch.rand(8, 3), 0.9, SHAPE, (-1.0, 1.0))
    assert wild.min() >= -1
    assert wild.max() <= 1
    assert not torch.equal(wild, x)


@pytest.mark.parametrize("pixel_range", [(0.0, 1.0), (-1.0, 1.0)])
def test_each_image_has_its_own_factors_and_replicas_their_own_draws(pixel_range: tuple[float, float]) -> None:
    low, high = pixel_range
    x = (images(4) + 1) / 2 * (high - low) + low
    uniform = torch.rand(2, 4, 3)
    both = vmap(lambda u: colour_jitter(x, u, 0.2, SHAPE, pixel_range))(uniform)
    for replica in range(2):
        for row in range(4):
            one = colour_jitter(x[row : row + 1], uniform[replica, row : row + 1], 0.2, SHAPE, pixel_range)
            torch.testing.assert_close(both[replica, row], one[0])
