"""A variational autoencoder that keeps learning: one task after another, without keeping old data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boovae.data import Stream, Task
    from boovae.estimator.boovae import BooVAE
    from boovae.methods import Method
    from boovae.model.priors import Prior
    from boovae.model.vae import VAE
    from boovae.training.trainer import Trainer

__version__ = "0.1.0"

#: The modules of the public names, which are imported on first use, so that `import boovae` stays fast.
_HOMES = {
    "BooVAE": "boovae.estimator.boovae",
    "Method": "boovae.methods",
    "Prior": "boovae.model.priors",
    "Stream": "boovae.data",
    "Task": "boovae.data",
    "Trainer": "boovae.training.trainer",
    "VAE": "boovae.model.vae",
}

__all__ = ["VAE", "BooVAE", "Method", "Prior", "Stream", "Task", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'boovae' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
