"""Mixtures that gain a few components with each task; the prior of BooVAE is one of them."""

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor, nn

from boovae.model.distributions import DiagonalMixture, DiagonalNormal
from boovae.model.priors.prior import Density, Encoder, Prior

#: The log-weight of an empty slot: no mass, but finite gradients.
EMPTY = -1e4
#: Capacity grows by this number of tasks, so that shapes, and compiled code, stay valid for many tasks.
ROOM = 10


class TaskMixture(Prior):
    """r(z) = Σ_s ρ_s Σ_k v_sk N(z; mean_sk, variance_sk): task masses ρ, weights v inside a task.

    Components of finished tasks are stored Gaussians or, with `reencode`, the current encodings of their pseudo-inputs.
    While a task is learned (`live`), `current` returns its own components; `elbo` decides whether its images are scored
    by these alone or by the whole mixture.
    """

    shares_mass = True

    pseudo_inputs: Tensor  # (T, K, D) of finished tasks
    mean: Tensor  # (T, K, L)
    log_variance: Tensor  # (T, K, L)
    log_weights: Tensor  # (T, K), each row sums to one; rows without a task are empty
    log_masses: Tensor  # (T,), sum to one, together with `live_log_mass` while a task is learned
    live_log_weights: Tensor  # (K,) of the task in training, sum to one
    live_log_mass: Tensor  # ()

    def __init__(
        self, tasks: int, components: int, pixels: int, latent_dim: int, elbo: str = "current", reencode: bool = False
    ) -> None:
        super().__init__()
        rows = ROOM * max(1, -(-tasks // ROOM))
        self.components = rows * components
        self.seen = tasks  # number of rows that hold a task (the last may be in training); the others are empty
        self.live, self.elbo, self.reencode = False, elbo, reencode
        self.register_buffer("pseudo_inputs", torch.zeros(rows, components, pixels))
        self.register_buffer("mean", torch.zeros(rows, components, latent_dim))
        self.register_buffer("log_variance", torch.zeros(rows, components, latent_dim))
        self.register_buffer("log_weights", torch.full((rows, components), EMPTY))
        self.register_buffer("log_masses", torch.full((rows,), EMPTY))
        self.register_buffer("live_log_weights", torch.full((components,), EMPTY))
        self.register_buffer("live_log_mass", torch.full((), EMPTY))

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return the prior of a model, which must be of this kind."""
        assert isinstance(model.prior, cls)
        return model.prior

    @abstractmethod
    def current(self, encoder: Encoder) -> DiagonalMixture:
        """Return the mixture of the components of the task in training."""

    @property
    def rows(self) -> int:
        """The number of rows used: those of finished tasks; compiled code includes empty rows to keep its shapes."""
        return len(self.log_masses) if torch.compiler.is_compiling() else max(self.seen - self.live, 1)

    @property
    def gaussians(self) -> DiagonalNormal:
        """The stored Gaussians of finished tasks, (T, K, L)."""
        return DiagonalNormal(self.mean[: self.rows], self.log_variance[: self.rows])

    def stored(self, encoder: Encoder) -> DiagonalNormal:
        """Return the Gaussians of finished tasks, (T, K, L), stored or re-encoded."""
        return encoder(self.pseudo_inputs[: self.rows]) if self.reencode else self.gaussians

    def encoded(self, encoder: Encoder) -> DiagonalNormal:
        """Return the current encodings of the pseudo-inputs of finished tasks, (T K, L)."""
        return encoder(self.pseudo_inputs[: self.rows].flatten(0, 1))

    def outward(self, mean: Tensor) -> Tensor:
        """Map means of components to latents: the identity, unless there is a flow."""
        return mean

    def inward(self, z: Tensor) -> Tensor:
        """Map latents z to the space of the components: the identity, unless there is a flow."""
        return z

    def before(self, encoder: Encoder) -> Density:
        """Return the mixture of all finished tasks."""
        return self._mixture(torch.log_softmax(self.log_masses[: self.rows], 0), self.stored(encoder))

    def stored_mixture(self) -> DiagonalMixture:
        """Return the stored mixture of all finished tasks."""
        return self._mixture(torch.log_softmax(self.log_masses[: self.rows], 0), self.gaussians)

    def forward(self, encoder: Encoder, task: int | None = None) -> Density:
        """Return the whole mixture, or one finished task's part of it."""
        if task is not None:
            stored = self.stored(encoder)
            return DiagonalMixture(self.log_weights[task], stored.mean[task], stored.log_variance[task])
        finished = self._mixture(self.log_masses[: self.rows], self.stored(encoder))
        if not self.live:
            return finished
        log_weights, mean, log_variance = self.current(encoder)
        current = DiagonalMixture(self.live_log_mass + log_weights, mean, log_variance)
        return DiagonalMixture(*(torch.cat(parts) for parts in zip(finished, current, strict=True)))

    def log_probs(self, encoder: Encoder, z: Tensor, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density at latents z (n, s, L) under the whole mixture and under each image's own task.

        One image (1, s, L) with several tasks (n,) is scored by each of them.
        """
        mixture = self._mixture(self.log_masses[: self.rows], self.stored(encoder))
        scores = mixture.component_log_probs(z)  # (n, s, T K)
        count = self.log_weights.shape[-1]
        columns = tasks.unsqueeze(-1) * count + torch.arange(count, device=tasks.device)  # (n, K)
        own = torch.take_along_dim(scores, columns.unsqueeze(-2), -1)  # (n, s, K)
        return (
            torch.logsumexp(scores + mixture.log_weights, -1),
            torch.logsumexp(own + self.log_weights[tasks].unsqueeze(-2), -1),
        )

    def _mixture(self, log_masses: Tensor, parts: DiagonalNormal) -> DiagonalMixture:
        """Return the components (T, K, L) of finished tasks as one mixture with these task masses (T,)."""
        log_weights = log_masses.unsqueeze(1) + self.log_weights[: self.rows]
        return DiagonalMixture(log_weights.flatten(), parts.mean.flatten(0, 1), parts.log_variance.flatten(0, 1))

    @property
    def scores_current(self) -> bool:
        """Whether images are scored by the components of their own task alone.

        The mass of the task is then a constant; under the whole mixture, new images would move to old components.
        """
        return self.live and self.elbo == "current"

    def for_training(self, encoder: Encoder, *, old: bool = False) -> tuple[Density, DiagonalNormal | None]:
        """Return the task's own mixture (unless `elbo` is full), and the current encodings of old pseudo-inputs."""
        density = self.current(encoder) if self.scores_current else self.forward(encoder)
        return density, self.encoded(encoder) if old else None


class BoostedPrior(TaskMixture):
    """The prior of BooVAE: components are the encoder's posteriors at pseudo-inputs, with gradients in training."""

    live_inputs: Tensor  # (K, D) of the task in training

    def __init__(self, tasks: int, components: int, pixels: int, latent_dim: int, **options: Any) -> None:
        super().__init__(tasks, components, pixels, latent_dim, **options)
        self.register_buffer("live_inputs", torch.zeros(components, pixels))

    def component(self, encoder: Encoder, inputs: Tensor) -> DiagonalNormal:
        """Return the components of pseudo-inputs (K, D)."""
        return encoder(inputs)

    def current(self, encoder: Encoder) -> DiagonalMixture:
        """Return the mixture of the current encodings of the live pseudo-inputs."""
        return DiagonalMixture(self.live_log_weights, *self.component(encoder, self.live_inputs))

    def for_training(self, encoder: Encoder, *, old: bool = False) -> tuple[Density, DiagonalNormal | None]:
        """Return the task's own mixture (unless `elbo` is full), and the current encodings of old pseudo-inputs.

        All are encoded in one pass: on a GPU the cost of small products is their number.
        """
        if not (old and self.scores_current):
            return super().for_training(encoder, old=old)
        count = len(self.live_inputs)
        both = encoder(torch.cat([self.live_inputs, self.pseudo_inputs[: self.rows].flatten(0, 1)]))
        live, stored = (DiagonalNormal(*(part[rows] for part in both)) for rows in (slice(count), slice(count, None)))
        return DiagonalMixture(self.live_log_weights, *live), stored


class FreeMixture(TaskMixture):
    """A mixture whose live components are free Gaussians, learned with the networks."""

    def __init__(self, tasks: int, components: int, pixels: int, latent_dim: int, **options: Any) -> None:
        super().__init__(tasks, components, pixels, latent_dim, **options)
        self.live_mean = nn.Parameter(torch.zeros(components, latent_dim))
        self.live_log_variance = nn.Parameter(torch.zeros(components, latent_dim))

    def current(self, encoder: Encoder) -> DiagonalMixture:
        """Return the mixture of the free Gaussians."""
        return DiagonalMixture(self.live_log_weights, self.live_mean, self.live_log_variance)
