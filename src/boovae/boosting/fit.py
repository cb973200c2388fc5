"""Learning the components of a task in training, for all replicas at once: which codes, which start, which objective.

The losses and weights are in `boosting.py`, the schedule in `methods/boo.py`; this is what lies between.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from boovae.boosting.losses import (
    Descent,
    Scores,
    best_weight,
    cluster_images,
    component_log_probs,
    cross_entropy,
    dropped,
    em_weights,
    forward_loss,
    gain_curve,
    literal_loss,
    mixture_loss,
    sgd_weight,
    with_floor,
)
from boovae.config import Settings
from boovae.config.section import AtLeastOne, NotNegative, Section, Share, WholeNumber
from boovae.model.distributions import DiagonalMixture, DiagonalNormal
from boovae.model.priors.boosted import EMPTY
from boovae.model.vae import VAE
from boovae.replicas.randomness import Draw, Generators
from boovae.replicas.stacked import Replicas

if TYPE_CHECKING:
    from boovae.methods.base import TaskImages

#: Images whose codes stand for the aggregated posterior.
SUBSET = 1000
#: Standard deviation of the noise images that components may start from, as a share of the pixel range.
NOISE_START = 0.15
#: The log-variance of a Gaussian that is as good as constant.
FLAT = 20.0

Key = tuple[int | str, ...]


@dataclass(frozen=True)
class FitSettings(Section):
    """How the components of a task are learned."""

    boo_objective: Literal["corrective", "forward", "literal"] = "corrective"
    """Fit all components together, or one after another by the forward or the paper's literal objective."""
    boo_start: Literal["clusters", "noise", "mean"] = "clusters"
    """Start pseudo-inputs at the mean images of latent clusters, at noise, or at the mean image with noise."""
    boo_weights: Literal["em", "bisection", "equal", "fixed", "sgd"] = "em"
    """One after another: how a new component gets its weight."""
    boo_target: Literal["current", "full"] = "current"
    """One after another: the target is the task's aggregated posterior, or mixed with the old prior."""
    boo_mixture: Literal["current", "full"] = "current"
    """One after another: a new component keeps away from the task's own components, or from all."""
    boo_steps: WholeNumber = 100
    """Gradient steps when components are learned."""
    boo_rate: NotNegative = 0.02
    """Learning rate of the pseudo-inputs."""
    boo_samples: AtLeastOne = 32
    """Literal: samples of the new component per step."""
    boo_floor: Share = 0.0
    """Literal: share of a broad Gaussian in the mixture, which keeps a new component from running away."""
    boo_prune: Share = 1e-3
    """Drop components with less weight."""
    boo_tolerance: NotNegative = 0.0
    """Do not add a component that lowers the divergence by less (nats); 0 takes all of them."""


class Minorisation:
    """Fits the live components of a boosted prior to the aggregated posterior, the networks standing still."""

    def __init__(self, settings: Settings, box: tuple[float, float]) -> None:
        self.own, self.box = settings.of(FitSettings), box
        self.count, self.latent_dim = settings.model.components, settings.model.latent_dim
        self._descent: Descent | None = None

    @staticmethod
    def component(model: VAE, inputs: Tensor) -> DiagonalNormal:
        """Return the Gaussians that pseudo-inputs (K, D) stand for, of one replica."""
        return model.posterior(inputs)

    # --- all components together --------------------------------------------------------------------------------

    def fit(self, replicas: Replicas, task: TaskImages, epoch: int, *, last: bool) -> Tensor | None:
        """Place the pseudo-inputs and fit them all to the aggregated posterior; choose how many, if asked to.

        The last fit of a task returns −E_q̂[log m] with the best 1, 2, …, K components (K, R), on codes it has not seen.
        """
        own, buffers = self.own, replicas.buffers
        key = ("boo", task.index, epoch)
        images, posterior, z = self.codes(replicas, task, key)
        with torch.no_grad():
            inputs, log_weights = self._starts(replicas, images, posterior, key)
            inputs, log_weights = self._corrected(replicas, inputs, log_weights, z)
            if own.boo_tolerance > 0 or last:
                fresh = self.codes(replicas, task, (*key, "curve"))[2]
                log_components = vmap(component_log_probs)(self.encoded(replicas, inputs), fresh)
                order, curve = gain_curve(log_components)
                if own.boo_tolerance > 0:
                    unwanted = _beyond_tolerance(order, curve, own.boo_tolerance)
                    log_weights = log_weights.masked_fill(unwanted, EMPTY).log_softmax(-1).clamp(min=EMPTY)
                    inputs, log_weights = self._corrected(replicas, inputs, log_weights, z)
        buffers["prior.live_inputs"].copy_(inputs)
        buffers["prior.live_log_weights"].copy_(log_weights)
        return curve.mT if last else None

    def _corrected(self, replicas: Replicas, inputs: Tensor, log_weights: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return pseudo-inputs (R, K, D) and log-weights (R, K) fitted together to samples z (R, n, L)."""

        def loss(learned: list[Tensor], arguments: Any, noise: Tensor) -> Tensor:
            network, z = arguments
            components = replicas.call(network, self.component, learned[0])
            return mixture_loss(components, torch.log_softmax(learned[1], -1), z)

        if self._descent is None:
            self._descent = Descent(loss, self.box, stacked=replicas.stacked)
        start, arguments = [inputs, log_weights], (_network(replicas), z)
        inputs, logits = self._descent(start, arguments, steps=self.own.boo_steps, rate=self.own.boo_rate)
        inputs, logits = (_sound(*pair) for pair in zip((inputs, logits), start, strict=True))
        log_components = vmap(component_log_probs)(self.encoded(replicas, inputs), z)
        return inputs, em_weights(log_components, torch.log_softmax(logits, -1)).clamp(min=EMPTY)

    # --- one component after another ----------------------------------------------------------------------------

    def grow(self, replicas: Replicas, task: TaskImages, slot: int) -> Tensor:
        """Learn one component and its weight, and put them into the slot.

        Returns −E_q̂[log m] (R,) with it, on codes it has not seen; NaN where the gain was too small to add it.
        """
        own, buffers = self.own, replicas.buffers
        key = ("boo", task.index, "component", slot)
        images, posterior, z = self.codes(replicas, task, key)
        with torch.no_grad():
            inputs = self._starts(replicas, images, posterior, key)[0][:, slot]
            learned = self._learned(replicas, task, inputs, posterior, z, slot, key)
            log_weights = buffers["prior.live_log_weights"].clone()
            fresh = self.codes(replicas, task, (*key, "curve"))[2]
            buffers["prior.live_inputs"][:, slot] = learned
            parts = self.encoded(replicas, buffers["prior.live_inputs"])
            log_components = vmap(component_log_probs)(parts, fresh)
            divergence = cross_entropy(log_components, log_weights)
            grown = self._weighted(replicas, parts, posterior, z, log_weights, slot, key)
            now = cross_entropy(log_components, grown)
            refused = torch.zeros_like(now, dtype=torch.bool)
            if own.boo_tolerance > 0 and slot > 0:
                refused = divergence - now < own.boo_tolerance
            buffers["prior.live_log_weights"].copy_(torch.where(refused.unsqueeze(1), log_weights, grown))
        return torch.where(refused, torch.nan, now)

    def _learned(
        self,
        replicas: Replicas,
        task: TaskImages,
        inputs: Tensor,
        posterior: DiagonalNormal,
        z: Tensor,
        slot: int,
        key: Key,
    ) -> Tensor:
        """Return a pseudo-input (R, D) learned from its start by the literal or the forward objective."""
        own = self.own
        target, mixture = self._target(replicas, task, posterior), self._mixture(replicas, task, slot)
        literal = own.boo_objective == "literal"
        generators = Generators(replicas.seeds, replicas.device)

        def loss(learned: list[Tensor], arguments: Any, noise: Tensor) -> Tensor:
            network, *rest = arguments
            h: DiagonalNormal = replicas.call(network, self.component, learned[0])
            return literal_loss(h, noise, *rest) if literal else forward_loss(h, learned[1], *rest)

        if self._descent is None:
            self._descent = Descent(loss, self.box, stacked=replicas.stacked)
        options: dict[str, Any] = {"steps": own.boo_steps, "rate": own.boo_rate}
        if literal:
            if own.boo_floor > 0:
                mixture = vmap(functools.partial(with_floor, share=own.boo_floor))(mixture, target)
            draw = Draw("normal", (own.boo_samples, self.latent_dim))
            noise = generators.draw(draw, *key, "literal", steps=own.boo_steps)
            start, arguments = [inputs], (_network(replicas), target, mixture)
            learned = self._descent(start, arguments, noise=noise, **options)[0]
        else:
            if own.boo_target == "full" and task.index > 0:
                count = z.shape[1]
                draws = {"uniform": Draw("uniform", (count,)), "normal": Draw("normal", (count, self.latent_dim))}
                z = vmap(DiagonalMixture.sample)(target, *generators.draw_all(draws, *key, "target").values())
            log_mixture = vmap(DiagonalMixture.log_prob)(mixture, z)
            start = [inputs, torch.full_like(inputs[:, 0], -torch.logit(torch.tensor(slot / (slot + 1.0))).item())]
            learned = self._descent(start, (_network(replicas), z, log_mixture), **options)[0]
        return _sound(learned, inputs)

    def _target(self, replicas: Replicas, task: TaskImages, posterior: DiagonalNormal) -> DiagonalMixture:
        """Return π: the aggregated posterior of the task, or α r + (1 − α) q̂ with α by numbers of images."""
        count = posterior.mean.shape[1]
        log_weights = torch.full_like(posterior.mean[..., 0], 1.0 / count).log()
        if self.own.boo_target == "current" or task.index == 0:
            return DiagonalMixture(log_weights, *posterior)
        before: DiagonalMixture = replicas.map(lambda model: model.prior.before(model.posterior))
        own = replicas.buffers["prior.live_log_mass"].unsqueeze(1)
        shares = [before.log_weights + torch.log1p(-own.exp()), log_weights + own]
        return DiagonalMixture(
            torch.cat(shares, 1),
            torch.cat([before.mean, posterior.mean], 1),
            torch.cat([before.log_variance, posterior.log_variance], 1),
        )

    def _mixture(self, replicas: Replicas, task: TaskImages, slot: int) -> DiagonalMixture:
        """Return r: the components of this task so far, or all; where there are none, as good as a constant."""
        full = self.own.boo_mixture == "full"

        def one(model: Any) -> DiagonalMixture:
            mixture: DiagonalMixture = (model.prior if full else model.prior.current)(model.posterior)
            return mixture

        mixture: DiagonalMixture = replicas.map(one)
        if slot == 0 and (task.index == 0 or not full):
            flat = torch.zeros_like(mixture.log_weights).log_softmax(-1)
            mixture = DiagonalMixture(flat, torch.zeros_like(mixture.mean), torch.full_like(mixture.mean, FLAT))
        return mixture

    def _weighted(
        self,
        replicas: Replicas,
        parts: DiagonalNormal,
        posterior: DiagonalNormal,
        z: Tensor,
        log_weights: Tensor,
        slot: int,
        key: Key,
    ) -> Tensor:
        """Return the log-weights (R, K) with the component in the slot, learned on the current task alone."""
        rule = self.own.boo_weights
        beta = torch.full_like(log_weights[:, 0], 0.5 if rule == "fixed" else 1 / (slot + 1))
        if slot == 0:
            beta = torch.ones_like(beta)
        elif rule in ("bisection", "sgd"):
            solve = best_weight if rule == "bisection" else sgd_weight
            beta = vmap(solve)(self._scores(replicas, parts, posterior, log_weights, slot, key))
        grown = log_weights + torch.log1p(-beta).clamp(min=EMPTY).unsqueeze(1)
        grown[:, slot] = beta.log()
        if rule == "em":
            grown = em_weights(vmap(component_log_probs)(parts, z), grown)
        return grown.clamp(min=EMPTY)

    def _scores(
        self,
        replicas: Replicas,
        parts: DiagonalNormal,
        posterior: DiagonalNormal,
        log_weights: Tensor,
        slot: int,
        key: Key,
    ) -> Scores:
        """Return log h, log r and log π at samples of h and of r."""
        latent = self.latent_dim
        draws = {"uniform": Draw("uniform", (SUBSET,)), "normal": Draw("normal", (2, SUBSET, latent))}
        noise = Generators(replicas.seeds, replicas.device).draw_all(draws, *key, "weight")
        target = DiagonalMixture(torch.zeros_like(posterior.mean[..., 0]).log_softmax(-1), *posterior)

        def one(
            parts: DiagonalNormal, log_weights: Tensor, target: DiagonalMixture, uniform: Tensor, normal: Tensor
        ) -> Scores:
            h, r = DiagonalNormal(parts.mean[slot], parts.log_variance[slot]), DiagonalMixture(log_weights, *parts)
            z = torch.cat([h.rsample(normal[0]), r.sample(uniform, normal[1])])
            return Scores(h.log_prob(z), r.log_prob(z), target.log_prob(z))

        scores: Scores = vmap(one)(parts, log_weights, target, noise["uniform"], noise["normal"])
        return scores

    def step_back(self, replicas: Replicas, task: TaskImages) -> None:
        """Fit the weights once more by EM and drop components that got none."""
        z = self.codes(replicas, task, ("boo", task.index, "step back"))[2]
        log_weights = replicas.buffers["prior.live_log_weights"]
        with torch.no_grad():
            parts = self.encoded(replicas, replicas.buffers["prior.live_inputs"])
            fitted = em_weights(vmap(component_log_probs)(parts, z), log_weights)
            log_weights.copy_(vmap(functools.partial(dropped, threshold=self.own.boo_prune))(fitted))

    # --- codes and starts ---------------------------------------------------------------------------------------

    def codes(self, replicas: Replicas, task: TaskImages, key: Key) -> tuple[Tensor, DiagonalNormal, Tensor]:
        """Return a random subset of the images (R, n, D), their posteriors and one sample of each (R, n, L)."""
        return codes_of(replicas, task.train, self.count, key)

    @torch.no_grad()
    def encoded(self, replicas: Replicas, inputs: Tensor) -> DiagonalNormal:
        """Return the components of pseudo-inputs (R, K, D)."""
        components: DiagonalNormal = replicas.map(self.component, inputs)
        return components

    def _starts(self, replicas: Replicas, images: Tensor, posterior: DiagonalNormal, key: Key) -> tuple[Tensor, Tensor]:
        """Return where K pseudo-inputs start (R, K, D), and their log-weights (R, K)."""
        count, pixels = self.count, images.shape[-1]
        generators = Generators(replicas.seeds, replicas.device)
        even = torch.zeros(len(images), count, device=images.device).log_softmax(-1)
        low, high = self.box
        if self.own.boo_start == "clusters":
            uniform = generators.draw(Draw("uniform", (count,)), *key, "centres")
            found = [cluster_images(*row) for row in zip(posterior.mean, images, uniform, strict=True)]
            starts, shares = (torch.stack(parts) for parts in zip(*found, strict=True))
            return starts, shares.clamp(min=1e-3).log()
        noise = generators.draw(Draw("normal", (count, pixels)), *key, "start")
        centre = images.mean(1, keepdim=True) if self.own.boo_start == "mean" else 0.5 * (low + high)
        return (centre + NOISE_START * (high - low) * noise).clamp(low, high), even


def codes_of(replicas: Replicas, train: Tensor, least: int, key: Key) -> tuple[Tensor, DiagonalNormal, Tensor]:
    """Return a random subset of images (N, D) or (R, N, D), SUBSET of them or `least`, their posteriors and samples."""
    generators = Generators(replicas.seeds, replicas.device)
    chosen = generators.order(train.shape[-2], *key)[:, : max(SUBSET, least)]
    images = (
        train[chosen]
        if train.dim() == 2
        else torch.stack([own[index] for own, index in zip(train, chosen, strict=True)])
    )
    with torch.no_grad():
        posterior: DiagonalNormal = replicas.map(VAE.posterior, images)
    noise = generators.draw(Draw("normal", tuple(posterior.mean.shape[1:])), *key, "codes")
    return images, posterior, posterior.rsample(noise)


def _sound(learned: Tensor, start: Tensor) -> Tensor:
    """Return pseudo-inputs (R, ..., D) or log-weights (R, K); what left the finite numbers goes back to its start."""
    return torch.where(learned.isfinite().all(-1, keepdim=True), learned, start)


def _network(replicas: Replicas) -> dict[str, Tensor]:
    """Return the tensors of the networks and what the prior learns with them, without what it stores."""
    buffers = {name: tensor for name, tensor in replicas.buffers.items() if not name.startswith("prior.")}
    return {**replicas.parameters, **buffers}


def last_fit(until: int, epochs: int) -> int:
    """Return after how many epochs the last corrective fit comes; 0: there is only the first, before all."""
    most = min(until, epochs - 1)
    return 1 << (most.bit_length() - 1) if most > 0 else 0


def _beyond_tolerance(order: Tensor, curve: Tensor, tolerance: float) -> Tensor:
    """Return which components (R, K) come after the first that gains less than the tolerance."""
    gain = curve[:, :-1] - curve[:, 1:]
    wanted = torch.cat([torch.ones_like(curve[:, :1], dtype=torch.bool), (gain >= tolerance).cumprod(1).bool()], 1)
    return torch.zeros_like(wanted).scatter(1, order, ~wanted)
