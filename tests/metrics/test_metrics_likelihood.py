from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical, Independent, MixtureSameFamily
from torch.distributions import Normal as TorchNormal

from boovae.metrics import likelihood as module
from boovae.metrics.likelihood import log_likelihood, log_likelihood_of_each_task
from boovae.metrics.partial_results import PartialResult
from boovae.model.likelihoods import Bernoulli
from boovae.model.nets import make_nets
from boovae.model.priors import NormalPrior, Prior, VampPrior
from boovae.model.vae import VAE
from boovae.replicas.randomness import seed_for
from boovae.replicas.stacked import Replicas, replica_of
from linear_gaussian import PIXELS, exact_log_prob, linear_images, linear_model

CPU = torch.device("cpu")
SEEDS = (0, 1)


# --- a model whose likelihood is known exactly ----------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("samples", [1, 2, 50])
def test_the_exact_posterior_gives_the_exact_likelihood_with_any_number_of_samples(samples: int) -> None:
    replicas = Replicas(linear_model, SEEDS, CPU)
    result = log_likelihood(replicas, linear_images(), samples)
    assert result.log_prob.shape == result.effective_samples.shape == (2, 9)
    torch.testing.assert_close(result.log_prob, exact_log_prob(replicas, linear_images()), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.effective_samples, torch.full((2, 9), float(samples)), rtol=1e-9, atol=0)


def test_single_precision_is_exact_to_a_thousandth_of_a_nat() -> None:
    replicas = Replicas(linear_model, SEEDS, CPU)
    result = log_likelihood(replicas, linear_images(), 1000)
    exact = exact_log_prob(replicas, linear_images())
    torch.testing.assert_close(result.log_prob.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(result.effective_samples, torch.full((2, 9), 1000.0), rtol=1e-3, atol=0)


@pytest.mark.usefixtures("float64")
def test_an_approximate_posterior_converges_to_the_exact_likelihood() -> None:
    replicas = Replicas(lambda: linear_model(shift=0.1, wider=0.4), SEEDS, CPU)
    result = log_likelihood(replicas, linear_images(), 40_000)
    exact = exact_log_prob(replicas, linear_images())
    assert (result.log_prob - exact).abs().max().item() < 0.02
    assert (result.effective_samples > 4000).all()
    assert (result.effective_samples < 40_000 * 0.99).all()


@pytest.mark.usefixtures("float64")
def test_more_samples_bring_the_bound_closer() -> None:
    replicas = Replicas(lambda: linear_model(shift=0.3, wider=0.5), SEEDS, CPU)
    exact = exact_log_prob(replicas, linear_images()).mean().item()

    def gap(samples: int, repeats: int) -> float:
        runs = [log_likelihood(replicas, linear_images(), samples, seed=seed).log_prob for seed in range(repeats)]
        return exact - torch.stack(runs).mean().item()

    one, ten, thousand = gap(1, 2000), gap(10, 200), gap(1000, 10)
    assert one > 2 * ten > 0
    assert ten > 2 * abs(thousand)
    # With one sample the bound is the ELBO, which here is known: its gap is KL[q(z | x) | p(z | x)].
    tensors = replica_of(replicas.tensors(), 0)
    variance = (tensors["encoder.log_variance"] - 0.5).exp()
    kl = 0.5 * (math.exp(0.5) + 0.3**2 / variance - 1 - 0.5).sum().item()
    assert one == pytest.approx(kl, rel=0.1)


def test_a_poor_encoder_shows_in_the_effective_samples() -> None:
    good = Replicas(linear_model, SEEDS, CPU)
    poor = Replicas(lambda: linear_model(shift=3.0), SEEDS, CPU)
    images = linear_images()
    assert (log_likelihood(good, images, 500).effective_samples > 490).all()
    result = log_likelihood(poor, images, 500)
    assert (result.effective_samples < 50).all()
    assert (result.effective_samples >= 1 - 1e-3).all()


# --- a small network against a plain implementation -----------------------------------------------------------------


def small_model(prior: Callable[[], Prior]) -> VAE:
    nets = make_nets("mlp:12", (PIXELS,), 2, (-6.0, 2.0))
    return VAE(*nets, Bernoulli(), prior(), 2)


def vamp() -> Prior:
    prior = VampPrior(5, PIXELS)
    with torch.no_grad():
        prior.logits.normal_(std=3)
    return prior


PRIORS = {"normal": lambda: NormalPrior(2), "vamp": vamp}


def small_replicas(prior: str) -> Replicas:
    replicas = Replicas(lambda: small_model(PRIORS[prior]), SEEDS, CPU)
    for name, tensor in replicas.parameters.items():
        if name.startswith("decoder") and name.endswith("weight"):
            tensor.mul_(2)  # a decoder that is not flat
    return replicas


def grey_images(count: int = 11) -> Tensor:
    return torch.rand(count, PIXELS, generator=torch.Generator().manual_seed(3))


def double_model(replicas: Replicas, replica: int, prior: str) -> VAE:
    model = small_model(PRIORS[prior]).double()
    model.load_state_dict(replica_of(replicas.tensors(), replica))
    return model.requires_grad_(False)


def torch_prior(model: VAE) -> torch.distributions.Distribution:
    if not isinstance(model.prior, VampPrior):
        return Independent(TorchNormal(torch.zeros(2).double(), 1.0), 1)
    parts = model.posterior(model.prior.pseudo_inputs)
    components = Independent(TorchNormal(parts.mean, (parts.log_variance / 2).exp()), 1)
    return MixtureSameFamily(Categorical(probs=torch.full((5,), 0.2).double()), components)


@pytest.mark.parametrize("prior", sorted(PRIORS))
def test_scores_equal_a_plain_double_precision_loop(prior: str) -> None:
    replicas, images, samples = small_replicas(prior), grey_images(), 200
    result = log_likelihood(replicas, images, samples, seed=4)
    generator = torch.Generator().manual_seed(seed_for(4, "likelihood"))
    noise = torch.randn(samples, 2, generator=generator).double()
    for r in range(len(replicas)):
        model = double_model(replicas, r, prior)
        for i, image in enumerate(images.double()):
            q = model.posterior(image)
            proposal = Independent(TorchNormal(q.mean, (q.log_variance / 2).exp()), 1)
            weights = []
            for one in noise:
                z = q.mean + one * (q.log_variance / 2).exp()
                p = torch.sigmoid(model.decode(z)).clamp(1e-5, 1 - 1e-5)
                pixels = (image * p.log() + (1 - image) * (1 - p).log()).sum()
                weights.append(pixels + torch_prior(model).log_prob(z) - proposal.log_prob(z))
            logs = torch.stack(weights)
            expected = torch.logsumexp(logs, 0).item() - math.log(samples)
            assert result.log_prob[r, i].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
            effective = logs.exp().sum() ** 2 / (2 * logs).exp().sum()
            assert result.effective_samples[r, i].item() == pytest.approx(effective.item(), rel=1e-3)
            if i >= 2:
                break  # a loop in Python is slow, and the rest is the same


@pytest.mark.parametrize("prior", sorted(PRIORS))
def test_scores_equal_the_integral_over_the_latent_space(prior: str) -> None:
    replicas, images = small_replicas(prior), grey_images(4).round()
    result = log_likelihood(replicas, images, 20_000)
    axis = torch.linspace(-9, 9, 361, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    area = 2 * math.log(axis[1] - axis[0])
    for r in range(len(replicas)):
        model = double_model(replicas, r, prior)
        density = torch_prior(model).log_prob(grid)
        assert (torch.logsumexp(density, 0) + area).item() == pytest.approx(0, abs=1e-3)
        pixels = TorchBernoulli(logits=model.decode(grid))
        for i, image in enumerate(images.double()):
            exact = torch.logsumexp(pixels.log_prob(image).sum(-1) + density, 0) + area
            # Five standard errors of the importance-sampled mean.
            error = 5 / math.sqrt(result.effective_samples[r, i].item())
            assert error < 0.2
            assert result.log_prob[r, i].item() == pytest.approx(exact.item(), abs=error)


def test_hopeless_pixels_cost_a_bounded_number_of_nats() -> None:
    replicas = small_replicas("normal")
    replicas.parameters["decoder.4.bias"].fill_(1000.0)
    for tensor in (replicas.parameters["decoder.4.weight"], replicas.parameters["encoder.head.weight"]):
        tensor.zero_()
    replicas.parameters["encoder.head.bias"].zero_()  # q = prior: only the pixels count
    result = log_likelihood(replicas, torch.zeros(3, PIXELS), 10)
    torch.testing.assert_close(result.log_prob, torch.full((2, 3), PIXELS * math.log(1e-5)), rtol=1e-5, atol=0)


# --- chunks, seeds, progress ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", sorted(PRIORS))
@pytest.mark.parametrize(("chunk", "bytes_per_chunk"), [(4, 1 << 25), (1, 1 << 25), (1024, 2000), (3, 700), (5, 1)])
def test_scores_do_not_depend_on_how_the_work_is_cut(
    prior: str, chunk: int, bytes_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas, images = small_replicas(prior), grey_images()
    whole = log_likelihood(replicas, images, 57)
    monkeypatch.setattr(module, "IMAGE_CHUNK", chunk)
    monkeypatch.setattr(module, "CHUNK_BYTES", {"cpu": bytes_per_chunk})
    cut = log_likelihood(replicas, images, 57)
    torch.testing.assert_close(cut.log_prob, whole.log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cut.effective_samples, whole.effective_samples, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("samples", "most", "sizes"), [(50, 20, {10}), (50, 25, {25}), (57, 20, {19}), (53, 20, {20, 13})]
)
def test_samples_come_in_equal_chunks_where_they_can(
    samples: int, most: int, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of another length is compiled once more; a prime number of samples cannot be helped."""
    replicas, images, seen = small_replicas("normal"), grey_images(), set()

    def weigh(*arguments: Any) -> Any:
        seen.add(len(arguments[-1]))
        return kept(*arguments)

    kept = module._weigh
    monkeypatch.setattr(module, "_weigh", weigh)
    monkeypatch.setattr(module, "CHUNK_BYTES", {"cpu": 4 * most * len(images) * PIXELS})
    log_likelihood(replicas, images, samples)
    assert seen == sizes


@pytest.mark.parametrize("chunk", [4, 1024])
def test_an_images_score_does_not_change_with_its_neighbours(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IMAGE_CHUNK", chunk)
    replicas, images = small_replicas("normal"), grey_images()
    whole = log_likelihood(replicas, images, 57).log_prob
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        log_likelihood(replicas, images[order], 57).log_prob, whole[:, order], rtol=1e-5, atol=1e-5
    )
    for i in (0, 5, 10):
        alone = log_likelihood(replicas, images[i : i + 1], 57).log_prob
        torch.testing.assert_close(alone, whole[:, i : i + 1], rtol=1e-5, atol=1e-5)


def test_a_replicas_scores_do_not_change_with_the_other_replicas() -> None:
    replicas, images = small_replicas("normal"), grey_images()
    before = log_likelihood(replicas, images, 20).log_prob
    for tensor in replicas.parameters.values():
        tensor[0] = torch.nan
    after = log_likelihood(replicas, images, 20).log_prob
    assert after[0].isnan().all()
    assert torch.equal(after[1], before[1])


def test_scores_repeat_and_follow_the_seed_not_the_global_random_state() -> None:
    replicas, images = small_replicas("normal"), grey_images()
    before = torch.get_rng_state()
    one = log_likelihood(replicas, images, 20, seed=1).log_prob
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(log_likelihood(replicas, images, 20, seed=1).log_prob, one)
    assert not torch.equal(log_likelihood(replicas, images, 20, seed=2).log_prob, one)


def test_progress_rises_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IMAGE_CHUNK", 4)
    seen: list[float] = []
    log_likelihood(small_replicas("normal"), grey_images(), 3, partial=PartialResult(progress=seen.append))
    assert seen == sorted(seen)
    assert len(seen) == 6
    assert seen[-1] == pytest.approx(1.0)
    assert all(0 < share <= 1 for share in seen)


def test_a_convolutional_network_is_asked_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    nets = make_nets("conv:4", (16, 16), 2, (-6.0, 2.0))
    replicas = Replicas(lambda: VAE(*nets, Bernoulli(), NormalPrior(2), 2), [0], CPU)
    most, room, parts = 20, 4 * 3 * 4 * 16 * 16, []  # bytes of one latent: three arrays of four channels
    weigh = module._weigh

    def noted(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        parts.append(len(arguments[-1]))
        return weigh(*arguments)

    monkeypatch.setattr(module, "_weigh", noted)
    monkeypatch.setattr(module, "CHUNK_BYTES", {"cpu": most * room})
    image = torch.rand(256)
    alone = log_likelihood_of_each_task(replicas, image, tasks=1, samples=60).log_prob
    assert (sum(parts), max(parts)) == (60, most)
    torch.testing.assert_close(alone, log_likelihood(replicas, image.unsqueeze(0), 60).log_prob)
    assert max(parts) == most
