"""The theory behind the boosted prior in numbers: one dimension, integrals by the trapezoid rule."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, distributions, nn

from boovae.boosting.losses import forward_loss, literal_loss
from boovae.model.distributions import DiagonalMixture, DiagonalNormal
from boovae.model.likelihoods import Normal
from boovae.model.nets import Encoder, hidden_layers
from boovae.model.priors import BoostedPrior
from boovae.model.vae import VAE

pytestmark = pytest.mark.usefixtures("float64")

#: Where densities over z are known; they are all zero outside.
Z = torch.linspace(-30, 30, 12_001, dtype=torch.float64)
#: Standard normal noise as nodes and weights: a mean over them is an integral.
NODES = torch.linspace(-9, 9, 1801, dtype=torch.float64)
NODE_WEIGHTS = torch.softmax(-0.5 * NODES.square(), 0)


def integral(values: Tensor) -> Tensor:
    return torch.trapezoid(values, Z)


def kl(p: Tensor, q: Tensor) -> float:
    """KL[p ‖ q] of densities on the grid."""
    inside = p > 0
    return integral(torch.where(inside, p * (p.where(inside, 1.0).log() - q.where(inside, 1.0).log()), 0.0)).item()


def random_density(seed: int, spread: float = 2.0, broad: float = 0.0) -> Tensor:
    """A mixture of three Gaussians on the grid; `broad` adds to their variances."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(3, generator=generator) + 0.2
    mean = spread * torch.randn(3, generator=generator)
    scale = (torch.rand(3, generator=generator) + 0.3 + broad).sqrt()
    density: Tensor = distributions.Normal(mean, scale).log_prob(Z.unsqueeze(1)).exp() @ (weights / weights.sum())
    return density


# --- the ELBO and the optimal prior ---------------------------------------------------------------------------------


def aggregated(posterior: DiagonalNormal) -> Tensor:
    """q̂ on the grid: the mean of the posteriors' densities."""
    scale = (0.5 * posterior.log_variance).exp()
    density: Tensor = distributions.Normal(posterior.mean, scale).log_prob(Z).exp().mean(0)
    return density


def small_model(seed: int) -> tuple[VAE, BoostedPrior]:
    """A VAE with one latent dimension, three pixels and a boosted prior of four components."""
    torch.manual_seed(seed)
    prior = BoostedPrior(1, 4, pixels=3, latent_dim=1)
    prior.mean[0], prior.log_variance[0] = 2 * torch.randn(4, 1), torch.randn(4, 1)
    prior.log_weights[0] = torch.randn(4).log_softmax(0)
    prior.log_masses[0] = 0.0
    encoder = Encoder(nn.Sequential(*hidden_layers(3, 5, gated=False)), 5, 1, (-4.0, 2.0))
    decoder = nn.Sequential(*hidden_layers(1, 5, gated=False), nn.Linear(5, 3))
    return VAE(encoder, decoder, Normal(0.0), prior, 1).requires_grad_(False), prior


def elbo(model: VAE, x: Tensor) -> tuple[float, float]:
    """The mean ELBO of images (n, 3) and its reconstruction part, as the training computes them, noise integrated."""
    bound = model.bound(x.repeat_interleave(len(NODES), 0), NODES.repeat(len(x)).unsqueeze(1))
    reconstruction, divergence = (-(part.view(len(x), -1) @ NODE_WEIGHTS).mean() for part in bound)
    return (reconstruction + divergence).item(), reconstruction.item()


def prior_density(prior: BoostedPrior) -> Tensor:
    scale = (0.5 * prior.log_variance[0, :, 0]).exp()
    parts = distributions.Normal(prior.mean[0, :, 0], scale).log_prob(Z.unsqueeze(1)).exp()
    density: Tensor = parts @ prior.log_weights[0].exp()
    return density


@pytest.mark.parametrize("seed", range(3))
def test_the_elbo_is_reconstruction_minus_information_minus_the_divergence_of_the_prior(seed: int) -> None:
    (model, prior), x = small_model(seed), 5 * torch.randn(6, 3)
    posterior = model.posterior(x)
    pooled = aggregated(posterior)
    one_by_one = [aggregated(DiagonalNormal(*(part[[i]] for part in posterior))) for i in range(len(x))]
    information = sum(kl(one, pooled) for one in one_by_one) / len(x)
    whole, reconstruction = elbo(model, x)
    assert information > 0.01  # the terms are there
    assert whole == pytest.approx(reconstruction - information - kl(pooled, prior_density(prior)), abs=1e-4)


def test_no_prior_gives_a_better_elbo_than_the_aggregated_posterior() -> None:
    (model, prior), x = small_model(0), 5 * torch.randn(4, 3)
    posterior = model.posterior(x)

    def with_prior(mean: Tensor, log_variance: Tensor) -> float:
        prior.mean[0], prior.log_variance[0] = mean, log_variance
        return elbo(model, x)[0]

    prior.log_weights[0] = math.log(0.25)
    best = with_prior(*posterior)
    for seed in range(10):
        torch.manual_seed(seed)
        change = 0.1 * torch.randn(2, 4, 1)
        assert with_prior(posterior.mean + change[0], posterior.log_variance + change[1]) < best


def test_the_optimal_prior_of_two_sources_mixes_them_by_their_shares() -> None:
    first, second = random_density(0), random_density(1)
    for share in (0.1, 0.5, 0.8):

        def loss(prior: Tensor, share: float = share) -> float:
            return share * kl(first, prior) + (1 - share) * kl(second, prior)

        best = share * first + (1 - share) * second
        for other in (random_density(seed, broad=0.5) for seed in range(2, 6)):
            for step in (0.01, 0.3, 1.0):
                perturbed = (1 - step) * best + step * other
                assert loss(perturbed) > loss(best)
                assert loss(perturbed) - loss(best) == pytest.approx(kl(best, perturbed), rel=1e-6)
        for wrong in (share - 0.05, share + 0.05):
            assert loss(wrong * first + (1 - wrong) * second) > loss(best)


# --- the expansion (1 − β) r + β h ----------------------------------------------------------------------------------


class Expansion(NamedTuple):
    """Two sources with their shares, the mixture r so far and a new component h; r has the broadest tails."""

    share: float
    first: Tensor
    second: Tensor
    r: Tensor
    h: Tensor

    @property
    def target(self) -> Tensor:
        return self.share * self.first + (1 - self.share) * self.second

    def loss(self, beta: float, h: Tensor | None = None) -> float:
        """F = α KL[q̂1 ‖ m] + (1 − α) KL[q̂2 ‖ m] with m = (1 − β) r + β h."""
        mixture = (1 - beta) * self.r + beta * (self.h if h is None else h)
        return self.share * kl(self.first, mixture) + (1 - self.share) * kl(self.second, mixture)


def expansion(seed: int) -> Expansion:
    first, second, h = (random_density(10 * seed + part) for part in range(3))
    return Expansion(0.2 + 0.2 * seed, first, second, random_density(10 * seed + 3, broad=2.0), h)


seeds = pytest.mark.parametrize("seed", range(4))


@seeds
def test_the_loss_is_convex_in_the_weight(seed: int) -> None:
    case, step = expansion(seed), 1e-3
    for beta in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
        below, here, above = (case.loss(beta + change) for change in (-step, 0, step))
        mixture = (1 - beta) * case.r + beta * case.h
        truth = integral(case.target * ((case.h - case.r) / mixture).square()).item()
        assert below - 2 * here + above > 0
        assert (below - 2 * here + above) / step**2 == pytest.approx(truth, rel=0.02)


@seeds
def test_the_loss_is_convex_in_the_component(seed: int) -> None:
    case, other = expansion(seed), random_density(100 + seed)
    for beta in (0.1, 0.5, 0.9):
        one, two = case.loss(beta), case.loss(beta, other)
        for share in (0.25, 0.5, 0.75):
            assert case.loss(beta, share * case.h + (1 - share) * other) < share * one + (1 - share) * two


@seeds
def test_the_functional_gradient_is_one_minus_the_overlap_of_the_component_with_target_over_mixture(seed: int) -> None:
    case, step = expansion(seed), 1e-4
    gradient = 1 - integral(case.h * case.target / case.r).item()
    start, once, twice = (case.loss(step * i) for i in range(3))
    assert (4 * once - twice - 3 * start) / (2 * step) == pytest.approx(gradient, rel=1e-4, abs=1e-5)
    assert abs(gradient) > 0.01


def test_the_forward_objective_starts_with_the_functional_gradient() -> None:
    """Its slope in β, at β = 0, is 1 − E_π[h / r]."""
    z = torch.randn(500, 1)
    h = DiagonalNormal(torch.tensor([0.7]), torch.tensor([-1.0]))
    r = distributions.Normal(-0.5, 1.5).log_prob(z).squeeze(1)
    logit = torch.tensor(-18.0, requires_grad=True)
    forward_loss(h, logit, z, r).backward()
    assert logit.grad is not None
    beta = torch.sigmoid(logit.detach())
    ratio = distributions.Normal(0.7, math.exp(-0.5)).log_prob(z).squeeze(1).sub(r).exp()
    assert (logit.grad / (beta * (1 - beta))).item() == pytest.approx(1 - ratio.mean().item(), rel=1e-5)


@seeds
def test_the_literal_objective_bounds_the_overlap_by_jensen(seed: int) -> None:
    """The log of ∫ h π/r is at least ∫ h log(π/r), which `literal_loss` maximises together with the entropy of h."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(2, 2, 3, 1, generator=generator)
    target, r = (DiagonalMixture(torch.zeros(3).log_softmax(0), 2 * part[0], part[1]) for part in parts)
    h = DiagonalNormal(*torch.randn(2, 1, generator=generator).sub(1).unsqueeze(1))
    density = distributions.Normal(h.mean, (0.5 * h.log_variance).exp())
    ratio = target.log_prob(Z.unsqueeze(1)) - r.log_prob(Z.unsqueeze(1))
    log_h = density.log_prob(Z)
    overlap = integral((log_h + ratio).exp()).log()
    bound = integral(log_h.exp() * ratio)
    assert overlap > bound + 1e-3
    # Stratified noise makes the sampled objective an integral.
    noise = distributions.Normal(0.0, 1.0).icdf((torch.arange(20_000) + 0.5) / 20_000).unsqueeze(1)
    assert literal_loss(h, noise, target, r).item() == pytest.approx(
        (-density.entropy().sum() - bound).item(), rel=1e-3, abs=1e-3
    )
    # Where the mixture is the target there is nothing to gain: both sides are zero.
    assert literal_loss(h, noise, target, target).item() == pytest.approx(-density.entropy().item())
