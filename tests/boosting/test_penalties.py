"""The penalties R_enc and R_dec against torch.distributions, and what they remember."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, kl_divergence
from torch.distributions import Normal as TorchNormal

from boovae.boosting.penalties import REFERENCE_RANGE, Penalties
from boovae.config import Settings
from boovae.data import Stream
from boovae.model.distributions import DiagonalNormal, Side
from boovae.model.likelihood_base import Likelihood
from boovae.model.likelihoods import Bernoulli, Normal
from boovae.model.nets import make_nets
from boovae.model.priors.boosted import EMPTY, BoostedPrior
from boovae.model.vae import VAE
from boovae.training.trainer import Trainer
from conftest import Recorder, tiny, trained

SIDES: tuple[Side, ...] = ("symmetric", "forward", "reverse")
every_side = pytest.mark.parametrize("side", SIDES)
TASKS, COMPONENTS, PIXELS, LATENT = 2, 3, 6, 2
#: The place of a task that is empty: (task, component).
HOLE = (1, 2)


def seen_now(model: VAE) -> DiagonalNormal:
    """How the encoder sees old pseudo-inputs now."""
    assert isinstance(model.prior, BoostedPrior)
    return model.prior.encoded(model.posterior)


def settings(**changes: Any) -> Settings:
    return tiny(method="boo", boo_lambda=1.0, components=COMPONENTS, latent_dim=LATENT, **changes)


def model_of_two_tasks(likelihood: Likelihood | None = None, *, equal: bool = False) -> VAE:
    """A model with five components of two finished tasks, stored as its encoder and decoder see them now."""
    torch.manual_seed(0)
    prior = BoostedPrior(TASKS, COMPONENTS, PIXELS, LATENT)
    nets = make_nets("mlp:5", (PIXELS,), LATENT, (-6.0, 2.0))
    model = VAE(*nets, likelihood or Bernoulli(), prior, LATENT).requires_grad_(False)
    prior.pseudo_inputs[:TASKS] = torch.rand(TASKS, COMPONENTS, PIXELS)
    prior.mean[:TASKS], prior.log_variance[:TASKS] = model.posterior(prior.pseudo_inputs[:TASKS])
    logits = torch.zeros(TASKS, COMPONENTS) if equal else torch.randn(TASKS, COMPONENTS)
    logits[HOLE] = EMPTY
    prior.log_weights[:TASKS] = logits.log_softmax(-1)
    masses = (3 / 5, 2 / 5) if equal else (0.3, 0.7)
    prior.log_masses[:TASKS] = torch.tensor(masses).log()
    return model


def boosted(model: VAE) -> BoostedPrior:
    assert isinstance(model.prior, BoostedPrior)
    return model.prior


def moved(model: VAE, amount: float = 0.3) -> VAE:
    """The model after it has learned something else."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(amount * torch.randn_like(parameter))
    return model


def decoded(model: VAE) -> Tensor:
    """What the decoder says at every place's mean, (C, D)."""
    return model.decode(boosted(model).mean[:TASKS]).flatten(0, 1)


def noise(*, zero: bool = False) -> Tensor:
    draws = torch.randn(3, TASKS * COMPONENTS, LATENT, generator=torch.Generator().manual_seed(2))
    return 0 * draws if zero else draws


def filled_places() -> list[tuple[int, int]]:
    return [(task, k) for task in range(TASKS) for k in range(COMPONENTS) if (task, k) != HOLE]


def weight_of(model: VAE, place: tuple[int, int]) -> float:
    prior = boosted(model)
    return (prior.log_masses[place[0]].exp() * prior.log_weights[place].exp()).item()


def gaussian(mean: Tensor, log_variance: Tensor) -> Distribution:
    return Independent(TorchNormal(mean, (0.5 * log_variance).exp()), 1)


def one_side(p: Distribution, q: Distribution, side: str) -> Tensor:
    """The divergence of the stored p and the present q, from its definition."""
    forward, reverse = kl_divergence(p, q), kl_divergence(q, p)
    return {"forward": forward, "reverse": reverse, "symmetric": 0.5 * (forward + reverse)}[side]


# --- the divergences they are made of -------------------------------------------------------------------------------


@every_side
def test_divergence_of_gaussians_equals_torch_distributions(side: Side) -> None:
    one, other = (DiagonalNormal(*torch.randn(2, 6, 3, dtype=torch.float64)) for _ in range(2))
    truth = one_side(gaussian(*one), gaussian(*other), side)
    torch.testing.assert_close(one.divergence(other, side), truth)
    if side == "forward":
        torch.testing.assert_close(one.kl(other), truth)


@every_side
def test_divergence_of_pixels_equals_torch_distributions(side: Side) -> None:
    a, b = 3 * torch.randn(2, 5, 7, dtype=torch.float64)
    pairs: dict[Likelihood, tuple[Distribution, Distribution]] = {
        Bernoulli(): (TorchBernoulli(logits=a), TorchBernoulli(logits=b)),
        Normal(0.3): (TorchNormal(a, math.exp(0.15)), TorchNormal(b, math.exp(0.15))),
    }
    for likelihood, (p, q) in pairs.items():
        torch.testing.assert_close(likelihood.divergence(a, b, side), one_side(p, q, side).sum(-1))


# --- the penalties --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["reference", "sum", "mean"])
@every_side
def test_nothing_that_stayed_is_penalised(reduction: str, side: Side) -> None:
    model = model_of_two_tasks()
    penalties = Penalties(settings(boo_divergence=side), on=True, reduction=reduction)
    assert penalties.encoder_divergence(model, seen_now(model), noise()[:2]).item() == pytest.approx(0, abs=1e-4)
    zero = noise(zero=True)[2]
    stored, z = decoded(model), penalties.latents(model, zero)
    assert penalties.decoder_divergence(model, z, stored).item() == pytest.approx(0, abs=1e-5)
    moved(model)
    assert penalties.encoder_divergence(model, seen_now(model), noise()[:2]).item() != pytest.approx(0, abs=1e-2)
    assert penalties.decoder_divergence(model, z, stored).item() > 1e-2


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@every_side
def test_the_encoder_is_penalised_component_by_component(reduction: str, side: Side) -> None:
    model = moved(model_of_two_tasks())
    prior, truth = boosted(model), 0.0
    for place in filled_places():
        share = 1.0 if reduction == "sum" else weight_of(model, place)
        stored = gaussian(prior.mean[place], prior.log_variance[place])
        now = gaussian(*model.posterior(prior.pseudo_inputs[place]))
        truth += share * one_side(stored, now, side).item()
    penalties = Penalties(settings(boo_divergence=side), on=True, reduction=reduction)
    assert penalties.encoder_divergence(model, seen_now(model), noise()[:2]).item() == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("reduction", ["reference", "sum", "mean"])
@pytest.mark.parametrize("likelihood", [Bernoulli(), Normal()], ids=lambda likelihood: likelihood.name)
@every_side
def test_the_decoder_is_penalised_at_a_sample_of_each_component(
    reduction: str, likelihood: Likelihood, side: Side
) -> None:
    model = model_of_two_tasks(likelihood)
    stored, prior = decoded(model), boosted(model)
    # One component broader, one narrower than the reference reading allows.
    prior.log_variance[0, 0], prior.log_variance[0, 1] = 1.0, -5.5
    moved(model)
    draws, truth = noise()[2].view(TASKS, COMPONENTS, LATENT), 0.0
    for place in filled_places():
        share = 1.0 if reduction == "sum" else weight_of(model, place)
        log_variance = prior.log_variance[place]
        if reduction == "reference":  # each task counts one
            share = prior.log_weights[place].exp().item()
            log_variance = log_variance.clamp(*REFERENCE_RANGE)
        now = model.decode(prior.mean[place] + draws[place] * log_variance.exp().sqrt())
        then = stored.view(TASKS, COMPONENTS, PIXELS)[place]
        p, q = (
            TorchBernoulli(logits=output)
            if isinstance(likelihood, Bernoulli)
            else TorchNormal(output, (2 * math.pi) ** -0.5)
            for output in (then, now)
        )
        truth += share * one_side(p, q, side).sum().item()
    penalties = Penalties(settings(boo_divergence=side), on=True, reduction=reduction)
    assert penalties.decoder_divergence(model, penalties.latents(model, noise()[2]), stored).item() == pytest.approx(
        truth, rel=1e-4
    )


@every_side
def test_the_reference_reading_is_the_divergence_of_the_mixtures_times_the_components(side: Side) -> None:
    """One sample per component, unweighted: with equal weights its mean is the mixtures' KL, times five."""
    model = moved(model_of_two_tasks(equal=True), 0.15)
    prior, places = boosted(model), tuple(zip(*filled_places(), strict=True))
    stored, now = (
        MixtureSameFamily(Categorical(torch.ones(5)), gaussian(mean, log_variance))
        for mean, log_variance in (
            (prior.mean[places], prior.log_variance[places]),
            model.posterior(prior.pseudo_inputs[places]),
        )
    )
    torch.manual_seed(3)
    there, here = stored.sample((100_000,)), now.sample((100_000,))
    forward = (stored.log_prob(there) - now.log_prob(there)).mean().item()
    reverse = (now.log_prob(here) - stored.log_prob(here)).mean().item()
    truth = 5 * {"forward": forward, "reverse": reverse, "symmetric": 0.5 * (forward + reverse)}[side]
    penalties = Penalties(settings(boo_divergence=side), on=True, reduction="reference")
    draws = torch.randn(2000, 2, TASKS * COMPONENTS, LATENT)
    drawn = torch.func.vmap(lambda noise: penalties.encoder_divergence(model, seen_now(model), noise))(draws)
    assert truth > 0.05
    assert drawn.mean().item() == pytest.approx(truth, abs=5 * drawn.std().item() / math.sqrt(len(drawn)))


@pytest.mark.parametrize("reduction", ["reference", "sum", "mean"])
def test_empty_places_count_nothing_and_give_finite_gradients(reduction: str) -> None:
    penalties = Penalties(settings(), on=True, reduction=reduction)

    def with_garbage(amount: float) -> tuple[Tensor, list[Tensor]]:
        model = moved(model_of_two_tasks())
        stored, prior = decoded(model), boosted(model)
        prior.pseudo_inputs[HOLE] = prior.pseudo_inputs[TASKS:] = amount
        prior.mean[HOLE] = prior.mean[TASKS:] = 10 * amount
        stored.view(TASKS, COMPONENTS, PIXELS)[HOLE] = 100 * amount
        model.requires_grad_(True)
        total = penalties.encoder_divergence(model, seen_now(model), noise()[:2])
        total = total + penalties.decoder_divergence(model, penalties.latents(model, noise()[2]), stored)
        parameters = [*model.encoder.parameters(), *model.decoder.parameters()]
        return total.detach(), list(torch.autograd.grad(total, parameters))

    plain, gradients = with_garbage(0.0)
    other, others = with_garbage(1.0)
    torch.testing.assert_close(plain, other)
    for one, two in zip(gradients, others, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    assert any(gradient.abs().max() > 0.1 for gradient in gradients)


# --- in a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "tasks"])
def test_the_penalties_have_the_weight_asked_for(schedule: str, digits: Stream) -> None:
    recorder = Recorder()
    chosen = {"boo_lambda": 0.5, "boo_lambda_schedule": schedule, "boo_reduction": "mean", "epochs": 1}
    trainer = trained(tiny(method="boo", **chosen), digits, recorder)
    before, own = sum(trainer.sizes[:2]), trainer.sizes[2]
    weight = 0.5 if schedule == "constant" else 0.5 * before / own
    torch.testing.assert_close(trainer.method.state["lambda"], torch.full((2,), weight))
    epochs = recorder.of("epoch")
    assert ["encoder" in event["valid"] for event in epochs] == [False, True, True]
    last = epochs[-1]["valid"]
    for replica in range(2):
        terms = sum(last[name][replica] for name in ("reconstruction", "kl", "encoder", "decoder"))
        assert last["loss"][replica] == pytest.approx(terms, rel=1e-5)


@pytest.mark.parametrize("stop_by", ["loss", "bound"])
def test_early_stopping_watches_the_chosen_loss(stop_by: str, digits: Stream) -> None:
    recorder = Recorder()
    chosen = {"boo_lambda": 50.0, "boo_reduction": "mean", "boo_until": 1, "epochs": 8, "early_stop": 8}
    trained(tiny(method="boo", stop_by=stop_by, **chosen), digits, recorder)
    end = [event for event in recorder.events if event["event"] == "task_end"][-1]
    epochs = [event["valid"] for event in recorder.events if event["event"] == "epoch" and event["task"] == end["task"]]
    names = ("loss",) if stop_by == "loss" else ("reconstruction", "kl")
    differ = False
    for replica, best in enumerate(end["best_epoch"]):
        watched = [sum(epoch[name][replica] for name in names) for epoch in epochs]
        others = [epoch["loss"][replica] - watched[at] for at, epoch in enumerate(epochs)]
        differ |= max(others) > 0.1
        assert best == min(range(1, len(watched)), key=watched.__getitem__)
    assert differ == (stop_by == "bound")


def test_the_penalty_is_lambda_times_both_divergences() -> None:
    model = model_of_two_tasks()
    stored = decoded(model)
    moved(model)
    penalties = Penalties(settings(), on=True, reduction="sum")
    state = {"lambda": torch.tensor(0.25), "decoded": stored.view(TASKS, COMPONENTS, PIXELS)}
    terms = penalties.penalty(model, {"held": noise(), "state": state, "old_components": seen_now(model)})
    torch.testing.assert_close(
        terms["encoder"], 0.25 * penalties.encoder_divergence(model, seen_now(model), noise()[:2])
    )
    torch.testing.assert_close(
        terms["decoder"], 0.25 * penalties.decoder_divergence(model, penalties.latents(model, noise()[2]), stored)
    )


def test_decoded_images_are_kept_as_they_were_when_their_task_ended(digits: Stream) -> None:
    memories = []

    class Keeper(Recorder):
        def event(self, event: dict[str, Any]) -> None:
            if event["event"] == "task_end":
                memories.append({name: tensor.clone() for name, tensor in trainer.method.memory().items()})

    trainer = Trainer(tiny(method="boo", boo_lambda=1.0, epochs=2), digits.spec)
    for index, task in enumerate(digits[:3]):
        trainer.learn(task, Keeper())
        assert memories[-1]["decoded"].shape == (2, index + 1, 3, 64)
        logits = trainer.replicas.map(lambda model, mean: model.decode(mean), memories[-1]["mean"][:, -1])
        bound = math.log(1e5 - 1)
        torch.testing.assert_close(memories[-1]["decoded"][:, -1], logits.clamp(-bound, bound))
    for index in range(2):
        assert torch.equal(memories[2]["decoded"][:, index], memories[index]["decoded"][:, index])


def test_with_a_teacher_the_old_decoder_answers_and_no_image_is_kept(digits: Stream) -> None:
    trainer = Trainer(tiny(method="boo", boo_lambda=1.0, boo_decoder="teacher"), digits.spec)
    for index, task in enumerate(digits[:2]):
        before = {name: tensor.clone() for name, tensor in trainer.replicas.parameters.items()}
        trainer.learn(task, recorder := Recorder())
        assert "decoded" not in trainer.method.memory()
        state = trainer.method.state
        assert bool(state) == (index > 0)
        for name in state.keys() - {"lambda"}:
            assert name.startswith("decoder.")
            assert torch.equal(state[name], before[name])
    first = next(event for event in recorder.events if event["event"] == "epoch")
    assert min(first["valid"]["decoder"]) > 0


def test_what_is_kept_of_decoded_images_is_bounded(digits: Stream) -> None:
    settings = tiny(method="boo", boo_lambda=1.0, tasks=1, epochs=1)
    trainer = trained(settings, digits)
    trainer.replicas.parameters["decoder.4.bias"] += 100
    kept = Penalties.outputs(trainer.replicas, trainer.method.memory()["mean"])
    torch.testing.assert_close(kept, torch.full_like(kept, math.log(1e5 - 1)))


def test_a_strong_penalty_keeps_old_components_where_they_were(digits: Stream) -> None:
    def drift(strength: float) -> float:
        chosen = {"boo_lambda": strength, "boo_reduction": "sum", "epochs": 10, "learning_rate": 5e-3, "tasks": 2}
        trainer = trained(tiny(method="boo", **chosen), digits)
        memory = trainer.method.memory()
        stored = DiagonalNormal(memory["mean"][:, 0], memory["log_variance"][:, 0])
        now = trainer.replicas.map(VAE.posterior, memory["pseudo_inputs"][:, 0])
        return stored.symmetric_kl(now).mean().item()

    assert drift(10.0) < 0.3 * drift(0.0)


def test_nothing_of_a_step_stays_in_the_model(digits: Stream) -> None:
    """EWC looks at gradients of single images before the task is stored; what it computes with must not be kept."""
    trainer = Trainer(tiny(method="ewc+boo", boo_lambda=1.0), digits.spec)
    for task in digits[:2]:
        trainer.learn(task, Recorder())
    copy.deepcopy(trainer.replicas.model)  # tensors of a gradient's computation cannot be copied
