"""`boo`: the boosted prior of BooVAE (Egorov, Kuzina, Burnaev, NeurIPS 2021).

Each task gets up to `components` pseudo-inputs whose encodings, weighted, approximate the task's aggregated posterior,
which is the optimal prior. Learning components (minorisation, `components.py`) and maximising the ELBO alternate, in
one of two ways (`boo_objective`):

- `literal`, `forward`: greedy, as in the paper. The mean image comes first, one learned component is added after every
  epoch until there are K, after 2K epochs the weights are fitted once more and useless components dropped.
- `corrective`: all K components are fitted together, anew after epochs 1, 2, 4, … `boo_until`, because those learned
  early belong to an encoder that has since moved.

Then the prior stands still until the task ends, and its Gaussians are stored; they and the pseudo-inputs are the memory
of the task. With `boo_lambda` above 0 the paper's penalties hold encoder and decoder at old components
(`penalties.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from boovae.boosting.fit import FitSettings, Minorisation, last_fit
from boovae.boosting.losses import dropped, merged
from boovae.boosting.penalties import Penalties, PenaltySettings
from boovae.config import Settings
from boovae.config.section import NotNegative, Section
from boovae.methods.base import TaskImages
from boovae.methods.mixture import MixtureMethod, MixtureSettings
from boovae.model.priors import Prior
from boovae.model.priors.boosted import EMPTY, BoostedPrior
from boovae.replicas.stacked import Replicas


@dataclass(frozen=True)
class BooSettings(Section):
    """The boosted prior: its first component, its memory and its penalties."""

    boo_first: Literal["mean", "learned"] = "mean"
    """One after another: the first component of a task is the mean image, or learned like the others."""
    boo_reencode: bool = False
    """Encode components of finished tasks again, instead of taking their stored Gaussians."""
    boo_lambda: NotNegative = 0.0
    """Weight of the paper's penalties R_enc and R_dec."""
    boo_reduction: Literal["reference", "sum", "mean"] = "reference"
    """How the penalties add up over components (docs/methods/boo.md)."""


class Boo(MixtureMethod):
    """A prior of learned pseudo-inputs that grows by a handful with each task."""

    name = "boo"
    strength_name = "boo_lambda"
    summary = "a prior of a few learned images per task, fitted to the aggregated posterior"
    sections: tuple[type[Section], ...] = (BooSettings, FitSettings, MixtureSettings, PenaltySettings)
    search: Mapping[str, tuple[float, ...]] = MappingProxyType({"boo_lambda": (0.1, 0.3, 1.0, 3.0, 10.0)})

    #: What learns the components, and what makes the prior.
    minorises: type[Minorisation] = Minorisation
    prior_of: Callable[..., Prior] = staticmethod(BoostedPrior)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.own, self.fitting = settings.of(BooSettings), settings.of(FitSettings)
        self.reencodes = self.own.boo_reencode
        self.greedy = self.fitting.boo_objective != "corrective"
        self.first_eligible = 2 * settings.model.components if self.greedy else self.mixture.boo_until
        self.penalties = Penalties(settings, on=self.own.boo_lambda > 0, reduction=self.own.boo_reduction)
        self.settled_by = 2 if self.penalties.on else 1

    def make_prior(self, pixels: int, pixel_range: tuple[float, float]) -> Prior | None:
        """Return a prior with room for the tasks seen."""
        settings = self.settings
        self.minorisation = self.minorises(settings, pixel_range)
        sizes = self.tasks_seen, settings.model.components, pixels, settings.model.latent_dim
        return self.prior_of(*sizes, elbo=self.mixture.boo_elbo, reencode=self.own.boo_reencode)

    # --- the life of a task -------------------------------------------------------------------------------------

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Make room for the task's components and place the first, or all of them."""
        self.open_row(replicas, task)
        buffers = replicas.buffers
        if not self.greedy:
            self._fit(replicas, task, epoch=0)
        elif self.own.boo_first == "mean":
            images = self.minorisation.codes(replicas, task, ("boo", task.index, "first"))[0]
            buffers["prior.live_inputs"][:, 0] = images.mean(1)
            buffers["prior.live_log_weights"][:, 0] = 0.0
        else:
            self._grow(replicas, task, slot=0)

    def after_epoch(self, replicas: Replicas, task: TaskImages, epoch: int) -> None:
        """Add a component and later step back (greedy), or fit all again at ever longer intervals (corrective)."""
        done = epoch + 1
        if not self.greedy:
            if self.fits_after(epoch):
                self._fit(replicas, task, done)
        elif done < self.settings.model.components:
            self._grow(replicas, task, done)
        elif done == 2 * self.settings.model.components and self.fitting.boo_prune > 0:
            self.minorisation.step_back(replicas, task)

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Drop duplicates and components without weight; store the Gaussians of the others."""
        buffers = replicas.buffers
        with torch.no_grad():
            parts = self.minorisation.encoded(replicas, buffers["prior.live_inputs"])
            before = buffers["prior.live_log_weights"].clone()
            log_weights = vmap(merged)(parts, before)
            twins = (log_weights <= EMPTY / 2) & (before > EMPTY / 2)
            log_weights = vmap(functools.partial(dropped, threshold=self.fitting.boo_prune))(log_weights)
        row = {
            "pseudo_inputs": buffers["prior.live_inputs"],
            "mean": parts.mean,
            "log_variance": parts.log_variance,
            "log_weights": log_weights,
        }
        self.store_row(replicas, task, row)
        kept = (log_weights > EMPTY / 2).sum(1)
        self.log({"event": "components", "task": task.index, "kept": kept.tolist(), "twins": twins.sum(1).tolist()})

    def _fit(self, replicas: Replicas, task: TaskImages, epoch: int) -> None:
        last = epoch == last_fit(self.mixture.boo_until, self.settings.training.epochs)
        curve = self.minorisation.fit(replicas, task, epoch, last=last)
        if curve is not None:
            self._log_divergence(task, epoch, list(range(1, len(curve) + 1)), curve)

    def _grow(self, replicas: Replicas, task: TaskImages, slot: int) -> None:
        divergence = self.minorisation.grow(replicas, task, slot)
        self._log_divergence(task, slot, [slot + 1], divergence.unsqueeze(0))

    def _log_divergence(self, task: TaskImages, epoch: int, sizes: list[int], divergence: Tensor) -> None:
        """Log −E_q̂[log m] (sizes, R), the divergence to the aggregated posterior up to a constant."""
        rows = [[value if math.isfinite(value) else None for value in row] for row in divergence.tolist()]
        self.log({"event": "components", "task": task.index, "epoch": epoch, "sizes": sizes, "divergence": rows})
