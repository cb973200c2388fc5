"""The interface of priors."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from boovae.model.distributions import DiagonalNormal, StandardNormal

Encoder = Callable[[Tensor], DiagonalNormal]


class Density(Protocol):
    """A distribution over latents."""

    def log_prob(self, z: Tensor) -> Tensor:
        """Return the log-density at z (..., L): (...)."""

    def sample(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return latents (n, L) from uniform (n,) and standard normal (n, L) random numbers."""


def kl(posterior: DiagonalNormal, z: Tensor, density: Density) -> Tensor:
    """Return log q(z | x) − log p(z) at the sample z (B, L): (B,), or its mean in closed form where there is one.

    At several samples z (S, B, L) it is returned for each, (S, B).
    """
    if isinstance(density, StandardNormal) and z.dim() == posterior.mean.dim():
        return posterior.kl_to_standard()
    return posterior.log_prob(z) - density.log_prob(z)


class Prior(nn.Module, ABC):
    """A module whose call returns the prior's distribution; priors with pseudo-inputs need the encoder for it.

    Scoring and sampling use the same distribution, that of `forward`.
    """

    #: Whether tasks share the prior's mass, so that a new task makes old images less likely by dilution alone.
    shares_mass = False
    #: Number of components; 0 if the prior is not a mixture.
    components = 0

    @abstractmethod
    def forward(self, encoder: Encoder, task: int | None = None) -> Density:
        """Return the distribution; with `task`, only that task's own part of it, normalised."""

    def before(self, encoder: Encoder) -> Density:
        """Return the prior of the tasks before the current one."""
        return self.forward(encoder)

    def log_probs(self, encoder: Encoder, z: Tensor, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(z) at latents z (n, s, L) of images of `tasks` (n,), whole and of their task's own part."""
        whole = self.forward(encoder).log_prob(z)
        return whole, whole

    def for_training(self, encoder: Encoder, *, old: bool = False) -> tuple[Density, DiagonalNormal | None]:
        """Return the density that scores images of the task in training and, with `old`, old components.

        These are the current encodings of finished tasks' pseudo-inputs (C, L), or None if there are none. Each
        pseudo-input is encoded once.
        """
        return self.forward(encoder), None
