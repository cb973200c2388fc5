"""The minorisation step: learn a task's components for all replicas at once, with fixed networks.

The paper's algorithm for a task, from which each of the three strategies differs in one line:

    r ← the mean image, or nothing
    repeat until there are K components, with an epoch of the ELBO between two rounds:
        h ← argmin KL[h ‖ π / r]                 `Literal`; `Forward`: argmin KL[π ‖ (1 − β) r + β h]
        β ← argmin KL[β h + (1 − β) r ‖ π]       the rule `boo_weights`
        r ← (1 − β) r + β h
    after 2K epochs: v ← argmin KL[q̂ ‖ Σ_k v_k h_k], and components without weight are dropped

`Corrective` fits all K components to KL[q̂ ‖ Σ_k v_k h_k] at once, and again after epochs 1, 2, 4, …, because those
learned early belong to an encoder that has changed since.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from boovae.boosting import losses
from boovae.boosting.losses import component_log_probs, cross_entropy
from boovae.boosting.weights import Scores, best_weight, dropped, em_weights, gain_curve, merged, sgd_weight
from boovae.config import Settings
from boovae.config.section import AtLeastOne, NotNegative, Section, Share, WholeNumber
from boovae.model import VAE, DiagonalMixture, DiagonalNormal
from boovae.model.priors.boosted import EMPTY, BoostedPrior, TaskMixture
from boovae.replicas import Draw, Replicas, latent_draws
from boovae.replicas.descent import Descent

#: Number of images whose codes represent the aggregated posterior.
SUBSET = 1000
#: Standard deviation of the noise images that components may start from, as a share of the pixel range.
NOISE_START = 0.15
#: The log-variance of an almost constant Gaussian.
FLAT = 20.0
#: Lloyd iterations of the latent clustering.
CLUSTER_STEPS = 10

Key = tuple[int | str, ...]


@dataclass(frozen=True)
class FitSettings(Section):
    """How the components of a task are learned."""

    boo_objective: Literal["corrective", "forward", "literal"] = "corrective"
    """Fit all components together, or one after another by the forward or the paper's literal objective."""
    boo_first: Literal["mean", "learned"] = "mean"
    """One after another: the first component of a task is the mean image, or is learned like the others."""
    boo_start: Literal["clusters", "noise", "mean"] = "clusters"
    """Start pseudo-inputs at the mean images of latent clusters, at noise, or at the mean image with noise."""
    boo_weights: Literal["em", "bisection", "equal", "fixed", "sgd"] = "em"
    """One after another: how a new component gets its weight."""
    boo_target: Literal["current", "full"] = "current"
    """One after another: the target is the task's aggregated posterior, or mixed with the old prior."""
    boo_mixture: Literal["current", "full"] = "current"
    """One after another: a new component avoids the task's own components, or all of them."""
    boo_steps: WholeNumber = 100
    """Gradient steps when components are learned."""
    boo_rate: NotNegative = 0.02
    """Learning rate of the pseudo-inputs."""
    boo_samples: AtLeastOne = 32
    """Literal: samples of the new component per step."""
    boo_floor: Share = 0.0
    """Literal: share of a broad Gaussian in the mixture, which keeps a new component from diverging."""
    boo_prune: Share = 1e-3
    """Drop components with less weight."""
    boo_tolerance: NotNegative = 0.0
    """Do not add a component that lowers the divergence by less (nats); 0 adds all."""


@dataclass(frozen=True)
class MixtureSettings(Section):
    """Settings of all priors that grow with the tasks."""

    boo_elbo: Literal["current", "full"] = "current"
    """Score images of the task in training by its own components, or by the whole mixture."""
    boo_masses: Literal["sizes", "equal"] = "sizes"
    """Share the prior among tasks by their numbers of images, or equally."""
    boo_until: AtLeastOne = 32
    """Fit components after epochs 1, 2, 4, … up to this one; then they are fixed."""


# --- codes ----------------------------------------------------------------------------------------------------------


class Codes(NamedTuple):
    """Images of a task (R, n, D), their posteriors, and one sample of each in the components' space (R, n, L)."""

    images: Tensor
    posterior: DiagonalNormal
    z: Tensor


@torch.no_grad()
def codes_of(replicas: Replicas, images: Tensor, least: int, key: Key) -> Codes:
    """Return the codes of a random subset of images (N, D) or (R, N, D), of size SUBSET or `least`, the larger."""
    chosen = replicas.generators.order(images.shape[-2], *key)[:, : max(SUBSET, least)]
    images = images.expand(len(replicas), -1, -1).take_along_dim(chosen.unsqueeze(2), dim=1)
    posterior = replicas.map(VAE.posterior, images)
    noise = replicas.generators.draw(Draw("normal", tuple(posterior.mean.shape[1:])), *key, "codes")
    z = replicas.map(lambda model, z: TaskMixture.of(model).inward(z), posterior.rsample(noise))
    return Codes(images, posterior, z)


@torch.no_grad()
def encoded(replicas: Replicas, inputs: Tensor) -> DiagonalNormal:
    """Return the components of pseudo-inputs (R, K, D)."""
    return replicas.map(_component, inputs)


def _component(model: VAE, inputs: Tensor) -> DiagonalNormal:
    return BoostedPrior.of(model).component(model.posterior, inputs)


# --- common to all strategies ---------------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """−E_q̂[log m] (sizes, R) of mixtures of `sizes` components, on held-out codes, after `epoch` epochs."""

    epoch: int
    sizes: list[int]
    divergence: Tensor


class Boosting(ABC):
    """Fits the live components of a boosted prior to the aggregated posterior of one task's images."""

    def __init__(
        self, settings: Settings, replicas: Replicas, images: Tensor, index: int, pixel_range: tuple[float, float]
    ) -> None:
        self.own, self.until = settings.of(FitSettings), settings.of(MixtureSettings).boo_until
        self.count, self.epochs = settings.model.components, settings.training.epochs
        self.replicas, self.images, self.index, self.pixel_range = replicas, images, index, pixel_range
        self._descent = Descent(self.loss, pixel_range, stacked=replicas.stacked)

    @abstractmethod
    def begin(self) -> Fitted | None:
        """Place the first components, or all."""

    @abstractmethod
    def after_epoch(self, done: int) -> Fitted | None:
        """Add, refit or drop components when `done` epochs are done."""

    @abstractmethod
    def loss(self, learned: list[Tensor], arguments: Any, noise: Tensor) -> Tensor:
        """Return the loss by which one replica's pseudo-inputs, the first of `learned`, are learned."""

    @torch.no_grad()
    def finish(self) -> tuple[DiagonalNormal, Tensor, Tensor]:
        """Return components, their log-weights (R, K) without duplicates and useless ones, and a mask of duplicates."""
        parts, before = encoded(self.replicas, self.inputs), self.log_weights
        log_weights = vmap(merged)(parts, before)
        twins = (log_weights <= EMPTY / 2) & (before > EMPTY / 2)
        return parts, vmap(functools.partial(dropped, threshold=self.own.boo_prune))(log_weights), twins

    @property
    def inputs(self) -> Tensor:
        """The pseudo-inputs of the task, (R, K, D)."""
        return self.replicas.buffers["prior.live_inputs"]

    @property
    def log_weights(self) -> Tensor:
        """Their log-weights, (R, K)."""
        return self.replicas.buffers["prior.live_log_weights"]

    def codes(self, *key: int | str) -> Codes:
        """Return codes of the task's images."""
        return codes_of(self.replicas, self.images, self.count, ("boo", self.index, *key))

    def starts(self, codes: Codes, *key: int | str) -> tuple[Tensor, Tensor]:
        """Return initial pseudo-inputs (R, K, D) and log-weights (R, K)."""
        key = ("boo", self.index, *key)
        images, generators = codes.images, self.replicas.generators
        if self.own.boo_start == "clusters":
            uniform = generators.draw(Draw("uniform", (self.count,)), *key, "centres")
            found = [cluster_images(*row) for row in zip(codes.posterior.mean, images, uniform, strict=True)]
            starts, shares = (torch.stack(parts) for parts in zip(*found, strict=True))
            return starts, shares.clamp(min=1e-3).log()
        low, high = self.pixel_range
        noise = generators.draw(Draw("normal", (self.count, images.shape[-1])), *key, "start")
        centre = images.mean(1, keepdim=True) if self.own.boo_start == "mean" else 0.5 * (low + high)
        even = torch.zeros(len(images), self.count, device=images.device).log_softmax(-1)
        return (centre + NOISE_START * (high - low) * noise).clamp(low, high), even

    def descend(self, start: list[Tensor], *arguments: Any, noise: Tensor | None = None) -> list[Tensor]:
        """Take gradient steps from `start` and return the end; rows that are not finite are reset to the start."""
        # The networks and the prior's learned parameters, without its stored tensors.
        everything = ({**self.replicas.parameters, **self.replicas.network_buffers}, *arguments)
        learned = self._descent(start, everything, steps=self.own.boo_steps, rate=self.own.boo_rate, noise=noise)
        return [
            torch.where(end.isfinite().all(-1, keepdim=True), end, begin) if end.dim() > 1 else end
            for end, begin in zip(learned, start, strict=True)
        ]


# --- all components together ----------------------------------------------------------------------------------------


class Corrective(Boosting):
    """Fits all components at once, at the start and after epochs 1, 2, 4, … `until`."""

    def begin(self) -> Fitted | None:
        """Place all components."""
        return self.fit(0)

    def after_epoch(self, done: int) -> Fitted | None:
        """Fit all components again, at increasing intervals."""
        return self.fit(done) if refits(done, self.until) else None

    def fit(self, epoch: int) -> Fitted | None:
        """Place all pseudo-inputs and fit them to the aggregated posterior; with a tolerance, choose their number.

        The last fit of a task returns the divergence with the best 1, 2, …, K components.
        """
        last, tolerance = epoch == last_fit(self.until, self.epochs), self.own.boo_tolerance
        codes = self.codes(epoch)
        with torch.no_grad():
            inputs, log_weights = self.corrected(*self.starts(codes, epoch), codes.z)
            if tolerance > 0 or last:
                fresh = self.codes(epoch, "curve").z
                order, curve = gain_curve(vmap(component_log_probs)(encoded(self.replicas, inputs), fresh))
            if tolerance > 0:
                unwanted = _beyond_tolerance(order, curve, tolerance)
                log_weights = log_weights.masked_fill(unwanted, EMPTY).log_softmax(-1).clamp(min=EMPTY)
                inputs, log_weights = self.corrected(inputs, log_weights, codes.z)
        self.inputs.copy_(inputs)
        self.log_weights.copy_(log_weights)
        return Fitted(epoch, list(range(1, self.count + 1)), curve.mT) if last else None

    def corrected(self, inputs: Tensor, log_weights: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return pseudo-inputs (R, K, D) and log-weights (R, K) fitted jointly to samples z (R, n, L)."""
        inputs, logits = self.descend([inputs, log_weights], z)
        log_components = vmap(component_log_probs)(encoded(self.replicas, inputs), z)
        return inputs, em_weights(log_components, torch.log_softmax(logits, -1)).clamp(min=EMPTY)

    def loss(self, learned: list[Tensor], arguments: Any, noise: Tensor) -> Tensor:
        """Return KL[q̂ ‖ Σ_k v_k h_k] up to a constant."""
        (inputs, logits), (network, z) = learned, arguments
        components = self.replicas.call(network, _component, inputs)
        return losses.mixture_loss(components, torch.log_softmax(logits, -1), z)


# --- one component after another ------------------------------------------------------------------------------------


class Greedy(Boosting):
    """Adds one component after every epoch until there are K, and steps back after 2K epochs."""

    def begin(self) -> Fitted | None:
        """Begin with the mean image, or with a component that is learned like the others."""
        if self.own.boo_first == "learned":
            return self.grow(0)
        self.inputs[:, 0] = self.codes("first").images.mean(1)
        self.log_weights[:, 0] = 0.0
        return None

    def after_epoch(self, done: int) -> Fitted | None:
        """Add a component, and later step back."""
        if done < self.count:
            return self.grow(done)
        if done == 2 * self.count and self.own.boo_prune > 0:
            self.step_back()
        return None

    @torch.no_grad()
    def grow(self, slot: int) -> Fitted:
        """Learn one component and its weight, and store them in the slot.

        The divergence is NaN where the gain was too small to keep it.
        """
        codes, fresh = self.codes("component", slot), self.codes("component", slot, "curve").z
        start = self.starts(codes, "component", slot)[0][:, slot]
        before = self.log_weights.clone()
        self.inputs[:, slot] = self.learned(start, codes, slot)
        parts = encoded(self.replicas, self.inputs)
        grown = self.weighted(parts, codes, before, slot)
        log_components = vmap(component_log_probs)(parts, fresh)
        divergence = cross_entropy(log_components, grown)
        refused = torch.zeros_like(divergence, dtype=torch.bool)
        if self.own.boo_tolerance > 0 and slot > 0:
            refused = cross_entropy(log_components, before) - divergence < self.own.boo_tolerance
        self.log_weights.copy_(torch.where(refused.unsqueeze(1), before, grown))
        return Fitted(slot, [slot + 1], torch.where(refused, torch.nan, divergence).unsqueeze(0))

    @torch.no_grad()
    def step_back(self) -> None:
        """Fit the weights once more by EM and drop components that get none."""
        z = self.codes("step back").z
        fitted = em_weights(vmap(component_log_probs)(encoded(self.replicas, self.inputs), z), self.log_weights)
        self.log_weights.copy_(vmap(functools.partial(dropped, threshold=self.own.boo_prune))(fitted))

    @abstractmethod
    def learned(self, start: Tensor, codes: Codes, slot: int) -> Tensor:
        """Return a pseudo-input (R, D) learned from its start."""

    def target(self, posterior: DiagonalNormal) -> DiagonalMixture:
        """Return π: the aggregated posterior of the task, or α r + (1 − α) q̂ with α by numbers of images."""
        current = _aggregated(posterior)
        if self.own.boo_target == "current" or self.index == 0:
            return current
        before: DiagonalMixture = self.replicas.map(lambda model: model.prior.before(model.posterior))
        share = self.replicas.buffers["prior.live_log_mass"].unsqueeze(1)
        before = before._replace(log_weights=before.log_weights + torch.log1p(-share.exp()))
        current = current._replace(log_weights=current.log_weights + share)
        return DiagonalMixture(*(torch.cat(parts, 1) for parts in zip(before, current, strict=True)))

    def mixture(self, slot: int) -> DiagonalMixture:
        """Return r: the components of this task so far, or all; an almost constant density if there are none."""
        full = self.own.boo_mixture == "full"
        mixture: DiagonalMixture = self.replicas.map(
            lambda model: (model.prior if full else model.prior.current)(model.posterior)
        )
        if slot == 0 and (self.index == 0 or not full):
            flat = torch.zeros_like(mixture.log_weights).log_softmax(-1)
            mixture = DiagonalMixture(flat, torch.zeros_like(mixture.mean), torch.full_like(mixture.mean, FLAT))
        return mixture

    def weighted(self, parts: DiagonalNormal, codes: Codes, log_weights: Tensor, slot: int) -> Tensor:
        """Return the log-weights (R, K) with the component in the slot, fitted on the current task alone."""
        rule = self.own.boo_weights
        beta = torch.full_like(log_weights[:, 0], 0.5 if rule == "fixed" else 1 / (slot + 1))
        if slot == 0:
            beta = torch.ones_like(beta)
        elif rule in ("bisection", "sgd"):
            solve = best_weight if rule == "bisection" else sgd_weight
            beta = vmap(solve)(self._scores(parts, codes.posterior, log_weights, slot))
        grown = log_weights + torch.log1p(-beta).clamp(min=EMPTY).unsqueeze(1)
        grown[:, slot] = beta.log()
        if rule == "em":
            grown = em_weights(vmap(component_log_probs)(parts, codes.z), grown)
        return grown.clamp(min=EMPTY)

    def _scores(self, parts: DiagonalNormal, posterior: DiagonalNormal, log_weights: Tensor, slot: int) -> Scores:
        """Return log h, log r and log π at samples of h and of r."""
        draws = {"uniform": Draw("uniform", (SUBSET,)), "normal": Draw("normal", (2, SUBSET, parts.mean.shape[-1]))}
        noise = self.replicas.generators.draw_all(draws, "boo", self.index, "component", slot, "weight")

        def one(parts: DiagonalNormal, log_weights: Tensor, target: DiagonalMixture, *noise: Tensor) -> Scores:
            uniform, normal = noise
            h, r = DiagonalNormal(parts.mean[slot], parts.log_variance[slot]), DiagonalMixture(log_weights, *parts)
            z = torch.cat([h.rsample(normal[0]), r.sample(uniform, normal[1])])
            return Scores(h.log_prob(z), r.log_prob(z), target.log_prob(z))

        return vmap(one)(parts, log_weights, _aggregated(posterior), *noise.values())


class LiteralBoosting(Greedy):
    """The paper's step: h* = argmin KL[h ‖ π / r]."""

    def learned(self, start: Tensor, codes: Codes, slot: int) -> Tensor:
        """Return a pseudo-input (R, D) learned from its start."""
        own, target, mixture = self.own, self.target(codes.posterior), self.mixture(slot)
        if own.boo_floor > 0:
            mixture = vmap(functools.partial(losses.with_floor, share=own.boo_floor))(mixture, target)
        draw = Draw("normal", (own.boo_samples, codes.z.shape[-1]))
        key = ("boo", self.index, "component", slot, "literal")
        noise = self.replicas.generators.draw(draw, *key, steps=own.boo_steps)
        return self.descend([start], target, mixture, noise=noise)[0]

    def loss(self, learned: list[Tensor], arguments: Any, noise: Tensor) -> Tensor:
        """Return KL[h ‖ π / r] up to a constant."""
        network, target, mixture = arguments
        return losses.literal_loss(self.replicas.call(network, _component, learned[0]), noise, target, mixture)


class ForwardBoosting(Greedy):
    """The objective before it was linearised: h* = argmin KL[π ‖ (1 − β) r + β h], β learned with it."""

    def learned(self, start: Tensor, codes: Codes, slot: int) -> Tensor:
        """Return a pseudo-input (R, D) learned from its start."""
        z = codes.z
        if self.own.boo_target == "full" and self.index > 0:
            key = ("boo", self.index, "component", slot, "target")
            noise = self.replicas.generators.draw_all(latent_draws(*z.shape[1:]), *key)
            z = vmap(DiagonalMixture.sample)(self.target(codes.posterior), *noise.values())
        log_mixture = vmap(DiagonalMixture.log_prob)(self.mixture(slot), z)
        logit = -torch.logit(torch.tensor(slot / (slot + 1.0))).item()
        return self.descend([start, torch.full_like(start[:, 0], logit)], z, log_mixture)[0]

    def loss(self, learned: list[Tensor], arguments: Any, noise: Tensor) -> Tensor:
        """Return KL[π ‖ (1 − β) r + β h] up to a constant."""
        (inputs, logit), (network, z, log_mixture) = learned, arguments
        return losses.forward_loss(self.replicas.call(network, _component, inputs), logit, z, log_mixture)


Strategies = dict[str, type[Boosting]]
STRATEGIES: Strategies = {"corrective": Corrective, "forward": ForwardBoosting, "literal": LiteralBoosting}


def refits(done: int, until: int) -> bool:
    """Return whether all components are fitted again after `done` epochs: 1, 2, 4, … `until`."""
    return done <= until and done & (done - 1) == 0


def last_fit(until: int, epochs: int) -> int:
    """Return the number of epochs before the last corrective fit; 0 if there is only the first fit."""
    most = min(until, epochs - 1)
    return 1 << (most.bit_length() - 1) if most > 0 else 0


def _aggregated(posterior: DiagonalNormal) -> DiagonalMixture:
    """Return q̂ (R, n), the equally weighted posteriors of images."""
    return DiagonalMixture(torch.zeros_like(posterior.mean[..., 0]).log_softmax(-1), *posterior)


def _beyond_tolerance(order: Tensor, curve: Tensor, tolerance: float) -> Tensor:
    """Return which components (R, K) come after the first that gains less than the tolerance."""
    gain = curve[:, :-1] - curve[:, 1:]
    wanted = torch.cat([torch.ones_like(curve[:, :1], dtype=torch.bool), (gain >= tolerance).cumprod(1).bool()], 1)
    return torch.zeros_like(wanted).scatter(1, order, ~wanted)


# --- where components start -----------------------------------------------------------------------------------------


def cluster_images(z: Tensor, images: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean images (K, D) of K latent clusters and their shares (K,).

    `z` (n, L) are codes of `images` (n, D); `uniform` (K,) chooses the initial centres by k-means++ (Arthur and
    Vassilvitskii, 2007): each next one with probability proportional to the squared distance to those before.
    """
    distance = torch.ones_like(z[:, 0])
    centres = []
    for choice in uniform:
        cumulative = distance.cumsum(0)
        index = (choice * cumulative[-1] >= cumulative[:-1]).sum(-1, keepdim=True)
        centres.append(z.index_select(0, index))
        nearest = (z - centres[-1]).square().sum(-1)
        distance = torch.minimum(distance, nearest) if len(centres) > 1 else nearest
    centre = torch.cat(centres)
    for _ in range(CLUSTER_STEPS):
        member = _members(z, centre)
        # An empty cluster keeps its centre.
        count = member.sum(0).unsqueeze(1)
        centre = torch.where(count > 0, member.mT @ z / count.clamp(min=1), centre)
    member = _members(z, centre)
    nearest_image = images[torch.cdist(z, centre).argmin(0)]
    count = member.sum(0).unsqueeze(1)
    means = torch.where(count > 0, member.mT @ images / count.clamp(min=1), nearest_image)
    return means, count.squeeze(1) / len(z)


def _members(z: Tensor, centre: Tensor) -> Tensor:
    """Return the nearest centre of each code, one-hot (n, K)."""
    nearest = torch.cdist(z, centre).argmin(1, keepdim=True)
    return torch.zeros(len(z), len(centre), device=z.device).scatter(1, nearest, 1.0)
