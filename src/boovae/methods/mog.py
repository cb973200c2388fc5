"""`mog`: a mixture of free Gaussians per task in latent space, the paper's comparison for `boo` (its section 5).

Each task gets `components` diagonal Gaussians that learn with the networks. When the task ends, they are stored with
the decoded images of their means, and the two penalties of `boosting/penalties.py` keep decoder and encoder from
changing there, as a weighted mean over the components:

    mog_lambda . ( R_enc + R_dec ),  R_enc = Σ_c w_c KL_sym[ q(z | x_c), N(M_c, V_c) ],  x_c the image of M_c.

They are trained by the ELBO's gradient, and with `mog_fit em` they are also fitted to samples of the aggregated
posterior by expectation maximisation: at the start, after epochs 1, 2, 4, … `boo_until`, and once more when the task
ends. With `mog_fit gradient` they start at random, as in the paper, and most of those of later tasks get no image:
nothing pulls them towards the codes, and their samples show an old task or nothing.

Deviations from the released code: components accumulate over tasks, masses follow the tasks' numbers of
images, the penalties are symmetric and not divided by the latent dimension.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from boovae.boosting.fit import MixtureSettings, codes_of, refits
from boovae.boosting.penalties import Penalties, PenaltySettings
from boovae.config import Settings
from boovae.config.section import NotNegative, Section
from boovae.methods.method import TaskImages
from boovae.methods.mixture import MixtureMethod
from boovae.model import VAE, DiagonalMixture, FreeMixture, Prior
from boovae.replicas import Draw, Replicas

#: Initial components: standard deviation of the means, and log-variance.
START_DEVIATION, START_LOG_VARIANCE = 0.5, -2.0
#: Number of EM iterations, and the minimum variance.
EM_STEPS, LEAST_VARIANCE = 50, 1e-3


@dataclass(frozen=True)
class MoGSettings(Section):
    """Free Gaussians per task."""

    mog_lambda: NotNegative = 1.0
    """Weight of the two penalties on changes of old components."""
    mog_fit: Literal["gradient", "em"] = "em"
    """Learn components by the ELBO's gradient, or fit them to the codes by EM."""


class MoG(MixtureMethod):
    """A prior of free Gaussians that gains a few with each task."""

    name = "mog"
    strength_name = "mog_lambda"
    summary = "a mixture of free Gaussians per task in latent space, preserved by the paper's two penalties"
    sections = (MoGSettings, MixtureSettings, PenaltySettings)
    search = MappingProxyType({"mog_lambda": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)})

    own: MoGSettings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.penalties = Penalties(settings, on=self.own.mog_lambda > 0, reduction="mean")
        self.settled_by = 2 if self.penalties.on else 1
        self.first_eligible = self.mixture.boo_until if self.own.mog_fit == "em" else 0

    def make_prior(self, pixels: int, pixel_range: tuple[float, float]) -> Prior | None:
        """Return a prior with capacity for the tasks seen."""
        model = self.settings.model
        return FreeMixture(self.tasks_seen, model.components, pixels, model.latent_dim, elbo=self.mixture.boo_elbo)

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Place the task's Gaussians at random, or fit them to the codes."""
        self.open_row(replicas, task)
        draw = Draw("normal", (self.settings.model.components, self.settings.model.latent_dim))
        noise = replicas.generators.draw(draw, "mog", task.index)
        log_weights, mean, log_variance = live(replicas)
        mean.copy_(START_DEVIATION * noise)
        log_variance.fill_(START_LOG_VARIANCE)
        log_weights.fill_(-math.log(self.settings.model.components))
        if self.own.mog_fit == "em":
            self._place(replicas, task)
            self._fit(replicas, task, epoch=0)

    def after_epoch(self, replicas: Replicas, task: TaskImages, epoch: int) -> None:
        """Fit again by EM, at increasing intervals."""
        if self.own.mog_fit == "em" and refits(epoch + 1, self.mixture.boo_until):
            self._fit(replicas, task, epoch + 1)

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Store the Gaussians and the images of their means."""
        if self.own.mog_fit == "em":
            self._fit(replicas, task, epoch=-1)
        parts = live(replicas)
        with torch.no_grad():
            images = replicas.map(VAE.images, parts.mean)
        self.store_row(replicas, task, {"pseudo_inputs": images, **parts._asdict()})

    def _place(self, replicas: Replicas, task: TaskImages) -> None:
        """Set the means to random codes of the task."""
        z = self._codes(replicas, task, "place")
        count = self.settings.model.components
        copies = z.repeat(1, -(-count // z.shape[1]), 1)  # a task may have fewer images than components
        spread = z.var(1, correction=min(1, z.shape[1] - 1), keepdim=True).clamp(min=LEAST_VARIANCE).log()
        _, mean, log_variance = live(replicas)
        mean.copy_(copies[:, :count])
        log_variance.copy_(spread.expand(-1, count, -1))

    def _codes(self, replicas: Replicas, task: TaskImages, key: int | str) -> Tensor:
        """Return samples of the aggregated posterior, (R, n, L)."""
        return codes_of(replicas, task.train, self.settings.model.components, ("mog", task.index, key)).z

    def _fit(self, replicas: Replicas, task: TaskImages, epoch: int) -> None:
        """Fit weights, means and variances to samples of the aggregated posterior by EM."""
        parts = live(replicas)
        with torch.no_grad():
            fitted: DiagonalMixture = vmap(gaussian_em)(self._codes(replicas, task, epoch), parts)
        for part, found in zip(parts, fitted, strict=True):
            part.copy_(found)


def live(replicas: Replicas) -> DiagonalMixture:
    """Return the components in training: log-weights (R, K), means and log-variances (R, K, L)."""
    tensors = replicas.tensors()
    return DiagonalMixture(*(tensors[f"prior.live_{name}"] for name in DiagonalMixture._fields))


def gaussian_em(z: Tensor, mixture: DiagonalMixture) -> DiagonalMixture:
    """Return the mixture after EM on samples z (n, L); their likelihood never falls, except by the minimum variance."""
    for _ in range(EM_STEPS):
        share = torch.softmax(mixture.log_weights + mixture.component_log_probs(z), -1)  # (n, K)
        count = share.sum(0).clamp(min=1e-6).unsqueeze(1)
        mean = share.mT @ z / count
        square = (share.unsqueeze(2) * (z.unsqueeze(1) - mean).square()).sum(0) / count
        weights = (share.mean(0) + 1e-6).log().log_softmax(-1)  # a component without weight can recover
        mixture = DiagonalMixture(weights, mean, square.clamp(min=LEAST_VARIANCE).log())
    return mixture
