"""A map of the latent space after a task: codes of test images and the prior's components in two dimensions."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from boovae.data import Task
from boovae.model.distributions import DiagonalMixture, DiagonalNormal
from boovae.model.priors.boosted import EMPTY, TaskMixture
from boovae.model.priors.flow import Pushed
from boovae.model.vae import VAE
from boovae.replicas.stacked import replica_of
from boovae.training.events import listed
from boovae.training.trainer import Trainer

#: Test images of a task to encode, and to show on the map.
IMAGES, SHOWN = 500, 150
#: Samples of a Gaussian to estimate its moments after a flow.
DRAWN = 200


@torch.no_grad()
def codes(trainer: Trainer, tasks: Sequence[Task | None]) -> dict[int, DiagonalNormal]:
    """Return q(z | x) of some test images of every available task, (R, n, L), by task."""
    found = {}
    for index, task in enumerate(tasks):
        if task is not None:
            images = _spread(task.test.images, IMAGES).to(trainer.device)
            found[index] = trainer.view(index).map(VAE.posterior, images.expand(len(trainer.replicas), -1, -1))
    return found


def _spread(rows: Tensor, count: int) -> Tensor:
    """Return at most `count` rows, evenly spread, because neighbours may share a class."""
    return rows[torch.linspace(0, len(rows) - 1, min(count, len(rows))).round().long()]


def latent_map(trainer: Trainer, posteriors: Mapping[int, DiagonalNormal]) -> dict[str, Any]:
    """Return the first replica's codes and the prior's components in the plane where the codes spread most (PCA).

    The map of a diverged replica is empty.
    """
    means = {task: posterior.mean[0].double().cpu() for task, posterior in posteriors.items()}
    together = torch.cat(list(means.values()))
    if not together.isfinite().all():
        return {"replica": 0, "codes": [], "components": []}
    centre, plane, explained = principal_plane(together)
    shown = {task: _spread((mean - centre) @ plane, SHOWN) for task, mean in means.items()}
    return {
        "replica": 0,
        "explained": listed(explained.numpy()),
        "separate": trainer.method.knows_task,  # every task has its own latent space
        "codes": [{"task": task, "points": _rows(points)} for task, points in shown.items()],
        "components": _components(trainer, centre, plane),
    }


def principal_plane(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return centre (L,), the two main directions (L, 2), and the shares of the variance (2,) they explain.

    If there is only one dimension, the second direction is zero.
    """
    centre = points.mean(0)
    deviations = points - centre
    values, vectors = torch.linalg.eigh(deviations.T @ deviations)
    count = min(2, len(values))
    plane = torch.zeros(points.shape[1], 2, dtype=points.dtype)
    plane[:, :count] = vectors.flip(1)[:, :count]
    largest = plane.gather(0, plane.abs().argmax(0, keepdim=True))
    explained = torch.zeros(2, dtype=points.dtype)
    explained[:count] = values.flip(0)[:count] / values.sum()
    return centre, plane * torch.where(largest < 0, -1.0, 1.0), explained  # makes the sign independent of the solver


def _components(trainer: Trainer, centre: Tensor, plane: Tensor) -> list[dict[str, Any]]:
    """Return position, mass and deviations of the prior's components; a standard normal is one component."""
    prior = trainer.replicas.model.prior
    found = trainer.replicas.call(replica_of(trainer.replicas.tensors(), 0), _gaussians)
    log_weights, mean, log_variance = (part.detach().double().cpu() for part in found)
    places = prior.log_weights.shape[1] if isinstance(prior, TaskMixture) else None
    at = _rows((mean - centre) @ plane)
    deviations = _rows((log_variance.exp() @ plane.square()).sqrt())
    return [
        {
            "task": None if places is None else index // places,
            "mass": float(f"{log_weights[index].exp().item():.4g}"),
            "at": at[index],
            "deviation": deviations[index],
        }
        for index in (log_weights > EMPTY / 2).nonzero().flatten().tolist()
    ]


def _gaussians(model: VAE) -> DiagonalMixture:
    """Return one replica's prior as Gaussians in z; a flow's are approximated by the moments of samples."""
    density = model.prior(model.posterior)
    if isinstance(density, DiagonalMixture):
        return density
    if isinstance(density, Pushed) and isinstance(density.base, DiagonalMixture):
        log_weights, mean, log_variance = density.base
        noise = torch.randn(DRAWN, 1, mean.shape[-1], generator=torch.Generator().manual_seed(0)).to(mean)
        z = density.flow(mean + (0.5 * log_variance).exp() * noise)[0]  # (n, K, L)
        return DiagonalMixture(log_weights, z.mean(0), z.var(0).log())
    return DiagonalMixture(torch.zeros(1), *torch.zeros(2, 1, model.latent_dim))


def _rows(points: Tensor) -> list[list[float | None]]:
    return [listed(row) for row in points.round(decimals=3).numpy()]
