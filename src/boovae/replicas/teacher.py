"""Regularise a network towards its past: a frozen copy of it, and the ELBO of old images."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from boovae.model.vae import VAE, Bound
from boovae.replicas.stacked import Replicas, Result


class Teacher:
    """A frozen copy of the parameters, including the prior's, from before the task.

    Of the buffers only the networks' are copied (statistics of batch normalisation): what priors store of finished
    tasks does not change while a task is learned.
    """

    def freeze(self, replicas: Replicas, part: str = "") -> dict[str, Tensor]:
        """Return a copy of all parameters, or of those whose names start with `part`, for `answer`."""
        self._replicas = replicas
        learned = replicas.parameters | replicas.network_buffers
        return {name: tensor.clone() for name, tensor in learned.items() if name.startswith(part)}

    def answer(self, model: VAE, state: dict[str, Tensor], function: Callable[..., Result], *arguments: Any) -> Result:
        """Return `function(teacher, *arguments)` of one replica, without gradient; `model` is the current one."""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        tensors |= {name: tensor for name, tensor in state.items() if name in tensors}
        with torch.no_grad():
            return self._replicas.call(tensors, function, *arguments)


def bound_before(model: VAE, x: Tensor, noise: Tensor) -> Bound:
    """Return the negative ELBO of images (n, D) of earlier tasks under the prior of these tasks; `noise` (n, L).

    If a prior has components per task, images of earlier tasks belong to those components, and the ones in training
    must not move towards them; other priors are shared by all tasks.
    """
    posterior = model.posterior(x)
    return model.bound_at(x, posterior, posterior.rsample(noise), model.prior.before(model.posterior))
