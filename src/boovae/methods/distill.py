"""`distill`: memory in function space.

A frozen copy of the network from before the task (the teacher) is kept while the task is learned; nothing else is
stored between tasks. The decoder is pulled towards the teacher's decoder at fresh latents z of the previous prior, and
the encoder towards the teacher's encoder at the teacher's images of these latents:

    λ_t . E_z[ KL_sym(p(x | z), p_old(x | z)) + KL_sym(q(. | x̃), q_old(. | x̃)) ],  x̃ = mean of p_old(x | z).

The encoder's term passes images decoded from the prior through the network: pseudo-rehearsal without a stored or
generated dataset. Each term can be switched off. Related work: Lifelong Generative Modeling (Ramapuram et al., 2020)
for the encoder, Generative Distillation (Masip et al., 2024) for distilling outputs instead of training on samples.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from boovae.config.section import AtLeastOne, NotNegative, Section
from boovae.methods.method import Method, TaskImages
from boovae.model import VAE, DiagonalNormal
from boovae.replicas import Batch, Draw, Replicas, latent_draws


@dataclass(frozen=True)
class DistillSettings(Section):
    """Distillation from the network before the task."""

    distill_weight: NotNegative = 0.5
    """Weight of the divergence to the old network, times (images before / images now)."""
    distill_latents: AtLeastOne = 250
    """Number of latents of the old prior per step."""
    distill_decoder: bool = True
    """Distil the decoder."""
    distill_encoder: bool = True
    """Distil the encoder (on images decoded from the old prior)."""
    distill_divergence: Literal["symmetric", "forward", "reverse"] = "symmetric"
    """Symmetric divergence, KL[old | new] or KL[new | old]."""


class Distill(Method):
    """Keeps decoder and encoder close to a frozen copy, on latents of the previous prior."""

    name = "distill"
    summary = "distils the network from its frozen predecessor on latents of the old prior; combine: boo+distill"
    sections = (DistillSettings,)
    search = MappingProxyType({"distill_weight": (0.1, 0.2, 0.4, 0.8, 1.6)})
    settled_by = 2

    own: DistillSettings

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Keep a frozen copy of the network."""
        self.hold_to_past("distill_weight", replicas, task)

    def draws(self, batch_size: int) -> dict[str, Draw]:
        """Return the draws that sample the latents."""
        if self.tasks_seen < 2:
            return {}
        return latent_draws(self.own.distill_latents, self.settings.model.latent_dim)

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return the two divergences at fresh latents of the old prior."""
        state = batch["state"]
        if not state:
            return {}
        weight, terms, side = state["weight"], {}, self.own.distill_divergence
        draws = batch["uniform"], batch["normal"]
        z, output, images, posterior = self.teacher.answer(model, state, _answers, *draws)
        if self.own.distill_decoder:
            terms["decoder"] = weight * model.likelihood.divergence(output, model.decode(z), side).mean()
        if self.own.distill_encoder:
            terms["encoder"] = weight * posterior.divergence(model.posterior(images), side).mean()
        return terms


def _answers(teacher: VAE, uniform: Tensor, normal: Tensor) -> tuple[Tensor, Tensor, Tensor, DiagonalNormal]:
    """Return latents (M, L) of the teacher's prior, and its outputs, mean images and encodings of these."""
    z = teacher.sample_before(uniform, normal)
    output = teacher.decode(z)
    images = teacher.likelihood.mean(output)
    return z, output, images, teacher.posterior(images)
