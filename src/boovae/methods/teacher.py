"""What methods share that go through the past again: a frozen copy of the model, and the ELBO of old images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from boovae.distributions import StandardNormal
from boovae.methods.base import TaskImages
from boovae.training.replicas import Replicas
from boovae.vae import VAE, Bound


class Teacher:
    """All parameters, the prior's too, as they were before the task, and how much the past counts.

    Of the buffers only the networks' are copied (statistics of batch normalisation): what priors store of finished
    tasks stays as it is while a task is learned.
    """

    def __init__(self) -> None:
        #: What the loss reads, {name: (R, ...)}; empty while there is no past.
        self.state: dict[str, Tensor] = {}

    def freeze(self, replicas: Replicas, task: TaskImages, weight: Tensor) -> None:
        """Take a copy; `weight` (R,) is scaled by (images before / images now)."""
        self._replicas = replicas
        statistics = {name: tensor for name, tensor in replicas.buffers.items() if not name.startswith("prior.")}
        self.state = {name: tensor.clone() for name, tensor in (replicas.parameters | statistics).items()}
        self.state["weight"] = weight * (task.images_before / task.own_images)

    def answer(self, model: VAE, state: dict[str, Tensor], function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(teacher, *arguments)` of one replica, without gradient; `model` is the current one."""
        frozen = {name: tensor for name, tensor in state.items() if name != "weight"}
        with torch.no_grad():
            return self._replicas.call({**dict(model.named_buffers()), **frozen}, function, *arguments)


def bound_before(model: VAE, x: Tensor, noise: Tensor) -> Bound:
    """Return the negative ELBO of images (n, D) of earlier tasks under the prior of these tasks; `noise` (n, L).

    Where a prior has components for each task, images of earlier tasks belong to those components and the ones in
    training must not move towards them; other priors are one for all tasks.
    """
    posterior = model.posterior(x)
    z = posterior.rsample(noise)
    reconstruction = -model.likelihood.log_prob(model.decode(z), x)
    prior = model.prior.before(model.posterior)
    if isinstance(prior, StandardNormal):
        return Bound(reconstruction, posterior.kl_to_standard())
    return Bound(reconstruction, posterior.log_prob(z) - prior.log_prob(z))
