"""Colour pictures of a circle, a square, a triangle or a cross: small data that nobody tuned for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHAPES = ("circle", "square", "triangle", "cross")


def shapes(name: str, count: int, seed: int, height: int = 48, width: int = 64) -> NDArray[np.uint8]:
    """Return pictures (count, height, width, 3) of one shape, of random place, size and colours, with some noise."""
    rng = np.random.default_rng([seed, SHAPES.index(name)])
    y, x = np.mgrid[:height, :width].astype(float)
    pictures = np.empty((count, height, width, 3), np.uint8)
    for picture in pictures:
        radius = rng.uniform(0.2, 0.34) * min(height, width)
        dy, dx = y - rng.uniform(radius, height - radius), x - rng.uniform(radius, width - radius)
        inside = {
            "circle": dy**2 + dx**2 < radius**2,
            "square": np.maximum(abs(dy), abs(dx)) < 0.85 * radius,
            "triangle": (dy < 0.8 * radius) & (dy > 2 * abs(dx) - radius),
            "cross": (np.minimum(abs(dy), abs(dx)) < 0.3 * radius) & (np.maximum(abs(dy), abs(dx)) < radius),
        }[name]
        shade, ground = rng.uniform(0.5, 1.0, 3), rng.uniform(0.0, 0.35, 3)
        clean = np.where(inside[..., None], shade, ground)
        picture[:] = np.clip(255 * (clean + rng.normal(0, 0.02, clean.shape)), 0, 255)
    return pictures
