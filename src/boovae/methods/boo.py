"""`boo`: the boosted prior of BooVAE (Egorov, Kuzina, Burnaev, NeurIPS 2021).

Each task gets up to `components` pseudo-inputs whose encodings, weighted, approximate the task's aggregated posterior,
which is the optimal prior. Learning components (minorisation, `boosting/`) alternates with maximising the ELBO, in one
of two ways (`boo_objective`):

- `literal`, `forward`: greedy, as in the paper. The mean image comes first; after every epoch a learned component is
  added until there are K; after 2K epochs the weights are fitted once more and useless components dropped.
- `corrective`: all K components are fitted together, again after epochs 1, 2, 4, … `boo_until`, because those learned
  early belong to an encoder that has changed since.

Then the prior is fixed until the task ends, and its Gaussians are stored; they and the pseudo-inputs are the memory of
the task. With `boo_lambda` above 0 the paper's penalties keep encoder and decoder from changing at old components
(`boosting/penalties.py`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from boovae.boosting.fit import STRATEGIES, FitSettings, Fitted, MixtureSettings
from boovae.boosting.penalties import Penalties, PenaltySettings
from boovae.config import Settings
from boovae.config.section import NotNegative, Section
from boovae.methods.method import TaskImages
from boovae.methods.mixture import ROW, MixtureMethod
from boovae.model import Prior
from boovae.model.priors.boosted import EMPTY, BoostedPrior
from boovae.replicas import Replicas


@dataclass(frozen=True)
class BooSettings(Section):
    """The boosted prior: its memory and its penalties."""

    boo_reencode: bool = False
    """Re-encode components of finished tasks instead of using their stored Gaussians."""
    boo_lambda: NotNegative = 0.0
    """Weight of the paper's penalties R_enc and R_dec."""
    boo_reduction: Literal["reference", "sum", "mean"] = "reference"
    """How the penalties are summed over components (docs/methods/boo.md)."""


class Boo(MixtureMethod):
    """A prior of learned pseudo-inputs that gains a few with each task."""

    name = "boo"
    strength_name = "boo_lambda"
    summary = "a prior of a few learned images per task, fitted to the aggregated posterior"
    sections: tuple[type[Section], ...] = (BooSettings, FitSettings, MixtureSettings, PenaltySettings)
    search: Mapping[str, tuple[float, ...]] = MappingProxyType({"boo_lambda": (0.1, 0.3, 1.0, 3.0, 10.0)})

    own: BooSettings
    #: Makes the prior.
    prior_of: Callable[..., Prior] = staticmethod(BoostedPrior)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.fitting = settings.of(FitSettings)
        self.reencodes = self.own.boo_reencode
        corrective = self.fitting.boo_objective == "corrective"
        self.first_eligible = self.mixture.boo_until if corrective else 2 * settings.model.components
        self.penalties = Penalties(settings, on=self.own.boo_lambda > 0, reduction=self.own.boo_reduction)
        self.settled_by = 2 if self.penalties.on else 1

    def make_prior(self, pixels: int, pixel_range: tuple[float, float]) -> Prior | None:
        """Return a prior with capacity for the tasks seen."""
        settings = self.settings
        sizes = self.tasks_seen, settings.model.components, pixels, settings.model.latent_dim
        return self.prior_of(*sizes, elbo=self.mixture.boo_elbo, reencode=self.own.boo_reencode)

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Open the task's row of components and place the first, or all of them."""
        self.open_row(replicas, task)
        strategy = STRATEGIES[self.fitting.boo_objective]
        self.boosting = strategy(self.settings, replicas, task.train, task.index, task.pixel_range)
        self._log(task, self.boosting.begin())

    def after_epoch(self, replicas: Replicas, task: TaskImages, epoch: int) -> None:
        """Add, refit or drop components."""
        self._log(task, self.boosting.after_epoch(epoch + 1))

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Drop duplicates and components without weight; store the Gaussians of the rest."""
        parts, log_weights, twins = self.boosting.finish()
        row = (self.boosting.inputs, parts.mean, parts.log_variance, log_weights)
        self.store_row(replicas, task, dict(zip(ROW, row, strict=True)))
        kept = (log_weights > EMPTY / 2).sum(1)
        self.log({"event": "components", "task": task.index, "kept": kept.tolist(), "twins": twins.sum(1).tolist()})

    def _log(self, task: TaskImages, fitted: Fitted | None) -> None:
        """Log the divergence to the aggregated posterior, up to a constant."""
        if fitted is not None:
            rows = [[value if math.isfinite(value) else None for value in row] for row in fitted.divergence.tolist()]
            event = {"event": "components", "task": task.index, "epoch": fitted.epoch, "sizes": fitted.sizes}
            self.log({**event, "divergence": rows})
