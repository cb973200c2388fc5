"""Copy a trained model: to another device, to other settings for its next task, or to plain values."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from boovae.config import Settings
from boovae.data import ImageSpec
from boovae.model.priors import VampPrior
from boovae.training.trainer import Trainer


def copy_learned(source: Trainer, target: Trainer) -> None:
    """Copy everything learned to a new trainer, whose pixel range may be wider."""
    tensors, record = source.state()
    target.load_state({name: tensor.clone() for name, tensor in tensors.items()}, record)
    old, new = source.replicas.model.prior, target.replicas.model.prior
    if isinstance(old, VampPrior) and isinstance(new, VampPrior) and source.spec.pixel_range != target.spec.pixel_range:
        # Logits are relative to the range: convert them so that the images stay the same.
        logits = target.replicas.parameters["prior.logits"]
        logits.copy_(torch.logit(new.share(old.images(logits)), eps=1e-6))


def copied_to(trainer: Trainer, device: torch.device) -> Trainer:
    """Return a copy of the trainer on a device, without the images and the optimiser of its last task."""
    other = Trainer(trainer.settings, trainer.spec, device=device, compile=trainer.compile)
    copy_learned(trainer, other)
    return other


def to_plain(trainer: Trainer) -> dict[str, Any]:
    """Return the state of a trainer as plain values and arrays, without its compiled step and graphs."""
    tensors, record = trainer.state()
    return {
        "settings": trainer.settings.flat(),
        "chosen": trainer.settings.chosen,
        **asdict(trainer.spec),
        "compile": trainer.compile,
        "tensors": {name: tensor.cpu().numpy() for name, tensor in tensors.items()},
        "record": record,
    }


def from_plain(values: dict[str, Any], device: torch.device) -> Trainer:
    """Rebuild a trainer from the result of `to_plain`."""
    spec = ImageSpec(values["shape"], values["pixel_range"], values["binarize"])
    settings = Settings(chosen=values["chosen"]).changed(**values["settings"])
    trainer = Trainer(settings, spec, device=device, compile=values["compile"])
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in values["tensors"].items()}
    trainer.load_state(tensors, values["record"])
    return trainer
