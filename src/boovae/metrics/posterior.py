"""How the encoder's posteriors fare, task by task: what tells of a collapse, or of variances that run away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from boovae.model.distributions import DiagonalNormal
from boovae.model.vae import VAE
from boovae.training.events import listed

if TYPE_CHECKING:
    from boovae.data import Task
    from boovae.training.trainer import Trainer

#: A latent dimension is active if the variance of its means over the images is larger (Burda et al., 2016).
ACTIVE = 0.01
#: Test images of a task that are looked at.
IMAGES = 1000
#: How near to its limit a log-variance counts as being there.
NEAR = 1e-3


@torch.no_grad()
def posterior_health(trainer: Trainer, tasks: Sequence[Task | None]) -> dict[str, Any]:
    """Return for each task and replica the active latent dimensions, and the share of log-variances at their limit.

    None stands for a task whose images are not at hand.
    """
    upper = trainer.settings.model.log_variance_range[1]
    active: list[list[float | None]] = []
    at_limit: list[list[float | None]] = []
    for index, task in enumerate(tasks):
        if task is None:
            nothing: list[float | None] = [None] * len(trainer.replicas)
            active.append(nothing)
            at_limit.append(nothing)
            continue
        view = trainer.view(index)
        images = task.test.images[:IMAGES].to(trainer.device).expand(len(view), -1, -1)
        posterior: DiagonalNormal = view.map(VAE.posterior, images)
        moving = posterior.mean.double().var(1, correction=0) > ACTIVE
        active.append(listed(moving.sum(1).double().cpu().numpy()))
        high = (posterior.log_variance > upper - NEAR).double().mean((1, 2))
        at_limit.append(listed(high.cpu().numpy()))
    return {"active_units": active, "at_upper_limit": at_limit}
