"""An estimator that learns in no time, and grey noise to give it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boovae import BooVAE
from boovae.methods import REGISTRY, is_method

Array = NDArray[Any]

QUICK: dict[str, Any] = {
    "epochs": 2,
    "net": "mlp:8",
    "latent_dim": 3,
    "components": 4,
    "samples": 20,
    "random_state": 0,
    "device": "cpu",
    "settings": {"boo_steps": 2, "boo_until": 1, "distill_latents": 5},
}


def quick(**changes: Any) -> BooVAE:
    """Return an estimator with other parameters; of the usual settings it has those that its method reads."""
    method, settings = changes.get("method", "boo+distill"), QUICK["settings"]
    if is_method(method):
        read = {item.name for kind in REGISTRY.sections(method) for item in fields(kind)}
        settings = {name: value for name, value in settings.items() if name in read}
    return BooVAE(**{**QUICK, "settings": settings, **changes})


def grey(seed: int = 0, count: int = 60, shape: tuple[int, ...] = (5, 4)) -> Array:
    return np.random.default_rng(seed).random((count, *shape))
