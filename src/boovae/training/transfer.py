"""A trained model in other hands: on another device, with other settings for its next task, without its last images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from boovae.config import Settings
from boovae.model.priors import VampPrior
from boovae.training.trainer import Trainer


def carry(before: Trainer, trainer: Trainer) -> None:
    """Give a fresh trainer everything that another has learned; its pixels may have a wider range."""
    tensors, record = before.state()
    trainer.load_state({name: tensor.clone() for name, tensor in tensors.items()}, record)
    old, new = before.replicas.model.prior, trainer.replicas.model.prior
    if isinstance(old, VampPrior) and isinstance(new, VampPrior) and before.pixel_range != trainer.pixel_range:
        # They are written as a share of the range: the images must stay where they are.
        logits = trainer.replicas.parameters["prior.logits"]
        logits.copy_(torch.logit(new.share(old.images(logits)), eps=1e-6))


def rebuilt(trainer: Trainer, device: torch.device) -> Trainer:
    """Return the trainer on a device, without the images and the optimiser of its last task."""
    other = Trainer(
        trainer.settings,
        trainer.shape,
        trainer.pixel_range,
        binarize=trainer.binarize,
        device=device,
        compile=trainer.compile,
    )
    carry(trainer, other)
    return other


def packed(trainer: Trainer) -> dict[str, Any]:
    """Return all that lasts of a trainer as plain values and arrays; its step and its graphs do not."""
    tensors, record = trainer.state()
    return {
        "settings": trainer.settings.flat(),
        "shape": trainer.shape,
        "pixel_range": trainer.pixel_range,
        "binarize": trainer.binarize,
        "compile": trainer.compile,
        "tensors": {name: tensor.cpu().numpy() for name, tensor in tensors.items()},
        "record": record,
    }


def unpacked(values: dict[str, Any], device: torch.device) -> Trainer:
    """Return the trainer that `packed` took apart."""
    trainer = Trainer(
        Settings().changed(**values["settings"]),
        values["shape"],
        values["pixel_range"],
        binarize=values["binarize"],
        device=device,
        compile=values["compile"],
    )
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in values["tensors"].items()}
    trainer.load_state(tensors, values["record"])
    return trainer
