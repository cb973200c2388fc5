"""A model of twelve pixels and three latent dimensions, and random images for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from boovae.config import Settings
from boovae.data import ImageSpec, Split, Task
from boovae.training.trainer import Trainer

PIXELS, LATENT = 12, 3
SETTINGS: dict[str, Any] = {
    "method": "standard",
    "net": "mlp:16",
    "latent_dim": LATENT,
    "batch_size": 8,
    "learning_rate": 1e-2,
    "schedule": "plateau",
}


def make_trainer(replicas: int = 1, binarize: str = "none", seed: int = 3, **changes: Any) -> Trainer:
    """Return a trainer that has learned nothing yet."""
    settings = Settings().changed(replicas=replicas, seed=seed, **{**SETTINGS, **changes})
    return Trainer(settings, ImageSpec((PIXELS,), binarize=binarize))


def random_images(*shape: int, seed: int = 0) -> Tensor:
    """Return so many images, (..., D), the same for the same seed."""
    return torch.rand(*shape, PIXELS, generator=torch.Generator().manual_seed(seed))


def make_task(train: Tensor, valid: Tensor) -> Task:
    """Return a task of these images (N, D)."""

    def split(images: Tensor) -> Split:
        return Split(images, torch.zeros(len(images), dtype=torch.int64))

    return Task("only", split(train), split(valid), split(valid), (0,))
