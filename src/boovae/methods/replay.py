"""`replay`: deep generative replay (Shin et al., NeurIPS 2017) for a VAE.

While a task is learned, a frozen copy of the previous model, networks and prior, is kept. In every step it generates
`replay_images` new images of the earlier tasks, the mean images of latents from its prior, and the current model learns
them like real ones:

    loss = −ELBO(images of the task) + c . (images before / images now) . −ELBO(generated images).

Deviations: images are generated for every step instead of once into a file, so the cost of a step does not depend on
the number of tasks, and each image is seen once; if a prior has components per task, generated images are scored by
those of the finished tasks. Nothing is stored between tasks.
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from boovae.config.section import AtLeastOne, NotNegative, Section
from boovae.errors import InputError
from boovae.methods.method import Method, TaskImages
from boovae.model import VAE
from boovae.replicas import Batch, Draw, Replicas, bound_before, latent_draws


@dataclass(frozen=True)
class ReplaySettings(Section):
    """Generated images of the past."""

    replay_images: AtLeastOne = 250
    """Number of generated images in every batch."""
    replay_weight: NotNegative = 1.0
    """Weight of generated images, times (images before / images now)."""


class Replay(Method):
    """The model before the task generates images of earlier tasks, which are learned with the real ones."""

    name = "replay"
    summary = "learns images that its frozen predecessor generates, together with those of the task"
    sections = (ReplaySettings,)
    search = MappingProxyType({"replay_weight": (0.1, 0.3, 1.0, 3.0)})
    settled_by = 2

    own: ReplaySettings

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Keep a frozen copy of the model."""
        self._pixels = task.train.shape[-1]
        self.hold_to_past("replay_weight", replicas, task)

    def draws(self, batch_size: int) -> dict[str, Draw]:
        """Return the draws of latents and pixels of the generated images, and the noise of their encodings."""
        if self.tasks_seen < 2:
            return {}
        count, latent_dim = self.own.replay_images, self.settings.model.latent_dim
        draws = latent_draws(count, latent_dim, "replay_") | {"replay_noise": Draw("normal", (count, latent_dim))}
        if self.settings.data.binarize != "none":
            draws["replay_pixels"] = Draw("uniform", (count, self._pixels))
        return draws

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted mean of the generated images' negative ELBO.

        The KL term has its full weight even while that of the batch grows: these images are not new to the encoder, and
        validation losses of all epochs remain comparable.
        """
        if not batch["state"]:
            return {}
        bound = bound_before(model, self.generated(model, batch), batch["replay_noise"])
        return {"replay": batch["state"]["weight"] * bound.weighted(self.settings.training.kl_weight).mean()}

    def generated(self, model: VAE, batch: Batch) -> Tensor:
        """Return the teacher's images (n, D): grey means, or pixels of 0 and 1 if the data are binary."""
        draws = batch["replay_uniform"], batch["replay_normal"]
        images: Tensor = self.teacher.answer(model, batch["state"], lambda old: old.images(old.sample_before(*draws)))
        if "replay_pixels" in batch:
            return torch.lt(batch["replay_pixels"], images).to(images.dtype)
        if "pixels" in batch:
            raise InputError("replay: the images are binarised but {binarize} is none; set it to dynamic")
        return images
