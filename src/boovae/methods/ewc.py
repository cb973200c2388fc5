"""`ewc`: elastic weight consolidation (Kirkpatrick et al., 2017; the online form of Schwarz et al., 2018).

After task s, with weights θ_s, the diagonal Fisher information is the mean square of single images' gradients,

    F_s = mean_x (∇_θ −ELBO(x; θ_s))²,

over up to `ewc_images` of the task's n_s training images. Bayes' rule sums log-likelihoods, n_s times the mean over
images, while the loss of task t is a mean over its n_t images. Hence the penalty is

    λ/2 . Σ_s (n_s / n_t) Σ_i F_s,i (θ_i − θ_s,i)²,

where λ (`ewc_strength`) of 1 is the Laplace approximation to the posterior of the weights. The sum over tasks is kept
as one quadratic, P (θ − a)², exact up to a constant without gradient:

    P = Σ_s n_s F_s,  a = Σ_s n_s F_s θ_s / P (the plain mean of θ_s where P is 0),

so neither memory nor a step costs more with more tasks. With a decay γ (`ewc_decay`) below 1 it is online EWC:
P ← γ P + n_t F_t and a = θ_t, the latest weights.

Where it differs from the papers:

- The likelihood of a VAE is only bounded: the gradients are those of the negative ELBO with one latent sample per
  image, the loss that is trained (`kl_weight` and dynamic binarisation included), at the image itself: the empirical
  Fisher. The square includes the sampling variance.
- Kirkpatrick et al. leave tasks unweighted; with classes of equal size, n_s / n_t is 1 and there is no difference.
- Huszár (2018) shows that separate quadratics count early tasks twice, since θ_t is already close to them, and puts
  the anchor at the latest weights. That is online EWC with a decay just below 1; Schwarz et al. normalise every
  Fisher, which is not done here because it would undo the Bayesian weights.
- Only parameters shared by all tasks are penalised: not the prior's, not the heads of single tasks.
- In a combination the prior is the one left by the method before it: `boo+ewc` uses the finished mixture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor
from torch.func import grad, vmap

from boovae.config import Settings
from boovae.config.section import AtLeastOne, NotNegative, Section
from boovae.methods.method import Method, TaskImages
from boovae.model import VAE
from boovae.replicas import Batch, Draw, Replicas, replica_of

#: Maximum number of per-image gradient values in memory, by device, and of images per chunk.
CHUNK_VALUES, CHUNK_IMAGES = {"cuda": 2**28, "cpu": 2**25}, 64


@dataclass(frozen=True)
class EWCSettings(Section):
    """The quadratic penalty and its Fisher information."""

    ewc_strength: NotNegative = 100.0
    """Weight of the quadratic penalty; 1 is the Bayesian weight of a diagonal Gaussian."""
    ewc_decay: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """1 keeps the quadratics of all tasks; below 1 is online EWC, the share of the old one kept per task."""
    ewc_images: AtLeastOne = 1000
    """Number of images from which the Fisher information of a task is estimated."""


class EWC(Method):
    """Penalises changes of each weight in proportion to its Fisher information."""

    name = "ewc"
    summary = "keeps each weight near its old value, in proportion to its Fisher information"
    sections = (EWCSettings,)
    search = MappingProxyType({"ewc_strength": (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)})
    settled_by = 2

    own: EWCSettings

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Scale the quadratic penalty to the mean over this task's images."""
        if self.memory:
            self.state = {**self.memory, "scale": self.strength("ewc_strength", replicas) / task.own_images}

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return scale / 2 . Σ_i P_i (θ_i − a_i)²."""
        state: dict[str, Tensor] = batch["state"]
        return {"drift": 0.5 * state["scale"] * squared_drift(model, state, "precision")} if state else {}

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Add the task's quadratic penalty to the stored one."""
        decay, memory = self.own.ewc_decay, {}
        latest = self.shared(replicas.parameters)
        for name, information in fisher(replicas, task, list(latest), self.settings).items():
            theta = latest[name]
            anchor = self.memory.get(f"anchor.{name}", theta)
            precision = decay * self.memory.get(f"precision.{name}", torch.zeros_like(theta))
            precision += task.own_images * information
            share = torch.where(precision > 0, task.own_images * information / precision, 1 / (task.index + 1))
            memory[f"precision.{name}"] = precision
            memory[f"anchor.{name}"] = anchor + share * (theta - anchor) if decay == 1 else theta.clone()
        self.memory = memory

    def memory_shapes(self, replicas: Replicas, tasks: int, pixels: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of precision and anchor: those of the parameters."""
        return self.shapes_of(replicas, "precision", "anchor") if tasks else {}


def squared_drift(model: VAE, state: dict[str, Tensor], stiffness: str) -> Tensor:
    """Return Σ_i s_i (θ_i − a_i)² over the parameters with a stiffness s and an `anchor` a in `state`."""
    drifts = [
        (state[f"{stiffness}.{name}"] * (parameter - state[f"anchor.{name}"]).square()).sum()
        for name, parameter in model.named_parameters()
        if f"{stiffness}.{name}" in state
    ]
    return torch.stack(drifts).sum()


def fisher(replicas: Replicas, task: TaskImages, names: list[str], settings: Settings) -> dict[str, Tensor]:
    """Return the mean squared per-image gradients of the named parameters on the task's own images, {name: (R, ...)}.

    Replicas run one after another and images in chunks: a chunk's gradients of all parameters are in memory at once.
    """
    generators = replicas.generators
    count = min(settings.of(EWCSettings).ewc_images, task.own_images)
    chosen = generators.order(task.own_images, "ewc", task.index)[:, :count]
    noise = generators.draw(Draw("normal", (count, settings.model.latent_dim)), "ewc", task.index, "latent")
    own = task.train[..., -task.own_images :, :]  # images added by other methods come first
    images = torch.stack([(own if own.dim() == 2 else own[r])[order] for r, order in enumerate(chosen)])
    if settings.data.binarize == "dynamic":
        uniform = generators.draw(Draw("uniform", (count, images.shape[-1])), "ewc", task.index, "pixels")
        images = (uniform < images).to(images.dtype)
    rows, kl_weight = [], settings.training.kl_weight
    for r in range(len(replicas)):
        tensors = replica_of(replicas.tensors(), r)
        rows.append(squared_gradients(replicas, tensors, names, images[r], noise[r], kl_weight))
    return {name: torch.stack([row[name] for row in rows]) / count for name in names}


def squared_gradients(
    replicas: Replicas, tensors: dict[str, Tensor], names: list[str], images: Tensor, noise: Tensor, kl_weight: float
) -> dict[str, Tensor]:
    """Return Σ_x (∇ −ELBO(x))² of one replica with these tensors, over images (N, D) with noise (N, L)."""

    def loss(learned: dict[str, Tensor], x: Tensor, noise: Tensor) -> Tensor:
        bound = replicas.call({**tensors, **learned}, VAE.bound, x.unsqueeze(0), noise.unsqueeze(0))
        return bound.weighted(kl_weight).sum()

    each: Callable[..., dict[str, Tensor]] = vmap(grad(loss), in_dims=(None, 0, 0))
    learned = {name: tensors[name] for name in names}
    totals = {name: torch.zeros_like(tensor) for name, tensor in learned.items()}
    chunk = max(1, min(CHUNK_IMAGES, CHUNK_VALUES[replicas.device.type] // replicas.size))
    for x, z in zip(images.split(chunk), noise.split(chunk), strict=True):
        for name, gradients in each(learned, x, z).items():
            totals[name] += gradients.square_().sum(0)
    return totals
