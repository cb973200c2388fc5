"""The boosted prior and the fitting of its components, against independent truth."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributions

from boovae.boosting import cluster_images, cross_entropy, em_weights
from boovae.config import resolve
from boovae.data import Stream
from boovae.distributions import DiagonalNormal
from boovae.likelihoods import Bernoulli, Logistic, Normal
from boovae.metrics.evaluation import evaluate
from boovae.priors import BoostedPrior
from boovae.training.trainer import Trainer
from conftest import Recorder, tiny, trained


def identity_encoder(x: Tensor) -> DiagonalNormal:
    """Reads mean and log-variance straight off the pixels."""
    mean, log_variance = x.chunk(2, dim=-1)
    return DiagonalNormal(mean, log_variance)


def filled(tasks: int = 3, components: int = 4) -> BoostedPrior:
    """A prior that remembers a few tasks; most of its room is empty."""
    torch.manual_seed(0)
    prior = BoostedPrior(tasks, components, pixels=4, latent_dim=2)
    prior.pseudo_inputs[:tasks] = torch.randn(tasks, components, 4)
    stored = identity_encoder(prior.pseudo_inputs[:tasks])
    prior.mean[:tasks] = stored.mean
    prior.log_variance[:tasks] = stored.log_variance
    prior.log_weights[:tasks] = torch.randn(tasks, components).log_softmax(-1)
    prior.log_masses[:tasks] = torch.tensor([1.0, 2.0, 5.0][:tasks]).log().log_softmax(0)
    return prior


def mixture_of(prior: BoostedPrior, tasks: slice) -> distributions.MixtureSameFamily:
    """The same mixture in torch's own words."""
    tasks = slice(tasks.start, 3 if tasks.stop is None else tasks.stop)
    masses = prior.log_masses[tasks].softmax(0).unsqueeze(1)
    weights = (masses * prior.log_weights[tasks].exp()).flatten()
    parts = distributions.Normal(prior.mean[tasks].flatten(0, 1), (0.5 * prior.log_variance[tasks]).exp().flatten(0, 1))
    return distributions.MixtureSameFamily(distributions.Categorical(weights), distributions.Independent(parts, 1))


def test_the_boosted_density_is_the_mixture_it_says() -> None:
    prior, z = filled(), torch.randn(50, 2)
    torch.testing.assert_close(prior(identity_encoder).log_prob(z), mixture_of(prior, slice(None)).log_prob(z))
    torch.testing.assert_close(prior.before(identity_encoder).log_prob(z), mixture_of(prior, slice(None)).log_prob(z))
    for task in range(3):
        one = mixture_of(prior, slice(task, task + 1)).log_prob(z)
        torch.testing.assert_close(prior(identity_encoder, task).log_prob(z), one)


def test_each_image_is_scored_by_its_own_task() -> None:
    prior, z, tasks = filled(), torch.randn(6, 5, 2), torch.tensor([0, 1, 2, 2, 1, 0])
    whole, own = prior.log_probs(identity_encoder, z, tasks)
    torch.testing.assert_close(whole, mixture_of(prior, slice(None)).log_prob(z))
    for image, task in enumerate(tasks.tolist()):
        torch.testing.assert_close(own[image], mixture_of(prior, slice(task, task + 1)).log_prob(z[image]))


def moved(x: Tensor) -> DiagonalNormal:
    """An encoder that has learned since."""
    mean, log_variance = identity_encoder(x)
    return DiagonalNormal(mean + 1, log_variance)


def test_the_current_task_follows_the_encoder_while_it_is_learned() -> None:
    prior, z = filled(), torch.randn(20, 2)
    still = prior(moved).log_prob(z)
    torch.testing.assert_close(prior(identity_encoder).log_prob(z), still)
    prior.live = True
    prior.live_inputs.copy_(torch.randn(4, 4))
    prior.live_log_weights.copy_(torch.randn(4).log_softmax(-1))
    prior.live_log_mass.fill_(math.log(0.25))
    prior.log_masses += math.log(0.75)
    parts = distributions.Normal(
        *(lambda mean, log_variance: (mean, (0.5 * log_variance).exp()))(*moved(prior.live_inputs))
    )
    weights = distributions.Categorical(logits=prior.live_log_weights)
    own = distributions.MixtureSameFamily(weights, distributions.Independent(parts, 1)).log_prob(z)
    torch.testing.assert_close(prior.current(moved).log_prob(z), own)
    torch.testing.assert_close(prior(moved).log_prob(z), torch.logaddexp(still + math.log(0.75), own + math.log(0.25)))
    posterior = DiagonalNormal(torch.zeros(20, 2), torch.zeros(20, 2))
    torch.testing.assert_close(prior.kl(posterior, z, moved), posterior.log_prob(z) - own)
    prior.elbo = "full"
    torch.testing.assert_close(prior.kl(posterior, z, moved), posterior.log_prob(z) - prior(moved).log_prob(z))


def test_reencoded_components_follow_the_encoder_in_scores_and_samples() -> None:
    prior, z = filled(), torch.randn(20, 2)
    still, uniform, noise = prior(moved).log_prob(z), torch.rand(50), torch.randn(50, 2)
    stored = prior(moved).sample(uniform, noise)
    prior.reencode = True
    torch.testing.assert_close(prior(moved).log_prob(z + 1), still)
    torch.testing.assert_close(prior(moved).sample(uniform, noise), stored + 1)


def test_samples_come_from_the_task_that_is_asked_for() -> None:
    prior = filled()
    prior.mean[:3] = 100 * torch.arange(3.0).view(3, 1, 1)
    uniform, normal = torch.rand(4000), torch.randn(4000, 2)
    drawn = (prior(identity_encoder).sample(uniform, normal)[:, 0] / 100).round()
    shares = torch.stack([(drawn == task).float().mean() for task in range(3)])
    torch.testing.assert_close(shares, prior.log_masses[:3].exp(), rtol=0, atol=0.03)
    assert ((prior(identity_encoder, 1).sample(uniform, normal)[:, 0] / 100).round() == 1).all()


@given(st.integers(1, 6), st.integers(0, 2**31))
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


def test_clusters_are_the_groups_that_are_there() -> None:
    z = torch.cat([torch.randn(30, 2) * 0.1 + centre for centre in (0.0, 10.0, -10.0)])
    images = torch.cat([torch.full((30, 5), value) for value in (0.1, 0.5, 0.9)])
    means, shares = cluster_images(z, images, torch.tensor([0.5, 0.5, 0.5]))
    torch.testing.assert_close(means[:, 0].sort().values, torch.tensor([0.1, 0.5, 0.9]))
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3))


def test_more_clusters_than_different_images_do_no_harm() -> None:
    means, shares = cluster_images(torch.zeros(4, 2), torch.full((4, 3), 0.25), torch.rand(6))
    torch.testing.assert_close(means, torch.full((6, 3), 0.25))
    assert shares.sum().item() == pytest.approx(1)


def test_divergences_of_pixels_against_torch() -> None:
    a, b = torch.randn(2, 5, 7)
    pairs = {
        Bernoulli(): (distributions.Bernoulli(logits=a), distributions.Bernoulli(logits=b)),
        Normal(0.3): (distributions.Normal(a, math.exp(0.15)), distributions.Normal(b, math.exp(0.15))),
    }
    for likelihood, (p, q) in pairs.items():
        kl = distributions.kl_divergence(p, q) + distributions.kl_divergence(q, p)
        torch.testing.assert_close(likelihood.divergence(a, b), 0.5 * kl.sum(-1))


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


def test_symmetric_divergence_of_gaussians_against_torch() -> None:
    one, other = (DiagonalNormal(torch.randn(6, 3), torch.randn(6, 3)) for _ in range(2))
    p, q = (distributions.Normal(part.mean, (0.5 * part.log_variance).exp()) for part in (one, other))
    truth = 0.5 * (distributions.kl_divergence(p, q) + distributions.kl_divergence(q, p)).sum(-1)
    torch.testing.assert_close(one.symmetric_kl(other), truth)
    assert one.symmetric_kl(one).abs().max() < 1e-6


def test_what_boo_remembers_is_a_handful_of_images_per_task(digits: Stream) -> None:
    trainer = trained(tiny(method="boo"), digits)
    memory = trainer.method.memory()
    assert memory["pseudo_inputs"].shape == (2, 3, 3, 64)  # replicas, tasks, components, pixels
    assert trainer.method.images_stored() == 0
    torch.testing.assert_close(memory["log_weights"].exp().sum(-1), torch.ones(2, 3))


def test_a_task_of_identical_images_is_learned(digits: Stream) -> None:
    same = Stream.from_tasks([digits[0].train.images.view(-1, 8, 8), torch.full((12, 8, 8), 0.5)])
    trainer = trained(tiny(method="boo+distill", tasks=2), same)
    assert all(tensor.isfinite().all() for tensor in trainer.replicas.tensors().values())


@pytest.mark.slow
def test_boo_with_distillation_forgets_a_tenth_of_what_fine_tuning_forgets() -> None:
    from boovae.data import load_stream

    stream = load_stream("digits")[:4]

    def forgotten(method: str) -> float:
        settings = resolve({"dataset": "digits", "method": method, "replicas": 2, "samples": 300})
        trainer = Trainer(dataclasses.replace(settings, tasks=4), stream.shape)
        history: list[dict[str, object]] = []
        for seen, task in enumerate(stream, start=1):
            trainer.learn(task, Recorder())
            history.append(evaluate(trainer, stream[:seen], None, history, metrics=("nll",)))
        change = history[-1]["forgetting"]["own"][:-1]  # type: ignore[index]
        return sum(map(sum, change)) / (len(change) * 2)

    assert forgotten("boo+distill") < 0.1 * forgotten("standard")
