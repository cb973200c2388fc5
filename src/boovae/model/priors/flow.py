"""A boosted prior behind a flow: v from a mixture, z = f(v) (the paper's appendix).

    log π(z) = log p₀(f⁻¹(z)) + log |det J of f⁻¹ at z|

The base p₀ is the boosted mixture, in v-space: the component of a pseudo-input u is N(f⁻¹(μ(u)), σ²(u)), so that with
f = identity nothing differs from a prior without a flow. f is a chain of affine couplings (RealNVP: Dinh,
Sohl-Dickstein and Bengio, 2017) that starts as the identity.

zuko is not used because its couplings look up their mask's positions in every call, which neither `vmap` over stacked
replicas nor a CUDA graph supports.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from boovae.model.distributions import DiagonalNormal
from boovae.model.priors.boosted import BoostedPrior
from boovae.model.priors.prior import Density, Encoder

#: The log of a coupling's scale stays between −LIMIT and LIMIT: no training step can make a layer singular.
LIMIT = 2.0


class Coupling(nn.Module):
    """Scale and shift one half of the latent by the outputs of a network that sees the other half."""

    def __init__(self, latent_dim: int, width: int, *, second: bool) -> None:
        super().__init__()
        self.cut, self.second = latent_dim // 2, second
        moved = latent_dim - self.cut if second else self.cut
        last = nn.Linear(width, 2 * moved)
        nn.init.zeros_(last.weight)  # starts as the identity
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(nn.Linear(latent_dim - moved, width), nn.LeakyReLU(), last)

    def forward(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (..., L) and log |det dz/dv| (...)."""
        still, moved, log_scale, shift = self._parts(v)
        return self._whole(still, moved * log_scale.exp() + shift), log_scale.sum(-1)

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return v (..., L) and log |det dv/dz| (...)."""
        still, moved, log_scale, shift = self._parts(z)
        return self._whole(still, (moved - shift) * (-log_scale).exp()), -log_scale.sum(-1)

    def _parts(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the half that stays, the half that is moved, and for it log-scale and shift."""
        first, second = v[..., : self.cut], v[..., self.cut :]
        still, moved = (first, second) if self.second else (second, first)
        raw, shift = self.net(still).chunk(2, dim=-1)
        return still, moved, LIMIT * torch.tanh(raw / LIMIT), shift

    def _whole(self, still: Tensor, moved: Tensor) -> Tensor:
        return torch.cat([still, moved] if self.second else [moved, still], dim=-1)


class Flow(nn.ModuleList):
    """A chain of couplings, z = f(v); without any it is the identity.

    >>> v = torch.randn(3, 4)
    >>> z, log_det = Flow(4, layers=2, width=8)(v)
    >>> bool((z == v).all() and (log_det == 0).all())  # it starts as the identity
    True
    """

    def __init__(self, latent_dim: int, layers: int, width: int) -> None:
        super().__init__(Coupling(latent_dim, width, second=layer % 2 == 0) for layer in range(layers))

    def forward(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (..., L) and log |det dz/dv| (...)."""
        log_det = torch.zeros_like(v[..., 0])
        for coupling in self:
            v, change = coupling(v)
            log_det = log_det + change
        return v, log_det

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return v (..., L) and log |det dv/dz| (...)."""
        log_det = torch.zeros_like(z[..., 0])
        for coupling in reversed(list(self)):
            assert isinstance(coupling, Coupling)
            z, change = coupling.inverse(z)
            log_det = log_det + change
        return z, log_det


class Pushed(NamedTuple):
    """The distribution of f(v), v from a base."""

    base: Density
    flow: Flow

    def log_prob(self, z: Tensor) -> Tensor:
        """Return the log-density at z (..., L)."""
        v, log_det = self.flow.inverse(z)
        return self.base.log_prob(v) + log_det

    def sample(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return latents (n, L) without gradient: penalties evaluated at samples must not move them."""
        z: Tensor = self.flow(self.base.sample(uniform, normal))[0]
        return z.detach()


class FlowPrior(BoostedPrior):
    """The boosted prior in v-space and the flow that maps it to z-space; stored Gaussians are in v-space."""

    def __init__(
        self, tasks: int, components: int, pixels: int, latent_dim: int, *, layers: int, width: int, **options: Any
    ) -> None:
        super().__init__(tasks, components, pixels, latent_dim, **options)
        with torch.random.fork_rng(devices=[]):  # the networks start as they do without a flow
            self.flow = Flow(latent_dim, layers, width)

    def component(self, encoder: Encoder, inputs: Tensor) -> DiagonalNormal:
        """Return the components of pseudo-inputs, in v-space."""
        mean, log_variance = encoder(inputs)
        return DiagonalNormal(self.inward(mean), log_variance)

    def inward(self, z: Tensor) -> Tensor:
        """Map points of z-space to v-space."""
        return self.flow.inverse(z)[0]

    def outward(self, mean: Tensor) -> Tensor:
        """Map points of v-space to z-space."""
        z: Tensor = self.flow(mean)[0]
        return z

    def stored(self, encoder: Encoder) -> DiagonalNormal:
        """Return the Gaussians of finished tasks, in v-space."""
        return super().stored(functools.partial(self.component, encoder))

    def before(self, encoder: Encoder) -> Pushed:
        """Return the prior of all finished tasks; its base is their mixture in v-space."""
        return Pushed(super().before(encoder), self.flow)

    def forward(self, encoder: Encoder, task: int | None = None) -> Density:
        """Return the whole prior, or one finished task's part of it."""
        return Pushed(super().forward(encoder, task), self.flow)

    def log_probs(self, encoder: Encoder, z: Tensor, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density at latents z (n, s, L), whole and under each image's own task's part."""
        v, log_det = self.flow.inverse(z)
        whole, own = super().log_probs(encoder, v, tasks)
        return whole + log_det, own + log_det

    def for_training(self, encoder: Encoder, *, old: bool = False) -> tuple[Density, DiagonalNormal | None]:
        """Return the prior with the task's own components alone (unless `elbo` is full); no penalty needs old ones."""
        return (Pushed(self.current(encoder), self.flow) if self.scores_current else self.forward(encoder)), None
