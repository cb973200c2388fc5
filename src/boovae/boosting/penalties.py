"""The paper's two penalties: R_enc preserves old components in latent space, R_dec preserves their images.

For every component c of a finished task the Gaussian N(M, V) and the decoder's output X at M were stored when its
task ended. With `sum`, as the paper writes it, and `mean`, weighted by the components' weights:

    R_enc = Σ_c KL_sym[ q(z | u_c), N(M_c, V_c) ]
    R_dec = Σ_c KL_sym[ p(x | z_c), p(x | X_c) ],  z_c ~ N(M_c, V_c)

`reference` is the reading behind the paper's numbers (docs/methods/boo.md): R_enc is the divergence between the two
whole mixtures, one sample per component, summed over the components; R_dec is weighted so that each task counts 1, with
the log-variance of z_c limited to [−5, −2]. With `boo_decoder` = teacher, X_c is the output at
z_c of the decoder from before the task, the paper's p^{t−1}(x | z), and no image need be stored. `boo_divergence`
chooses one direction instead of the symmetric divergence.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from boovae.config import Settings
from boovae.config.section import Section
from boovae.model import VAE, DiagonalMixture, DiagonalNormal
from boovae.model.priors.boosted import EMPTY, ROOM, TaskMixture
from boovae.replicas import Batch, Draw, Replicas, Teacher, Tensors

#: Limits of the log-variance of z in the reference reading of R_dec.
REFERENCE_RANGE = (-5.0, -2.0)


@dataclass(frozen=True)
class PenaltySettings(Section):
    """Penalties on changes of old components."""

    boo_lambda_schedule: Literal["constant", "tasks"] = "constant"
    """Keep the weight of the penalties constant, or multiply it by (images before / images now)."""
    boo_decoder: Literal["mean", "teacher"] = "mean"
    """Compare the decoder with the stored image of a component, or with the old decoder's output."""
    boo_divergence: Literal["symmetric", "forward", "reverse"] = "symmetric"
    """Divergence of the penalties: symmetric, KL[stored | now] or KL[now | stored]."""


class Penalties:
    """R_enc and R_dec on the stored components, weighted by lambda."""

    def __init__(self, settings: Settings, *, on: bool, reduction: str) -> None:
        self.own, self.model, self.on, self.reduction = settings.of(PenaltySettings), settings.model, on, reduction
        self._teacher = Teacher() if self.own.boo_decoder == "teacher" else None

    @property
    def stores_outputs(self) -> bool:
        """Whether the decoder's outputs at old components are stored."""
        return self.on and not self._teacher

    def state(self, replicas: Replicas, memory: Tensors, strength: Tensor, growth: float) -> Tensors:
        """Return the tensors that `penalty` reads: lambda (R,) and the decoder's targets.

        `strength` is that of the settings, `growth` (images before / images now).
        """
        if self.own.boo_lambda_schedule == "tasks":
            strength = strength * growth
        if self._teacher:
            return {**self._teacher.freeze(replicas, "decoder."), "lambda": strength}
        decoded = memory["decoded"]
        room = decoded.new_zeros(len(replicas), replicas.buffers["prior.mean"].shape[1], *decoded.shape[2:])
        room[:, : decoded.shape[1]] = decoded
        return {"lambda": strength, "decoded": room}

    def draws(self, tasks_seen: int) -> dict[str, Draw]:
        """Return noise for one latent of each component, stored and re-encoded."""
        if not self.on or tasks_seen < 2:
            return {}
        count = ROOM * -(-tasks_seen // ROOM) * self.model.components
        # The name is part of the seed.
        return {"held": Draw("normal", (3, count, self.model.latent_dim))}

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return lambda . R_enc and lambda . R_dec for one replica."""
        strength = batch["state"]["lambda"]
        noise = batch["held"][:, : TaskMixture.of(model).rows * self.model.components]  # also drawn for empty rows
        encoder = self.encoder_divergence(model, batch["old_components"], noise[:2])
        z = self.latents(model, noise[2])
        decoder = self.decoder_divergence(model, z, self._stored(model, batch["state"], z))
        return {"encoder": strength * encoder, "decoder": strength * decoder}

    def encoder_divergence(self, model: VAE, now: DiagonalNormal, noise: Tensor) -> Tensor:
        """Return R_enc of old components, whose current encodings are `now` (C, L); noise (2, C, L)."""
        before, weights = _old(model)
        stored, side = DiagonalNormal(*before[1:]), self.own.boo_divergence
        if self.reduction != "reference":
            return (self._shares(weights) * stored.divergence(now, side)).sum()
        mixture = DiagonalMixture(before.log_weights, *now)
        samples = torch.cat([stored.rsample(noise[0]), now.rsample(noise[1])])  # scored together: fewer, larger steps
        forward, against = (before.log_prob(samples) - mixture.log_prob(samples)).chunk(2)
        sides = {"forward": forward, "reverse": -against, "symmetric": 0.5 * (forward - against)}
        return ((weights > 0) * sides[side]).sum()

    def latents(self, model: VAE, noise: Tensor) -> Tensor:
        """Return a latent (C, L) of each component, at which R_dec compares the decoders; noise (C, L)."""
        before, _ = _old(model)
        log_variance = before.log_variance
        if self.reduction == "reference" and not self._teacher:
            log_variance = log_variance.clamp(*REFERENCE_RANGE)
        return DiagonalNormal(before.mean, log_variance).rsample(noise)

    def _stored(self, model: VAE, state: dict[str, Tensor], z: Tensor) -> Tensor:
        """Return the decoder's targets at latents z (C, L): stored outputs (C, D), or those of the old decoder."""
        if self._teacher:
            return self._teacher.answer(model, state, VAE.decode, z)
        return state["decoded"][: TaskMixture.of(model).rows].flatten(0, 1)

    def decoder_divergence(self, model: VAE, z: Tensor, decoded: Tensor) -> Tensor:
        """Return R_dec at a latent z (C, L) of each component, against the outputs `decoded` (C, D)."""
        _, weights = _old(model)
        # The stored side comes first: forward is KL[stored ‖ now], reverse KL[now ‖ stored].
        divergence = model.likelihood.divergence(decoded, model.decode(z), self.own.boo_divergence)
        shares = self._shares(weights)
        if self.reduction == "reference":
            prior = TaskMixture.of(model)
            shares = torch.where(weights > 0, prior.log_weights[: prior.rows].flatten().exp(), 0.0)
        return (shares * divergence).sum()

    def _shares(self, weights: Tensor) -> Tensor:
        """Return the weight of each component (C,): 1 in a sum, its own in a mean."""
        return (weights > 0).to(weights.dtype) if self.reduction == "sum" else weights

    @staticmethod
    @torch.no_grad()
    def outputs(replicas: Replicas, mean: Tensor) -> Tensor:
        """Return the decoder's outputs at the means of components, to be stored at the end of their task."""
        outputs: Tensor = replicas.map(lambda model, mean: model.likelihood.bounded(model.decode(mean)), mean)
        return outputs


def _old(model: VAE) -> tuple[DiagonalMixture, Tensor]:
    """Return the mixture of the stored Gaussians and its weights (C,), exactly 0 in empty slots."""
    mixture = TaskMixture.of(model).stored_mixture()
    return mixture, torch.where(mixture.log_weights > EMPTY / 2, mixture.log_weights.exp(), 0.0)
