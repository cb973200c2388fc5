"""The interface of likelihoods."""

from abc import ABC, abstractmethod

from torch import Tensor

from boovae.model.distributions import Side


class Likelihood(ABC):
    """p(x | z) for a decoder output of shape (..., D); stateless."""

    name: str
    #: Whether the decoder gives logits of pixels in [0, 1].
    logits = False
    #: Number of the decoder's outputs for each pixel; they come in blocks of the size of an image.
    parameters = 1
    #: Whether `log_prob` is the probability of an 8-bit value, which is comparable in bits per dimension.
    discrete = False

    @property
    def own_units(self) -> bool:
        """Whether the decoder's outputs have other units than pixels."""
        return self.logits or self.discrete

    @abstractmethod
    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Return log p(x | output) summed over the pixels: (..., D) -> (...)."""

    def mean(self, output: Tensor) -> Tensor:
        """Return the mean image (..., D): the decoder's output, unless that is logits."""
        return output

    @abstractmethod
    def divergence(self, output: Tensor, other: Tensor, side: Side = "symmetric") -> Tensor:
        """Return KL[p | p'] (forward), KL[p' | p] (reverse) or their mean, summed over pixels: (..., D) -> (...)."""

    @abstractmethod
    def draw(self, output: Tensor, uniform: Tensor) -> Tensor:
        """Return an image drawn from p(x | output), given uniform random numbers (..., D)."""

    def bounded(self, output: Tensor) -> Tensor:
        """Return `output` clamped as in the evaluation; training does not clamp it."""
        return output


def inside(uniform: Tensor) -> Tensor:
    """Keep uniform random numbers away from 0 and 1, whose quantiles are infinite."""
    return uniform.clamp(1e-7, 1 - 1e-7)
