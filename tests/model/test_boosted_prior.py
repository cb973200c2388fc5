"""The boosted prior: the mixture it says it is, in densities and in samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor, distributions

from boovae.model.distributions import DiagonalMixture, DiagonalNormal
from boovae.model.priors.boosted import BoostedPrior
from boovae.model.priors.prior import kl
from conftest import in_torch


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
    parts = (part[tasks].flatten(0, 1) for part in (prior.mean, prior.log_variance))
    return in_torch(DiagonalMixture(weights.log(), *parts))


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
    prior.live, prior.seen = True, 4
    prior.live_inputs.copy_(torch.randn(4, 4))
    prior.live_log_weights.copy_(torch.randn(4).log_softmax(-1))
    prior.live_log_mass.fill_(math.log(0.25))
    prior.log_masses += math.log(0.75)
    own = in_torch(DiagonalMixture(prior.live_log_weights, *moved(prior.live_inputs))).log_prob(z)
    torch.testing.assert_close(prior.current(moved).log_prob(z), own)
    torch.testing.assert_close(prior(moved).log_prob(z), torch.logaddexp(still + math.log(0.75), own + math.log(0.25)))
    posterior = DiagonalNormal(torch.zeros(20, 2), torch.zeros(20, 2))
    torch.testing.assert_close(kl(posterior, z, prior.for_training(moved)[0]), posterior.log_prob(z) - own)
    prior.elbo = "full"
    torch.testing.assert_close(
        kl(posterior, z, prior.for_training(moved)[0]), posterior.log_prob(z) - prior(moved).log_prob(z)
    )


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


def test_old_pseudo_inputs_pass_the_encoder_beside_the_live_ones_without_changing_a_number() -> None:
    prior = filled()
    prior.live_inputs.normal_()
    prior.live_log_weights[:] = torch.randn(4).log_softmax(-1)
    prior.live, prior.seen = True, 4
    passes = []

    def encoder(x: Tensor) -> DiagonalNormal:
        passes.append(len(x))
        return identity_encoder(x)

    posterior, z = DiagonalNormal(torch.randn(5, 2), torch.randn(5, 2)), torch.randn(5, 2)
    density, none = prior.for_training(encoder)
    assert none is None
    apart = kl(posterior, z, density), prior.encoded(encoder)
    density, old = prior.for_training(encoder, old=True)
    assert passes == [4, 12, 16]  # four of each task: room without a task costs nothing
    torch.testing.assert_close((kl(posterior, z, density), old), apart)
