from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, kl_divergence

from boovae.model.distributions import DiagonalMixture, DiagonalNormal, StandardNormal
from conftest import in_torch

#: The largest number that `Tensor.uniform_` gives in float32.
ALMOST_ONE = 1 - 2**-24


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def reference(mean: Tensor, log_variance: Tensor) -> Distribution:
    return Independent(Normal(mean, (0.5 * log_variance).exp()), 1)


def random_mixture(components: int, latent_dim: int, seed: int = 0) -> DiagonalMixture:
    return DiagonalMixture(
        randn(components, seed=seed).log_softmax(-1),
        3 * randn(components, latent_dim, seed=seed + 1),
        2 * randn(components, latent_dim, seed=seed + 2),
    )


# --- one Gaussian ---------------------------------------------------------------------------------------------------


def test_normal_log_density_equals_torch_distributions() -> None:
    mean, log_variance, z = randn(5, 4, 3), 2 * randn(5, 4, 3, seed=1), 3 * randn(5, 4, 3, seed=2)
    torch.testing.assert_close(
        DiagonalNormal(mean, log_variance).log_prob(z), reference(mean, log_variance).log_prob(z)
    )


def test_standard_normal_log_density_equals_torch_distributions() -> None:
    z = 4 * randn(7, 2, 5)
    zero = torch.zeros(5, dtype=torch.float64)
    torch.testing.assert_close(StandardNormal(5).log_prob(z), reference(zero, zero).log_prob(z))


def test_kl_to_the_standard_normal_equals_torch_distributions() -> None:
    mean, log_variance = 2 * randn(6, 4), 2 * randn(6, 4, seed=1)
    zero = torch.zeros(6, 4, dtype=torch.float64)
    expected = kl_divergence(reference(mean, log_variance), reference(zero, zero))
    torch.testing.assert_close(DiagonalNormal(mean, log_variance).kl_to_standard(), expected)


def test_kl_is_the_mean_of_the_log_ratio_over_samples() -> None:
    posterior = DiagonalNormal(randn(1, 3), randn(1, 3, seed=1) - 1)
    z = posterior.rsample(randn(200_000, 3, seed=2))
    ratio = posterior.log_prob(z) - StandardNormal(3).log_prob(z)
    assert ratio.mean().item() == pytest.approx(posterior.kl_to_standard().item(), abs=0.02)


def test_kl_of_the_standard_normal_to_itself_is_zero() -> None:
    zero = torch.zeros(2, 5)
    assert DiagonalNormal(zero, zero).kl_to_standard().tolist() == [0.0, 0.0]


def test_samples_have_the_mean_and_variance_asked_for() -> None:
    mean, log_variance = torch.tensor([1.0, -2.0]), torch.tensor([-3.0, 1.5])
    z = DiagonalNormal(mean, log_variance).rsample(randn(200_000, 2).float())
    torch.testing.assert_close(z.mean(0), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(z.var(0), log_variance.exp(), atol=0, rtol=0.02)


def test_gradients_flow_through_samples() -> None:
    mean, log_variance = randn(4).requires_grad_(), randn(4, seed=1).requires_grad_()
    noise = randn(4, seed=2)
    DiagonalNormal(mean, log_variance).rsample(noise).sum().backward()
    assert mean.grad is not None
    assert log_variance.grad is not None
    torch.testing.assert_close(mean.grad, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(log_variance.grad, 0.5 * noise * (0.5 * log_variance.detach()).exp())


@pytest.mark.parametrize("log_variance", [-20.0, -6.0, 0.0, 4.0, 20.0])
@pytest.mark.parametrize("place", [0.0, 10.0, 1000.0])
def test_float32_log_density_keeps_its_precision_at_extreme_variances_and_far_means(
    log_variance: float, place: float
) -> None:
    # Inputs are rounded to float32 first, so that only the computation differs.
    mean = (place + randn(50, 8)).float()
    variance = torch.full((50, 8), log_variance)
    z = (mean.double() + randn(50, 8, seed=1) * math.exp(log_variance / 2)).float()
    for one, two in (
        (DiagonalNormal(mean, variance).log_prob(z), DiagonalNormal(mean.double(), variance.double()).log_prob(z)),
        (
            DiagonalNormal(mean, variance).kl_to_standard(),
            DiagonalNormal(mean.double(), variance.double()).kl_to_standard(),
        ),
    ):
        torch.testing.assert_close(one.double(), two.double(), rtol=2e-6, atol=1e-4)


# --- mixtures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("components", [1, 2, 15])
def test_mixture_log_density_equals_torch_distributions(components: int) -> None:
    mixture = random_mixture(components, 4)
    z = 4 * randn(6, 5, 4, seed=9)
    torch.testing.assert_close(mixture.log_prob(z), in_torch(mixture).log_prob(z))


def test_mixture_density_integrates_to_one() -> None:
    mixture = random_mixture(5, 1)
    z = torch.linspace(-60, 60, 400_001, dtype=torch.float64)
    assert torch.trapezoid(mixture.log_prob(z.unsqueeze(-1)).exp(), z).item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("place", [3.0, 10.0, 100.0])
def test_float32_mixture_does_not_lose_tenths_of_a_nat_at_narrow_far_components(place: float) -> None:
    mean = (place * randn(20, 40)).float()
    mixture = DiagonalMixture(torch.full((20,), -math.log(20)), mean, torch.full((20, 40), -6.0))
    z = (mean.double() + randn(20, 40, seed=1) * math.exp(-3)).float()
    exact = DiagonalMixture(*(part.double() for part in mixture)).log_prob(z.double())
    torch.testing.assert_close(mixture.log_prob(z).double(), exact, atol=1e-4, rtol=1e-6)


def test_mixture_stays_finite_far_from_every_component() -> None:
    mixture = DiagonalMixture(torch.full((3,), -math.log(3)), torch.zeros(3, 40), torch.full((3, 40), -6.0))
    z = torch.full((2, 40), 1000.0, requires_grad=True)
    value = mixture.log_prob(z)
    value.sum().backward()
    assert z.grad is not None
    assert value.isfinite().all()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("log_weight", [-30.0, -1e3, -1e9, -3e38])
def test_a_component_without_weight_changes_nothing_and_keeps_gradients_finite(log_weight: float) -> None:
    whole = random_mixture(4, 3)
    parts = [part.float() for part in whole]
    extended = [torch.cat([part, part[:1] + 1]) for part in parts]
    extended[0][-1] = log_weight
    leaves = [part.requires_grad_() for part in extended]
    z = randn(10, 3, seed=5).float().requires_grad_()
    value = DiagonalMixture(*leaves).log_prob(z)
    torch.testing.assert_close(value, DiagonalMixture(*parts).log_prob(z), atol=1e-6, rtol=1e-6)
    value.sum().backward()
    for leaf in (*leaves, z):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    weight_gradient = leaves[0].grad
    assert weight_gradient is not None
    assert abs(weight_gradient[-1].item()) < 1e-6


def test_mixture_gradients_equal_torch_distributions() -> None:
    mixture = random_mixture(6, 3)
    z = randn(8, 3, seed=7)
    ours = [part.clone().requires_grad_() for part in (*mixture, z)]
    theirs = [part.clone().requires_grad_() for part in (*mixture, z)]
    DiagonalMixture(*ours[:3]).log_prob(ours[3]).sum().backward()
    # Categorical normalises the logits itself, so compare the mean, variance and place only.
    in_torch(DiagonalMixture(*theirs[:3])).log_prob(theirs[3]).sum().backward()
    for one, two in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_mixture_components_are_drawn_as_often_as_they_weigh() -> None:
    weights = torch.tensor([0.05, 0.5, 0.0, 0.2, 0.25])
    log_weights = weights.log().clamp(min=-1e9)
    mean = 100.0 * torch.arange(5.0).unsqueeze(-1)
    mixture = DiagonalMixture(log_weights, mean, torch.zeros(5, 1))
    count = 200_000
    z = mixture.sample(torch.rand(count, generator=generator()), torch.randn(count, 1, generator=generator(1)))
    assert z.shape == (count, 1)
    chosen = (z / 100).round().squeeze(-1).long()
    share = chosen.bincount(minlength=5) / count
    spread = (weights * (1 - weights) / count).sqrt()
    assert ((share - weights).abs() <= 5 * spread).all()
    assert share[2].item() == 0


def test_mixture_samples_have_the_mixtures_moments() -> None:
    mixture = random_mixture(4, 2)
    z = mixture.sample(torch.rand(300_000, generator=generator(3)), randn(300_000, 2, seed=4))
    exact = in_torch(mixture)
    torch.testing.assert_close(z.mean(0), exact.mean, atol=0.06, rtol=0)
    torch.testing.assert_close(z.var(0), exact.variance, atol=0, rtol=0.05)


def test_log_weights_need_not_be_normalised_to_sample() -> None:
    mixture = random_mixture(4, 2)
    uniform, normal = torch.rand(100, generator=generator()), randn(100, 2)
    moved = mixture._replace(log_weights=mixture.log_weights + 7)
    torch.testing.assert_close(moved.sample(uniform, normal), mixture.sample(uniform, normal))


@pytest.mark.parametrize("components", [1, 2, 7, 15, 150, 1000])
def test_the_smallest_and_largest_random_numbers_choose_a_component(components: int) -> None:
    mean = torch.arange(float(components)).unsqueeze(-1)
    mixture = DiagonalMixture(torch.full((components,), -math.log(components)), mean, torch.zeros(components, 1))
    z = mixture.sample(torch.tensor([0.0, ALMOST_ONE]), torch.zeros(2, 1))
    assert z.flatten().tolist() == [0.0, components - 1.0]


@pytest.mark.parametrize(("empty", "uniform"), [(0, 0.0), (-1, ALMOST_ONE)], ids=["first", "last"])
def test_a_component_without_weight_is_never_drawn(empty: int, uniform: float) -> None:
    drawn = 0.0
    for seed in range(100):
        log_weights = torch.randn(16, generator=generator(seed))
        log_weights[empty] = -1e9
        mean = torch.zeros(16, 1)
        mean[empty] = 1.0
        mixture = DiagonalMixture(log_weights, mean, torch.zeros(16, 1))
        drawn += mixture.sample(torch.tensor([uniform]), torch.zeros(1, 1)).item()
    assert drawn == 0
