from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.func import grad, vmap

from boovae.errors import InputError
from boovae.model.distributions import Side
from boovae.model.likelihoods import (
    LIKELIHOODS,
    PROBABILITY_FLOOR,
    Bernoulli,
    Laplace,
    LearnedNormal,
    Logistic,
    Normal,
    make_likelihood,
)
from boovae.model.logistics import DiscretisedLogistic, LogisticMixture


def logits_and_pixels(*shape: int, spread: float = 4.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits, torch.rand(*shape, generator=generator, dtype=torch.float64)


def bernoulli_formula(logits: Tensor, x: Tensor) -> Tensor:
    p = torch.sigmoid(logits)
    return (x * p.log() + (1 - x) * (1 - p).log()).sum(-1)


# --- Bernoulli ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_gradients", [True, False])
def test_bernoulli_on_grey_values_is_the_cross_entropy(with_gradients: bool) -> None:
    logits, x = logits_and_pixels(3, 5, 20)
    expected = bernoulli_formula(logits, x)
    with torch.set_grad_enabled(with_gradients):
        torch.testing.assert_close(Bernoulli().log_prob(logits, x), expected)
        torch.testing.assert_close(
            Bernoulli().log_prob(logits.float(), x.float()).double(), expected, rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize("with_gradients", [True, False])
def test_bernoulli_stays_finite_at_extreme_logits(with_gradients: bool) -> None:
    logits = torch.tensor([[-200.0, 200.0], [200.0, -200.0], [-1e4, 1e4]])
    x = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.25, 0.25]])
    with torch.set_grad_enabled(with_gradients):
        assert Bernoulli().log_prob(logits, x).tolist() == pytest.approx([0.0, -400.0, -10_000.0])


def test_bernoulli_gradient_equals_autograd_of_the_formula() -> None:
    logits, x = logits_and_pixels(6, 10)
    upstream = torch.linspace(-1, 2, 6, dtype=torch.float64)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (Bernoulli().log_prob(ours, x) * upstream).sum().backward()
    (bernoulli_formula(plain, x) * upstream).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_bernoulli_gradient_with_respect_to_the_pixels_is_not_lost() -> None:
    logits, x = logits_and_pixels(6, 10)
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    Bernoulli().log_prob(logits.requires_grad_(), ours).sum().backward()
    bernoulli_formula(logits, plain).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_bernoulli_second_derivative_is_right_or_refused() -> None:
    logits, x = logits_and_pixels(4)
    logits.requires_grad_()
    (first,) = torch.autograd.grad(Bernoulli().log_prob(logits, x), logits, create_graph=True)
    try:
        (second,) = torch.autograd.grad(first.sum(), logits)
    except RuntimeError:
        return  # an error is as good as the right number
    p = torch.sigmoid(logits.detach())
    torch.testing.assert_close(second, -p * (1 - p))


def test_bernoulli_gradient_works_under_functional_transforms() -> None:
    logits, x = logits_and_pixels(3, 5, 10)
    expected = x - torch.sigmoid(logits)

    def loss(logits: Tensor, x: Tensor) -> Tensor:
        return Bernoulli().log_prob(logits, x).sum()

    torch.testing.assert_close(grad(loss)(logits, x), expected)
    torch.testing.assert_close(vmap(grad(loss))(logits, x), expected)
    torch.testing.assert_close(vmap(vmap(grad(loss)))(logits, x), expected)


def test_bernoulli_gradient_under_vmap_with_a_shared_target() -> None:
    logits, x = logits_and_pixels(3, 5, 10)
    target = x[0]

    def loss(logits: Tensor, x: Tensor) -> Tensor:
        return Bernoulli().log_prob(logits, x).sum()

    torch.testing.assert_close(vmap(grad(loss), in_dims=(0, None))(logits, target), target - torch.sigmoid(logits))


def test_bernoulli_broadcasts_images_over_samples() -> None:
    logits, x = logits_and_pixels(4, 7, 10)
    image = x[:, :1]
    leaf = logits.clone().requires_grad_()
    value = Bernoulli().log_prob(leaf, image)
    torch.testing.assert_close(value, bernoulli_formula(logits, image))
    value.sum().backward()
    torch.testing.assert_close(leaf.grad, image - torch.sigmoid(logits))


@settings(max_examples=50, deadline=None)
@given(
    logit=st.floats(-60, 60, allow_nan=False),
    pixel=st.floats(0, 1, allow_nan=False),
)
def test_bounded_equals_clamping_the_probabilities(logit: float, pixel: float) -> None:
    logits, x = torch.tensor([logit], dtype=torch.float64), torch.tensor([pixel], dtype=torch.float64)
    p = torch.sigmoid(logits).clamp(PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    expected = (x * p.log() + (1 - x) * torch.log1p(-p)).sum().item()
    likelihood = Bernoulli()
    assert PROBABILITY_FLOOR == 1e-5
    assert likelihood.log_prob(likelihood.bounded(logits), x).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_pixel_costs_at_most_eleven_and_a_half_nats_when_bounded() -> None:
    likelihood = Bernoulli()
    worst = likelihood.log_prob(likelihood.bounded(torch.tensor([[500.0]])), torch.zeros(1, 1))
    assert worst.item() == pytest.approx(math.log(1e-5), rel=1e-5)


def test_mean_image_is_the_probability_or_the_decoders_output() -> None:
    output, _ = logits_and_pixels(2, 3)
    torch.testing.assert_close(Bernoulli().mean(output), 1 / (1 + (-output).exp()))
    assert Normal().mean(output) is output
    assert Logistic().mean(output) is output


# --- normal ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_variance", [-5.0, 0.0, 1.3])
def test_normal_equals_torch_distributions(log_variance: float) -> None:
    mean, x = logits_and_pixels(4, 6)
    expected = torch.distributions.Normal(mean, math.exp(log_variance / 2)).log_prob(x).sum(-1)
    torch.testing.assert_close(Normal(log_variance).log_prob(mean, x), expected)


def test_default_normal_is_minus_pi_times_the_squared_distance() -> None:
    mean, x = logits_and_pixels(4, 6)
    torch.testing.assert_close(Normal().log_prob(mean, x), -math.pi * (x - mean).square().sum(-1))


# --- logistic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_scale", [-5.0, -2.0, 0.0])
def test_logistic_equals_differences_of_the_distribution_function(log_scale: float) -> None:
    mean, x = logits_and_pixels(200, 1, spread=0.5)
    scale, half = math.exp(log_scale), 0.5 / 255
    # The survival function on the right half keeps SciPy's difference from cancelling.
    place, centre = x.numpy(), mean.numpy()
    sign = np.where(place > centre, -1.0, 1.0)
    one = stats.logistic.cdf(sign * (place - centre) + half, scale=scale)
    two = stats.logistic.cdf(sign * (place - centre) - half, scale=scale)
    expected = np.log(one - two).sum(-1)
    actual = Logistic(log_scale=log_scale).log_prob(mean, x).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


@pytest.mark.parametrize("log_scale", [-5.0, -4.0, -3.0])
def test_logistic_bins_add_up_to_one_over_all_grey_values(log_scale: float) -> None:
    # A mean in the middle leaves all but 1 - tanh(1/(4s)) inside [-1/510, 1 + 1/510].
    grey = (torch.arange(256, dtype=torch.float64) / 255).unsqueeze(-1)
    middle = torch.full_like(grey, 0.5)
    total = Logistic(log_scale=log_scale).log_prob(middle, grey).exp().sum().item()
    inside = math.tanh(0.25 * (256 / 255) / math.exp(log_scale))
    assert total == pytest.approx(inside, rel=1e-9)
    if log_scale <= -4:
        assert total == pytest.approx(1.0, abs=1e-5)


def test_logistic_bins_cover_the_whole_line_without_gap_or_overlap() -> None:
    bins = (torch.arange(-4000, 4001, dtype=torch.float64) / 255).unsqueeze(-1)
    total = Logistic().log_prob(torch.full_like(bins, 0.3), bins).exp().sum().item()
    assert total == pytest.approx(1.0, abs=1e-9)


def test_logistic_is_finite_and_precise_far_from_the_mean_in_float32() -> None:
    likelihood = Logistic(log_scale=-5.0)
    mean = torch.tensor([[-30.0], [0.5], [30.0]], requires_grad=True)
    x = torch.full((3, 1), 0.5)
    value = likelihood.log_prob(mean, x)
    value.sum().backward()
    assert mean.grad is not None
    assert mean.grad.isfinite().all()
    exact = likelihood.log_prob(mean.detach().double(), x.double())
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)


# --- the registry ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(LIKELIHOODS))
def test_likelihoods_are_made_by_name(name: str) -> None:
    assert make_likelihood(name).name == name


@pytest.mark.parametrize("name", sorted(name for name, kind in LIKELIHOODS.items() if kind().parameters == 1))
def test_better_outputs_are_more_likely(name: str) -> None:
    likelihood = make_likelihood(name)
    x = torch.tensor([[0.1, 0.8, 0.5]])
    output = torch.logit(x) if name == "bernoulli" else x.clone()
    best = likelihood.log_prob(output, x)
    for change in (-0.5, 0.5):
        assert (likelihood.log_prob(output + change, x) < best).all()
    torch.testing.assert_close(likelihood.mean(output), x)


# --- a normal density whose variance is predicted ---------------------------------------------------------------------


def outputs(likelihood: LearnedNormal | LogisticMixture, *lead: int, pixels: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (*lead, likelihood.parameters * pixels)
    return spread * torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_learned_noise_is_the_normal_density_of_scipy() -> None:
    likelihood = LearnedNormal()
    output, x = outputs(likelihood, 4, pixels=6), logits_and_pixels(4, 6)[1]
    mean, raw = output[:, :6].numpy(), output[:, 6:].numpy()
    log_variance = likelihood.floor + np.logaddexp(0, raw - likelihood.floor)
    wanted = stats.norm.logpdf(x.numpy(), mean, np.exp(log_variance / 2)).sum(-1)
    np.testing.assert_allclose(likelihood.log_prob(output, x).numpy(), wanted)


def test_learned_noise_has_a_floor_so_a_constant_column_has_a_finite_density() -> None:
    likelihood = LearnedNormal()
    output = torch.tensor([0.0, -1e4], dtype=torch.float64)
    most = likelihood.log_prob(output, torch.zeros(1, dtype=torch.float64)).item()
    assert most == pytest.approx(0.5 * 6 - 0.5 * math.log(2 * math.pi))


@pytest.mark.parametrize("side", ["symmetric", "forward", "reverse"])
def test_divergence_of_learned_noise_is_that_of_torch_distributions(side: Side) -> None:
    likelihood = LearnedNormal()
    one, other = outputs(likelihood, 3, pixels=5), outputs(likelihood, 3, pixels=5).flip(0) * 0.5
    p, q = (
        torch.distributions.Normal(normal.mean, (normal.log_variance / 2).exp())
        for normal in map(likelihood.gaussian, (one, other))
    )
    forward, reverse = (torch.distributions.kl_divergence(*pair).sum(-1) for pair in ((p, q), (q, p)))
    wanted = {"forward": forward, "reverse": reverse, "symmetric": 0.5 * (forward + reverse)}[side]
    torch.testing.assert_close(likelihood.divergence(one, other, side), wanted)


def test_learned_noise_is_what_samples_have() -> None:
    likelihood = LearnedNormal()
    output = torch.tensor([1.0, -2.0, 0.5, -3.0], dtype=torch.float64)
    uniform = torch.rand(20_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn, normal = likelihood.draw(output, uniform), likelihood.gaussian(output)
    for column in range(2):
        scale = (normal.log_variance[column] / 2).exp().item()
        assert stats.kstest(drawn[:, column].numpy(), "norm", (normal.mean[column].item(), scale)).pvalue > 1e-3


@pytest.mark.parametrize("name", ["normal", "logistic"])
@pytest.mark.parametrize("pixel_range", [(0.0, 1.0), (-1.0, 1.0)])
def test_shared_noise_is_never_narrower_than_its_floor(name: str, pixel_range: tuple[float, float]) -> None:
    low, high = pixel_range
    likelihood = make_likelihood(name, pixel_range, noise="shared", noise_floor=0.05)
    middle = 0.5 * (low + high) if name == "normal" else 0.0  # its own units
    uniform = torch.rand(50_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = likelihood.draw(torch.tensor([middle, -1e4], dtype=torch.float64).expand(50_000, 2), uniform)
    assert drawn.std().item() == pytest.approx(0.05 * (high - low), rel=0.03)


# --- a mixture of discretised logistic distributions ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LogisticMixture, DiscretisedLogistic])
@pytest.mark.parametrize("pixel_range", [(0.0, 1.0), (-1.0, 1.0)])
def test_probabilities_of_the_256_values_add_up_to_one(
    pixel_range: tuple[float, float], kind: type[LogisticMixture]
) -> None:
    low, high = pixel_range
    likelihood = kind(pixel_range)
    values = torch.linspace(low, high, 256, dtype=torch.float64).unsqueeze(-1)
    for output in outputs(likelihood, 20, pixels=1, spread=3.0):
        assert likelihood.log_prob(output, values).exp().sum().item() == pytest.approx(1.0, abs=1e-9)


def test_a_mixture_equals_differences_of_the_distribution_function() -> None:
    likelihood, pixels = LogisticMixture(), 5
    output = outputs(likelihood, 8, pixels=pixels)
    x = torch.randint(1, 255, (8, pixels), generator=torch.Generator().manual_seed(0)).double() / 255
    blocks = output.numpy().reshape(8, 3, 2, pixels)
    weights = np.exp(blocks[:, 0]) / np.exp(blocks[:, 0]).sum(1, keepdims=True)
    mean = blocks[:, 1] + np.array([-0.25, 0.25])[:, None]
    scale = np.exp(np.clip(blocks[:, 2] - 1.5, -7, 2))
    value = 2 * x.numpy()[:, None] - 1
    upper, lower = (stats.logistic.cdf(value + edge / 255, mean, scale) for edge in (1, -1))
    wanted = np.log((weights * (upper - lower)).sum(1)).sum(-1)
    np.testing.assert_allclose(likelihood.log_prob(output, x).numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize("kind", [LogisticMixture, DiscretisedLogistic])
def test_samples_of_a_mixture_follow_its_probabilities(kind: type[LogisticMixture]) -> None:
    likelihood = kind()
    output = outputs(likelihood, pixels=1, spread=2.0)
    uniform = torch.rand(50_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = likelihood.draw(output.expand(len(uniform), -1), uniform)
    values = torch.arange(256, dtype=torch.float64) / 255
    assert (drawn * 255 - (drawn * 255).round()).abs().max().item() < 1e-9  # 8-bit values
    counts = torch.bincount((drawn[:, 0] * 255).round().long(), minlength=256).numpy()
    expected = likelihood.log_prob(output, values.unsqueeze(-1)).exp().numpy() * len(uniform)
    many = expected > 20
    assert (
        stats.chisquare(
            np.append(counts[many], counts[~many].sum()),
            np.append(expected[many], expected[~many].sum()),
            sum_check=False,
        ).pvalue
        > 1e-3
    )
    assert drawn.mean().item() == pytest.approx(float((values.numpy() * expected).sum() / len(uniform)), abs=5e-3)


def every_colour(levels: int) -> Tensor:
    """All colours of one pixel with `levels` values each, (levels³, 3), in 256ths around the middle of the range."""
    axis = torch.arange(128 - levels // 2, 128 + levels // 2, dtype=torch.float64) / 255
    return torch.cartesian_prod(axis, axis, axis)


def test_colours_are_separated_without_loss() -> None:
    likelihood = LogisticMixture(colours=3)
    colours = every_colour(32)
    levels = likelihood._separated(colours)
    assert len(torch.unique(levels, dim=0)) == len(colours)
    torch.testing.assert_close(likelihood._joined(levels, whole=True), colours)


def test_probabilities_of_all_colours_add_up_to_one() -> None:
    """The mixture is narrow and in the middle of the range, so that few colours have all the mass."""
    likelihood = LogisticMixture(colours=3)
    output = torch.zeros(3, 2, 3, dtype=torch.float64)
    output[1] = -likelihood.mixture(output.flatten()).mean + torch.tensor([[0.0, 0.02, -0.02], [0.01, 0.0, 0.01]])
    output[2] = -3.2
    total = likelihood.log_prob(output.flatten(), every_colour(64)).exp().sum().item()
    assert total == pytest.approx(1.0, abs=1e-3)


def test_mean_and_samples_of_a_colour_agree() -> None:
    likelihood = LogisticMixture(colours=3)
    output = torch.zeros(3, 2, 3, dtype=torch.float64)
    output[1] = torch.tensor([[0.1, 0.3, -0.2], [0.3, 0.1, 0.1]])
    output[2] = -3.0
    uniform = torch.rand(50_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = likelihood.draw(output.flatten().expand(len(uniform), -1), uniform)
    torch.testing.assert_close(drawn.mean(0), likelihood.mean(output.flatten()), atol=4e-3, rtol=0)


@pytest.mark.parametrize("side", ["symmetric", "forward", "reverse"])
def test_the_bound_of_a_mixtures_divergence_lies_above_the_divergence(side: Side) -> None:
    likelihood = LogisticMixture()
    one, other = outputs(likelihood, 30, pixels=1), 0.3 * outputs(likelihood, 30, pixels=1).flip(0)
    values = (torch.arange(256, dtype=torch.float64) / 255).view(-1, 1, 1)
    p, q = likelihood.log_prob(one, values), likelihood.log_prob(other, values)
    forward, reverse = (p.exp() * (p - q)).sum(0), (q.exp() * (q - p)).sum(0)
    truth = {"forward": forward, "reverse": reverse, "symmetric": 0.5 * (forward + reverse)}[side]
    bound = likelihood.divergence(one, other, side)
    assert (bound > truth).all()
    torch.testing.assert_close(likelihood.divergence(one, one, side), torch.zeros(30, dtype=torch.float64))


def test_unknown_likelihood_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'bernoulli'"):
        make_likelihood("bernouli")


def test_the_divergence_of_logistic_pixels_by_numerical_integration() -> None:
    likelihood = Logistic(log_scale=-1.0)
    scale = math.exp(-1.0)
    x = torch.linspace(-40, 40, 400_001, dtype=torch.float64)

    def log_density(mean: float) -> Tensor:
        u = (x - mean) / scale
        return -u - 2 * torch.nn.functional.softplus(-u) - math.log(scale)

    for distance in (0.001, 0.1, 1.0, 5.0):
        p, q = log_density(0.0), log_density(distance)
        truth = 0.5 * torch.trapezoid(p.exp() * (p - q) + q.exp() * (q - p), x)
        ours = likelihood.divergence(torch.zeros(1), torch.full((1,), distance))
        assert ours.item() == pytest.approx(truth.item(), rel=2e-3, abs=1e-7)


@pytest.mark.parametrize("side", ["symmetric", "forward", "reverse"])
def test_the_divergence_of_discretised_logistic_values_is_that_of_their_probabilities(side: Side) -> None:
    """Wide enough that a bin is narrow, and in the middle of the range."""
    likelihood = DiscretisedLogistic()
    one, other = (torch.tensor([mean, -1.5], dtype=torch.float64) for mean in (-0.02, 0.12))
    values = (torch.arange(256, dtype=torch.float64) / 255).view(-1, 1)
    p, q = likelihood.log_prob(one, values), likelihood.log_prob(other, values)
    forward, reverse = (p.exp() * (p - q)).sum().item(), (q.exp() * (q - p)).sum().item()
    truth = {"forward": forward, "reverse": reverse, "symmetric": 0.5 * (forward + reverse)}[side]
    assert likelihood.divergence(one, other, side).item() == pytest.approx(truth, rel=0.02)
    far = torch.tensor([3.0, -1.5], dtype=torch.float64)
    twice = torch.tensor([6.0, -1.5], dtype=torch.float64)
    assert likelihood.divergence(twice, one).item() < 2.2 * likelihood.divergence(far, one).item()  # no square
    wider = torch.tensor([-0.02, -1.0], dtype=torch.float64)
    assert likelihood.divergence(one, one, side).item() == pytest.approx(0, abs=1e-12)
    assert likelihood.divergence(one, wider, side).item() > 0.05


def test_l1_is_the_laplace_density_with_the_colour_models_variance() -> None:
    x, mean = torch.rand(5, 7), torch.rand(5, 7)
    scale = math.sqrt(1 / (4 * math.pi))
    reference = torch.distributions.Laplace(mean, scale)
    assert reference.variance[0, 0].item() == pytest.approx(1 / (2 * math.pi))
    torch.testing.assert_close(Laplace().log_prob(mean, x), reference.log_prob(x).sum(-1))


@pytest.mark.parametrize("side", ["symmetric", "forward", "reverse"])
def test_divergence_of_l1_is_that_of_two_laplace_densities(side: Side) -> None:
    one, other = torch.randn(4, 3), torch.randn(4, 3)
    scale = math.sqrt(1 / (4 * math.pi))
    normals = (torch.distributions.Laplace(output, scale) for output in (one, other))
    wanted = torch.distributions.kl_divergence(*normals).sum(-1)
    torch.testing.assert_close(Laplace().divergence(one, other, side), wanted)


def test_bins_of_the_logistic_follow_the_range_of_the_pixels() -> None:
    wide, narrow = make_likelihood("logistic", (-1.0, 1.0)), make_likelihood("logistic")
    assert isinstance(wide, Logistic)
    assert isinstance(narrow, Logistic)
    assert wide.bin_width == pytest.approx(2 * narrow.bin_width)


def test_bernoulli_pixels_beyond_one_are_refused() -> None:
    with pytest.raises(InputError, match=r"likelihood bernoulli needs pixels in \[0, 1\].*use normal"):
        make_likelihood("bernoulli", (-1.0, 1.0))
