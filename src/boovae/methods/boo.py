"""`boo`: the boosted prior of BooVAE (Egorov, Kuzina, Burnaev, 2021), in its fully corrective form.

Each task gets `components` pseudo-inputs whose encodings, weighted, approximate the task's aggregated posterior, which
is the optimal prior. Fitting and training alternate: after the epochs 1, 2, 4, 8, … up to `boo_until` the pseudo-inputs
and weights are fitted anew to the encoder as it has become (`boosting.py`); after that the prior stands still until the
task ends. Then its Gaussians are stored; they and the pseudo-inputs are the only memory of the task.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from boovae.boosting import cluster_images, fit_components
from boovae.config import Settings
from boovae.methods.base import Method, TaskImages
from boovae.priors import Prior
from boovae.priors.boosted import BoostedPrior
from boovae.training.randomness import Draw, Generators
from boovae.training.replicas import Replicas

#: Images whose codes stand for the aggregated posterior.
SUBSET = 1000
MEMORY = ("pseudo_inputs", "mean", "log_variance", "log_weights", "log_masses")


class Boo(Method):
    """A prior of learned pseudo-inputs that grows by a handful with each task."""

    name = "boo"
    summary = "a prior of a few learned images per task, fitted to the aggregated posterior"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.first_eligible = settings.boo_until
        self._memory: dict[str, Tensor] = {}

    def make_prior(self, pixels: int, pixel_range: tuple[float, float]) -> Prior | None:
        """Return a prior with room for the tasks seen."""
        self._box = pixel_range
        return BoostedPrior(max(self.tasks_seen, 1), self.settings.components, pixels, self.settings.latent_dim)

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Make room for the task's components and place them."""
        replicas.rebuild()
        for name, tensor in self._memory.items():
            replicas.buffers[f"prior.{name}"][:, : tensor.shape[1]] = tensor
        sizes = torch.tensor([*task.sizes_before, task.own_images], dtype=torch.float32, device=replicas.device)
        replicas.buffers["prior.log_masses"][:] = (sizes / sizes.sum()).log()
        _prior(replicas).live = True
        self._fit(replicas, task, epoch=0)

    def after_epoch(self, replicas: Replicas, task: TaskImages, epoch: int) -> None:
        """Fit the components again at ever longer intervals, while the encoder settles."""
        done = epoch + 1
        if done <= self.settings.boo_until and done & (done - 1) == 0:
            self._fit(replicas, task, done)

    def _fit(self, replicas: Replicas, task: TaskImages, epoch: int) -> None:
        """Place the pseudo-inputs at the mean images of latent clusters and fit them to the aggregated posterior."""
        settings = self.settings
        generators = Generators(replicas.seeds, replicas.device)
        key = ("boo", task.index, epoch)
        count = min(SUBSET, task.train.shape[-2])
        if settings.components > count:
            count = task.train.shape[-2]
        chosen = generators.order(task.train.shape[-2], *key)[:, :count]
        images = (
            task.train[chosen]
            if task.train.dim() == 2
            else torch.stack([own[index] for own, index in zip(task.train, chosen, strict=True)])
        )
        noise = generators.draw(Draw("normal", (count, settings.latent_dim)), *key, "codes")
        uniform = generators.draw(Draw("uniform", (settings.components,)), *key, "centres")
        with torch.no_grad():
            posterior = replicas.map(lambda model, x: model.posterior(x), images)
            z = posterior.rsample(noise)
            starts = [cluster_images(*row) for row in zip(posterior.mean, images, uniform, strict=True)]
            pseudo_inputs, shares = (torch.stack(parts) for parts in zip(*starts, strict=True))
            fitted = fit_components(
                replicas,
                pseudo_inputs,
                shares.clamp(min=1e-3).log(),
                z,
                steps=settings.boo_steps,
                rate=settings.boo_rate,
                box=self._box,
            )
        replicas.buffers["prior.pseudo_inputs"][:, -1] = fitted[0]
        replicas.buffers["prior.log_weights"][:, -1] = fitted[1]

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Store the Gaussians of the task's components; drop those without weight."""
        buffers = replicas.buffers
        log_weights = buffers["prior.log_weights"][:, -1]
        small = log_weights < math.log(self.settings.boo_prune)
        log_weights.copy_(torch.log_softmax(log_weights.masked_fill(small, -1e4), dim=-1).clamp(min=-1e4))
        with torch.no_grad():
            stored = replicas.map(lambda model: model.posterior(model.prior.pseudo_inputs[-1]))
        buffers["prior.mean"][:, -1] = stored.mean
        buffers["prior.log_variance"][:, -1] = stored.log_variance
        _prior(replicas).live = False
        self._memory = {name: buffers[f"prior.{name}"].clone() for name in MEMORY}

    def memory(self) -> dict[str, Tensor]:
        """Return pseudo-inputs, stored Gaussians and weights of all finished tasks."""
        return self._memory

    def load_memory(self, memory: dict[str, Tensor]) -> None:
        """Take them back."""
        self._memory = dict(memory)


def _prior(replicas: Replicas) -> BoostedPrior:
    prior = replicas.model.prior
    assert isinstance(prior, BoostedPrior)
    return prior
