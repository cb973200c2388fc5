"""The loss of a step: the negative bound on the images plus the penalties of the methods."""

from contextlib import ExitStack

from torch import Tensor

from boovae.config import TrainingSettings
from boovae.data import ImageSpec
from boovae.errors import InputError
from boovae.methods import MethodList
from boovae.model.vae import VAE
from boovae.replicas.randomness import Draw
from boovae.replicas.step import Batch, Loss
from boovae.training import augment

#: Names in every batch and every loss; a method's draws and penalties must have others.
BATCH = frozenset({"x", "weight", "kl_weight", "state", "old_components"})
LOSS = ("loss", "reconstruction", "kl")


class Objective:
    """The loss of one replica's model on a batch, and the random tensors that it needs."""

    def __init__(self, settings: TrainingSettings, spec: ImageSpec, latent_dim: int, method: MethodList) -> None:
        self.settings, self.spec, self.latent_dim, self.method = settings, spec, latent_dim, method

    def __call__(self, model: VAE, batch: Batch) -> Loss:
        """Return the loss; `reconstruction` and `kl` are the parts of the ELBO; with several samples it is tighter."""
        weight, kl_weight, noise = batch["weight"], batch["kl_weight"], batch["latent"]
        x = augment.changed(batch["x"], batch, self.settings, self.spec)
        if "pixels" in batch:  # last: augmented images must be binary in the end, like the test images
            x = (batch["pixels"] < x).to(x.dtype)
        samples, tight = self.settings.bound_samples, None
        with ExitStack() as stack:
            for part in self.method.parts:
                stack.enter_context(part.perturbed(model, self.method.batch_of(part, batch)))
            # The batch is encoded first: batch normalisation and noisy weights apply to the first pass.
            posterior = model.posterior(x)
            wanted = any(part.wants_old_components for part in self.method.parts)
            density, old_components = model.prior.for_training(model.posterior, old=wanted)
            if samples == 1:
                bound = model.bound_at(x, posterior, posterior.rsample(noise), density)
            else:
                tight, bound = model.tight_bound(x, posterior, density, noise, kl_weight, batch.get("choice"))
        reconstruction, kl = ((part * (weight / samples)).sum() for part in bound)
        loss = reconstruction + kl_weight * kl if tight is None else (tight * weight).sum()
        batch = {**batch, "old_components": old_components}
        return Loss(loss, {"reconstruction": reconstruction, "kl": kl}, self._penalties(model, batch))

    def _penalties(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        penalties = self.method.joined(lambda part: part.penalty(model, self.method.batch_of(part, batch)))
        for name in penalties.keys() & LOSS:
            raise InputError(f"method '{self.method.name}': a penalty is called '{name}', a name that every loss has")
        return penalties

    def draws(self, batch_size: int, *, training: bool) -> dict[str, Draw]:
        """Return the random tensors of one step of one replica."""
        several = (self.settings.bound_samples,) if self.settings.bound_samples > 1 else ()
        draws = {"latent": Draw("normal", (*several, batch_size, self.latent_dim))}
        if training and several:
            draws["choice"] = Draw("uniform", (*several, batch_size))
        if training and self.spec.binarize == "dynamic":
            draws["pixels"] = Draw("uniform", (batch_size, self.spec.pixels))
        if training:
            draws |= augment.draws(self.settings, self.spec, batch_size)
        own = self.method.joined(lambda part: part.draws(batch_size))
        if training:
            own |= self.method.joined(lambda part: part.training_draws(batch_size))
        for name in own.keys() & (draws.keys() | BATCH):
            raise InputError(f"method '{self.method.name}': a draw is called '{name}', a name that every batch has")
        return draws | own
