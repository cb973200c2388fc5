"""The fitting of components: objectives, weights and starts, against independent truth."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributions

from boovae.boosting.fit import cluster_images
from boovae.boosting.losses import (
    component_log_probs,
    cross_entropy,
    forward_loss,
    literal_loss,
    mixture_loss,
    with_floor,
)
from boovae.boosting.weights import (
    WEIGHT_MARGIN,
    Scores,
    best_weight,
    dropped,
    em_weights,
    gain_curve,
    merged,
    sgd_weight,
    weight_slope,
)
from boovae.model.distributions import DiagonalMixture, DiagonalNormal
from boovae.model.nets import make_nets
from boovae.model.priors.boosted import EMPTY
from conftest import in_torch

# --- the losses -----------------------------------------------------------------------------------------------------


def mixture(seed: int, components: int = 3, latent_dim: int = 2, broad: float = 0.0) -> DiagonalMixture:
    generator = torch.Generator().manual_seed(seed)
    weights, mean, log_variance = (torch.randn(components, n, generator=generator) for n in (1, latent_dim, latent_dim))
    return DiagonalMixture(weights[:, 0].log_softmax(0), 2 * mean, log_variance + broad)


def test_the_literal_loss_is_minus_entropy_minus_the_mean_log_ratio(float64: None) -> None:
    target, r, noise = mixture(0), mixture(1, broad=1.0), torch.randn(400, 2)
    h = DiagonalNormal(torch.tensor([0.5, -1.0]), torch.tensor([-1.0, 0.3]))
    p = distributions.Normal(h.mean, (0.5 * h.log_variance).exp())
    z = p.loc + noise * p.scale
    ratio = in_torch(target).log_prob(z) - in_torch(r).log_prob(z)
    torch.testing.assert_close(literal_loss(h, noise, target, r), -p.entropy().sum() - ratio.mean())


def test_the_literal_loss_of_gaussians_is_a_difference_of_divergences(float64: None) -> None:
    """−H[h] − E_h[log π − log r] = KL[h ‖ π] − KL[h ‖ r] − H[h], here in closed form."""
    target, r = mixture(2, components=1), mixture(3, components=1)
    h = DiagonalNormal(torch.tensor([0.2, 0.4]), torch.tensor([-0.5, 0.1]))
    p, pi, m = (distributions.Normal(part[-2].view(2), part[-1].view(2).div(2).exp()) for part in (h, target, r))
    truth = (distributions.kl_divergence(p, pi) - distributions.kl_divergence(p, m) - p.entropy()).sum()
    noise = torch.randn(400_000, 2, generator=torch.Generator().manual_seed(0))
    assert literal_loss(h, noise, target, r).item() == pytest.approx(truth.item(), abs=0.02)


def test_the_forward_loss_is_the_cross_entropy_of_the_grown_mixture(float64: None) -> None:
    z, r = torch.randn(300, 2), mixture(4)
    h = DiagonalNormal(torch.tensor([1.0, 0.0]), torch.tensor([0.2, -0.4]))
    log_weights = torch.cat([math.log(0.7) + r.log_weights, torch.tensor([math.log(0.3)])])
    mean, log_variance = (torch.cat([old, new.unsqueeze(0)]) for old, new in zip(r[1:], h, strict=True))
    truth = -in_torch(DiagonalMixture(log_weights, mean, log_variance)).log_prob(z).mean()
    torch.testing.assert_close(forward_loss(h, torch.logit(torch.tensor(0.3)), z, in_torch(r).log_prob(z)), truth)
    torch.testing.assert_close(mixture_loss(DiagonalNormal(mean, log_variance), log_weights, z), truth)


def test_gradients_of_the_losses_equal_finite_differences(float64: None) -> None:
    """With respect to mean and log-variance, the weight, and through an encoder to the pseudo-input."""
    torch.manual_seed(0)
    target, r, noise, z = mixture(5), mixture(6, broad=1.0), torch.randn(8, 2), torch.randn(20, 2)
    log_r = r.log_prob(z)
    encoder = make_nets("mlp:5", (6,), 2, (-6.0, 2.0)).encoder.requires_grad_(False)
    mean, log_variance, logit = (torch.randn(shape, requires_grad=True) for shape in ((2,), (2,), ()))
    pixels = torch.rand(6, requires_grad=True)
    check = torch.autograd.gradcheck  # central differences
    assert check(lambda m, v: literal_loss(DiagonalNormal(m, v), noise, target, r), (mean, log_variance))
    assert check(lambda m, v, b: forward_loss(DiagonalNormal(m, v), b, z, log_r), (mean, log_variance, logit))
    assert check(lambda u: literal_loss(encoder(u), noise, target, r), (pixels,))
    assert check(lambda u, b: forward_loss(encoder(u), b, z, log_r), (pixels, logit))


def test_a_floor_adds_a_gaussian_twice_as_broad_as_the_target(float64: None) -> None:
    r, target, z = mixture(7), mixture(8, components=5), 5 * torch.randn(50, 2)
    spread = in_torch(target)
    floor = distributions.Independent(distributions.Normal(spread.mean, 2 * spread.variance.sqrt()), 1)
    truth = torch.logaddexp(math.log(0.9) + in_torch(r).log_prob(z), math.log(0.1) + floor.log_prob(z))
    torch.testing.assert_close(with_floor(r, target, 0.1).log_prob(z), truth)


# --- the weight of one more component -------------------------------------------------------------------------------


def scores_at(z: Tensor, h: DiagonalNormal, r: DiagonalMixture, target: DiagonalMixture) -> Scores:
    return Scores(h.log_prob(z), r.log_prob(z), target.log_prob(z))


def weight_problem(seed: int, samples: int) -> tuple[Scores, float]:
    """Samples of h and r in one dimension, and the best weight by quadrature on a fine grid."""
    generator = torch.Generator().manual_seed(seed)
    target, r = mixture(10 + seed, latent_dim=1), mixture(20 + seed, components=2, latent_dim=1, broad=0.5)
    h = DiagonalNormal(target.mean[0], target.log_variance[0] + 0.2)
    noise, uniform = torch.randn(2, samples, 1, generator=generator), torch.rand(samples, generator=generator)
    drawn = scores_at(torch.cat([h.rsample(noise[0]), r.sample(uniform, noise[1])]), h, r, target)
    z = torch.linspace(-25, 25, 2001).unsqueeze(1)
    grid = scores_at(z, h, r, target)
    betas = torch.linspace(0.005, 0.995, 199).unsqueeze(1)
    log_m = torch.logaddexp(betas.log() + grid.h, torch.log1p(-betas) + grid.r)
    divergence = torch.trapezoid(log_m.exp() * (log_m - grid.target), z.squeeze(1))
    return drawn, betas[divergence.argmin()].item()


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 6, 8])  # the best weights are 0.84, 0.34, 0.38, 0.05, 0.14, 0.68
def test_the_best_weight_minimises_the_divergence(seed: int, float64: None) -> None:
    scores, truth = weight_problem(seed, 20_000)
    beta = best_weight(scores)
    assert beta.item() == pytest.approx(truth, abs=0.02)
    # On the same samples the divergence, by importance weights, is nowhere smaller.
    betas = beta + torch.linspace(-0.01, 0.01, 101)

    def divergence(beta: Tensor) -> Tensor:
        log_m = torch.logaddexp(beta.log() + scores.h, torch.log1p(-beta) + scores.r)
        log_s = torch.logaddexp(scores.h, scores.r) - math.log(2)
        # The −1 adds a constant to the integral, and makes the samples' slope exactly E_s[(h − r)/s . log(m/π)].
        return ((log_m - log_s).exp() * (log_m - scores.target - 1)).mean()

    curve = torch.stack([divergence(one) for one in betas])
    assert curve.argmin() == 50
    assert (curve - divergence(beta)).min() >= -1e-12


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 6, 8])
def test_stochastic_descent_of_the_weight_ends_near_the_best(seed: int, float64: None) -> None:
    scores, truth = weight_problem(seed, 2000)
    assert sgd_weight(scores).item() == pytest.approx(truth, abs=0.1)


def test_a_weight_stays_off_zero_and_one(float64: None) -> None:
    target, far = distributions.Normal(0.0, 1.0), distributions.Normal(20.0, 1.0)
    here, there = torch.randn(100), 20 + torch.randn(100)
    useless = Scores(*(one.log_prob(torch.cat([there, here])) for one in (far, target, target)))
    perfect = Scores(*(one.log_prob(torch.cat([here, there])) for one in (target, far, target)))
    for solve in (best_weight, sgd_weight):
        assert solve(useless).item() == pytest.approx(WEIGHT_MARGIN)
        assert solve(perfect).item() == pytest.approx(1 - WEIGHT_MARGIN)


@given(st.integers(0, 2**31), st.floats(0.1, 100))
@settings(max_examples=40, deadline=None)
def test_the_slope_of_the_weight_grows_for_any_samples(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = Scores(*(scale * torch.randn(3, 20, generator=generator, dtype=torch.float64)))
    betas = torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    slopes = torch.stack([weight_slope(scores, beta) for beta in betas])
    assert (slopes.diff() >= -1e-9 * slopes.abs().max()).all()
    for beta in (best_weight(scores), sgd_weight(scores)):
        assert 0 < beta.item() < 1


# --- all weights ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 2**31))
@settings(deadline=None)
def test_em_never_makes_the_fit_worse_and_weights_add_up(components: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_components = 3 * torch.randn(40, components, generator=generator)
    log_weights = torch.randn(components, generator=generator).log_softmax(-1)
    last = cross_entropy(log_components, log_weights)
    for _ in range(5):
        log_weights = em_weights(log_components, log_weights, iterations=1)
        assert log_weights.exp().sum().item() == pytest.approx(1, abs=1e-5)
        now = cross_entropy(log_components, log_weights)
        assert now <= last + 1e-5
        last = now


def test_em_finds_the_weights_of_a_known_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.tensor([0.6, 0.3, 0.1])
    centres = torch.tensor([-4.0, 0.0, 5.0])
    z = centres[torch.multinomial(truth, 20_000, replacement=True, generator=generator)]
    z = z + torch.randn(20_000, generator=generator)
    log_components = distributions.Normal(centres, 1.0).log_prob(z.unsqueeze(1))
    weights = em_weights(log_components, torch.zeros(3).log_softmax(0)).exp()
    torch.testing.assert_close(weights, truth, rtol=0, atol=0.02)


def test_em_does_not_fill_an_empty_place() -> None:
    """However much better the component there would fit: 2000 nats for every code."""
    log_components = torch.stack([torch.full((10,), -2000.0), torch.zeros(10)], 1)
    log_weights = em_weights(log_components, torch.tensor([0.0, EMPTY]))
    assert log_weights.exp().tolist() == [1, 0]
    assert log_weights[1] <= EMPTY / 2


@given(st.integers(1, 8), st.integers(0, 2**31), st.floats(0.1, 1000), st.floats(0, 0.999))
@settings(max_examples=40, deadline=None)
def test_weights_add_up_to_one_through_em_merging_and_dropping(
    components: int, seed: int, scale: float, threshold: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = DiagonalNormal(*torch.randn(2, components, 2, generator=generator))
    twins = torch.randint(components, (components,), generator=generator)
    parts = DiagonalNormal(parts.mean[twins], parts.log_variance[twins])
    log_weights = scale * torch.randn(components, generator=generator)
    log_weights[torch.rand(components, generator=generator) < 0.3] = EMPTY
    log_weights = log_weights.log_softmax(0).clamp(min=EMPTY)
    z = scale * torch.randn(30, 2, generator=generator)
    steps: list[Callable[[Tensor], Tensor]] = [
        lambda now: em_weights(component_log_probs(parts, z), now),
        lambda now: merged(parts, now),
        lambda now: dropped(now, threshold),
    ]
    for step in steps:
        after = step(log_weights)
        assert after.isfinite().all()
        assert after.exp().sum().item() == pytest.approx(1, abs=1e-4)
        # What was empty stays empty.
        assert (after[log_weights <= EMPTY / 2] <= EMPTY / 2).all()
        log_weights = after


@given(st.integers(1, 6), st.integers(0, 2**31), st.floats(0, 0.999))
@settings(deadline=None)
def test_dropping_keeps_what_reaches_the_threshold_and_always_the_largest(
    components: int, seed: int, threshold: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = (3 * torch.randn(components, generator=generator)).log_softmax(0)
    after = dropped(before, threshold)
    keeps = (before.exp() >= threshold) | (before == before.max())
    assert torch.equal(after > EMPTY / 2, keeps)
    torch.testing.assert_close(after.exp(), torch.where(keeps, before.exp(), 0) / before[keeps].exp().sum())


def test_duplicates_give_their_weight_to_the_first_and_the_density_stays() -> None:
    mean = torch.tensor([[0.0, 1.0], [2.0, 2.0], [0.0, 1.0], [0.0, 1.0], [2.0, 2.0]])
    parts = DiagonalNormal(mean, torch.zeros(5, 2))
    before = torch.tensor([0.1, 0.2, 0.3, 0.0, 0.4]).log().clamp(min=EMPTY)
    after = merged(parts, before)
    torch.testing.assert_close(after.exp(), torch.tensor([0.4, 0.6, 0.0, 0.0, 0.0]))
    z = torch.randn(30, 2)
    one, other = (DiagonalMixture(log_weights, *parts).log_prob(z) for log_weights in (before, after))
    torch.testing.assert_close(one, other)


def test_an_empty_place_does_not_swallow_its_twins() -> None:
    parts = DiagonalNormal(torch.zeros(3, 2), torch.zeros(3, 2))
    after = merged(parts, torch.tensor([EMPTY, math.log(0.5), math.log(0.5)]))
    torch.testing.assert_close(after.exp(), torch.tensor([0.0, 1.0, 0.0]))


def test_components_that_differ_are_not_merged() -> None:
    parts = DiagonalNormal(torch.tensor([[0.0], [0.0], [0.2]]), torch.tensor([[0.0], [0.2], [0.0]]))
    before = torch.tensor([0.2, 0.3, 0.5]).log()
    torch.testing.assert_close(merged(parts, before), before)


@given(st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_gain_curve_starts_with_the_best_and_never_rises(components: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_components = 3 * torch.randn(40, components, generator=generator)
    order, curve = gain_curve(log_components)
    assert sorted(order.tolist()) == list(range(components))
    alone = -log_components.mean(0)
    assert alone[order[0]].item() == pytest.approx(alone.min().item(), abs=1e-5)
    assert curve[0].item() == pytest.approx(alone.min().item(), abs=1e-5)
    assert (curve.diff() < 0.02).all()  # twenty steps of EM do not quite reach the best weights


def test_each_component_of_the_curve_is_the_one_that_gains_most() -> None:
    log_components = 3 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    order, curve = gain_curve(log_components, iterations=500)
    for size in range(1, 4):
        losses = {}
        for candidate in set(range(4)) - set(order[:size].tolist()):
            chosen = log_components[:, [*order[:size].tolist(), candidate]]
            weights = em_weights(chosen, torch.zeros(size + 1).log_softmax(0), iterations=500)
            losses[candidate] = cross_entropy(chosen, weights).item()
        assert order[size].item() == min(losses, key=lambda candidate: losses[candidate])
        assert curve[size].item() == pytest.approx(min(losses.values()), abs=1e-4)


def test_a_duplicate_gains_nothing() -> None:
    one, other = 3 * torch.randn(2, 60, generator=torch.Generator().manual_seed(0))
    order, curve = gain_curve(torch.stack([one, other, one, other], 1), iterations=300)
    assert {order[0].item() % 2, order[1].item() % 2} == {0, 1}
    assert curve[0] - curve[1] > 0.1
    torch.testing.assert_close(curve[1:], curve[1].expand(3), rtol=0, atol=1e-4)


# --- where components start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_the_groups_that_are_there(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.cat([torch.randn(30, 2, generator=generator) * 0.1 + centre for centre in (0.0, 10.0, -10.0)])
    images = torch.cat([torch.full((30, 5), value) for value in (0.1, 0.5, 0.9)])
    means, shares = cluster_images(z, images, torch.rand(3, generator=generator))
    torch.testing.assert_close(means[:, 0].sort().values, torch.tensor([0.1, 0.5, 0.9]))
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3))


def test_more_clusters_than_different_images_do_no_harm() -> None:
    means, shares = cluster_images(torch.zeros(4, 2), torch.full((4, 3), 0.25), torch.rand(6))
    torch.testing.assert_close(means, torch.full((6, 3), 0.25))
    assert shares.sum().item() == pytest.approx(1)
