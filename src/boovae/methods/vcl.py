"""`vcl`: variational continual learning (Nguyen, Li, Bui and Turner, 2018), without a coreset.

Every weight and bias of encoder and decoder has a Gaussian of its own (`bayes.py`). The posterior over weights that a
task ends with is the prior of the next task, N(0, 1) that of the first:

    loss = ELBO with noisy weights + w / n_t · Σ_i KL[N(μ_i, σ_i²) ‖ N(μ_i', σ_i'²)],

n_t the images of the task, because the loss is the mean over images and the divergence belongs to the whole set. Outputs
of the layers are drawn, not weights (local reparameterisation). Everything but the ELBO in training uses the means. The
previous posterior is what the network holds when a task begins, so nothing is stored besides the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

from boovae.bayes import bayesian_layers, make_bayesian, noisy, output_shapes
from boovae.config import Settings
from boovae.distributions import DiagonalNormal
from boovae.methods.base import Method, TaskImages
from boovae.nets import Nets
from boovae.training.engine import Batch
from boovae.training.randomness import Draw
from boovae.training.replicas import Replicas
from boovae.vae import VAE


class VCL(Method):
    """Gaussian weights, held to the posterior that the previous task left."""

    name = "vcl"
    summary = "Gaussian weights; the posterior that one task leaves is the prior of the next"
    clashes = MappingProxyType(
        {
            "ewc": "both hold the weights to where they were, vcl by their own variances",
            "si": "both hold the weights to where they were, vcl by their own variances",
        }
    )

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._shapes: dict[str, tuple[int, ...]] = {}  # what each Bayesian layer makes of one image
        self._previous: dict[str, Tensor] = {}

    def adapt(self, nets: Nets) -> Nets:
        """Make the weights Gaussian, except those that belong to one task alone."""
        make_bayesian(nn.ModuleDict(nets._asdict()), self.settings.vcl_log_variance, skip=self.private)
        return nets

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Take the weights as they are as the prior of the task; the first has N(0, 1)."""
        model = replicas.model
        image = torch.zeros(1, task.train.shape[-1], device=replicas.device)
        latent = torch.zeros(1, self.settings.latent_dim, device=replicas.device)
        self._shapes = {
            f"{name}.{layer}" if layer else name: shape
            for name, net, x in (("encoder", model.encoder, image), ("decoder", model.decoder, latent))
            for layer, shape in output_shapes(net, x).items()
        }
        names = [f"{name}.{part}" for name, layer in bayesian_layers(model).items() for part in layer.gaussians()]
        whole = [name + suffix for name in names for suffix in ("", "_log_variance")]
        first = self.tasks_seen < 2
        self._previous = {
            name: torch.zeros_like(tensor) if first else tensor.clone()
            for name, tensor in replicas.parameters.items()
            if name in set(whole)
        }
        weight = self.settings.vcl_weight / task.own_images
        self._previous["weight"] = torch.full((len(replicas),), weight, device=replicas.device)

    def training_draws(self, batch_size: int) -> dict[str, Draw]:
        """Return the noise of every Bayesian layer's outputs."""
        return {name: Draw("normal", (batch_size, *shape)) for name, shape in self._shapes.items()}

    @contextmanager
    def perturbed(self, model: VAE, batch: Batch) -> Iterator[None]:
        """Let the layers use the noise, where there is some."""
        with noisy(model, batch):
            yield

    def state(self) -> dict[str, Tensor]:
        """Return the previous posterior, and the weight of the divergence to it."""
        return self._previous

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return the divergence of the weights to the previous posterior, per image."""
        previous = batch["state"]
        total = sum(
            now.kl(DiagonalNormal(previous[f"{name}.{part}"], previous[f"{name}.{part}_log_variance"])).sum()
            for name, layer in bayesian_layers(model).items()
            for part, now in layer.gaussians().items()
        )
        return {"weights": previous["weight"] * total}
