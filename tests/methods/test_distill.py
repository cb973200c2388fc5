"""Distillation: at which latents the network is held, and to what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from boovae.data import Stream
from boovae.methods.distill import DistillSettings
from boovae.model.distributions import DiagonalNormal
from boovae.model.vae import VAE
from boovae.training.trainer import Trainer
from conftest import begun, step, tiny, trained

#: Priors that learn, so that those before the task and now differ.
PRIORS: dict[str, dict[str, Any]] = {
    "pseudo-inputs": {"method": "distill", "prior": "vamp"},
    "encoded anew": {"method": "boo+distill", "boo_reencode": True},
    "flow": {"method": "boo-flow+distill", "flow_layers": 2, "flow_width": 8},
}


@pytest.mark.parametrize("prior", PRIORS)
def test_latents_are_those_of_the_prior_before_the_task(prior: str, digits: Stream) -> None:
    settings = tiny(tasks=1, **PRIORS[prior])
    trainer, old = trained(settings, digits), Trainer(settings, digits.spec)
    old.load_state(*trainer.state())
    begun(trainer, digits[1])
    torch.manual_seed(0)
    for tensor in trainer.replicas.parameters.values():  # the model has learned something since
        tensor.add_(0.1 * torch.randn_like(tensor))
    batch, part = step(trainer, digits[1].train.images[:8]), "distill." if "+" in settings.method else ""

    def before(model: VAE, uniform: Tensor, normal: Tensor) -> tuple[Tensor, Tensor, Tensor, DiagonalNormal]:
        z = model.prior.forward(model.posterior).sample(uniform, normal)
        return z, model.decode(z), model.images(z), model.posterior(model.images(z))

    def now(model: VAE, z: Tensor, output: Tensor, images: Tensor, posterior: DiagonalNormal) -> dict[str, Tensor]:
        return {
            f"{part}decoder": model.likelihood.divergence(output, model.decode(z)).mean(),
            f"{part}encoder": posterior.symmetric_kl(model.posterior(images)).mean(),
        }

    answers = old.replicas.map(before, batch[f"{part}uniform"], batch[f"{part}normal"])
    weight = settings.of(DistillSettings).distill_weight * len(digits[0].train.images) / len(digits[1].train.images)
    terms = trainer.replicas.map(trainer.objective, batch).terms
    for name, divergence in trainer.replicas.map(now, *answers).items():
        torch.testing.assert_close(terms[name], weight * divergence)
