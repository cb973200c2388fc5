"""Learning the components of a task: the fit of all together, the greedy growth, and what diverges."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, distributions

import boovae.boosting.fit
from boovae.boosting.fit import STRATEGIES, FitSettings, Fitted
from boovae.data import Stream, load_stream
from boovae.methods import TaskImages
from boovae.model.distributions import DiagonalMixture
from boovae.model.priors.boosted import EMPTY
from boovae.model.vae import VAE
from boovae.replicas.descent import Descent
from boovae.replicas.stacked import Replicas
from boovae.training.trainer import Trainer
from conftest import Recorder, finite, in_torch, same, tiny, trained

RULES = ("em", "bisection", "equal", "fixed")
every_objective = pytest.mark.parametrize("objective", ["corrective", "forward", "literal"])


@dataclasses.dataclass
class Bench:
    """Networks that have learned all ten digits as one task, and that task's images."""

    trainer: Trainer
    task: TaskImages

    def boosting(self, **changes: Any) -> Any:
        """A fresh start: no components yet."""
        buffers = self.replicas.buffers
        buffers["prior.live_inputs"].zero_()
        buffers["prior.live_log_weights"].fill_(EMPTY)
        return self.strategy(**changes)

    def strategy(self, **changes: Any) -> Any:
        """What goes on with the components there are; its last fit is that after the first epoch."""
        settings = self.trainer.settings.changed(boo_until=1, **changes)
        strategy = STRATEGIES[settings.of(FitSettings).boo_objective]
        return strategy(settings, self.replicas, self.task.train, 0, (0.0, 1.0))

    @property
    def replicas(self) -> Replicas:
        return self.trainer.replicas

    def fitted(self) -> tuple[Tensor, Tensor]:
        buffers = self.replicas.buffers
        return buffers["prior.live_inputs"].clone(), buffers["prior.live_log_weights"].clone()

    def divergence(self) -> Tensor:
        """−E_q̂[log m] (R,) of the components there are, on many codes of all images, in torch's own words."""
        inputs, log_weights = self.fitted()
        images = self.task.train.expand(len(self.replicas), *self.task.train.shape)
        posterior, parts = (self.replicas.map(VAE.posterior, one) for one in (images, inputs))
        torch.manual_seed(0)
        losses = []
        for replica in range(len(self.replicas)):
            code = distributions.Normal(posterior.mean[replica], posterior.log_variance[replica].div(2).exp())
            mixture = DiagonalMixture(log_weights[replica], parts.mean[replica], parts.log_variance[replica])
            losses.append(-in_torch(mixture).log_prob(code.sample((20,))).mean())
        return torch.stack(losses)


@pytest.fixture(scope="module")
def bench() -> Bench:
    stream = load_stream("digits", limit=20, classes_per_task=10)
    # A small weight of the KL term spreads the codes.
    changes = {"kl_weight": 0.05, "learning_rate": 1e-2, "epochs": 15, "batch_size": 40, "boo_until": 1}
    trainer = trained(tiny(method="boo", tasks=1, components=4, **changes), stream)
    train, valid = stream[0].train.images, stream[0].valid.images
    return Bench(trainer, TaskImages(0, stream[0].name, train, valid, len(train), ()))


@pytest.mark.parametrize("start", ["clusters", "noise", "mean"])
def test_a_fit_lowers_the_divergence_and_stays_in_the_box_of_the_pixels(start: str, bench: Bench) -> None:
    divergences = []
    for steps in (0, 40):
        assert bench.boosting(boo_steps=steps, boo_start=start, boo_rate=0.05).begin() is None
        inputs, log_weights = bench.fitted()
        assert inputs.min() >= 0
        assert inputs.max() <= 1
        torch.testing.assert_close(log_weights.exp().sum(1), torch.ones(2))
        divergences.append(bench.divergence())
    # Clusters are as good as a fit where there are so few images.
    assert (divergences[1] < divergences[0] + (0.1 if start == "clusters" else -0.2)).all()


def test_the_last_fit_says_what_each_number_of_components_would_reach(bench: Bench) -> None:
    boosting = bench.boosting(boo_steps=20)
    assert boosting.begin() is None
    fitted: Fitted = boosting.after_epoch(1)
    assert (fitted.epoch, fitted.sizes) == (1, [1, 2, 3, 4])
    curve = fitted.divergence
    assert curve.shape == (4, 2)
    assert (curve[0] - curve[-1] > 0.3).all()
    # With all of them it is the divergence of the fit, up to the noise of the codes.
    torch.testing.assert_close(curve[-1], bench.divergence(), rtol=0, atol=0.2)


def test_a_tolerance_keeps_the_components_that_gain_more(bench: Bench) -> None:
    curve = bench.boosting(boo_steps=20).after_epoch(1).divergence
    gains = curve[:-1] - curve[1:]
    assert gains[0].min() > 0.25 > gains[1].max()
    bench.boosting(boo_steps=20, boo_tolerance=0.25).after_epoch(1)
    log_weights = bench.fitted()[1]
    assert (log_weights > EMPTY / 2).sum(1).tolist() == [2, 2]
    torch.testing.assert_close(log_weights.exp().sum(1), torch.ones(2))
    torch.testing.assert_close(bench.divergence(), curve[1], rtol=0, atol=0.2)


@every_objective
def test_the_only_component_stays_whatever_the_tolerance(objective: str, digits: Stream) -> None:
    trainer = trained(tiny(method="boo", tasks=1, components=1, boo_objective=objective, boo_tolerance=9.0), digits)
    assert trainer.method.memory()["log_weights"].tolist() == [[[0.0]], [[0.0]]]


@pytest.mark.parametrize(
    ("objective", "weights"),
    [*(("forward", rule) for rule in RULES), *(("literal", rule) for rule in RULES[:2])],
)
def test_growth_lowers_the_divergence_and_says_to_what(objective: str, weights: str, bench: Bench) -> None:
    boosting = bench.boosting(boo_objective=objective, boo_weights=weights, boo_steps=20, boo_first="learned")
    divergences = []
    for slot in range(3):
        said = boosting.grow(slot).divergence[0]
        weight = bench.fitted()[1].exp()
        torch.testing.assert_close(weight.sum(1), torch.ones(2))
        assert (weight[:, slot + 1 :] == 0).all()
        divergences.append(bench.divergence())
        torch.testing.assert_close(said, divergences[-1], rtol=0, atol=0.4)
    # The literal objective may run away; a fitted weight then keeps its component from doing harm.
    assert (divergences[-1] < divergences[0] + (-0.2 if objective == "forward" else 0.05)).all()


def test_a_refused_component_changes_nothing_and_does_not_end_the_growth(bench: Bench) -> None:
    bench.boosting(boo_objective="forward", boo_steps=20).grow(0)
    before = bench.fitted()[1]
    for slot, tolerance in ((1, 1e6), (2, 1e-3)):
        said = bench.strategy(boo_objective="forward", boo_tolerance=tolerance).grow(slot).divergence[0]
        after = bench.fitted()[1]
        assert said.isnan().tolist() == [slot == 1] * 2
        assert torch.equal(after, before) == (slot == 1)
    assert (after.exp() > 0).tolist() == [[True, False, True, False]] * 2


def test_a_new_component_has_the_weight_its_rule_gives_it(bench: Bench) -> None:
    for rule, truth in (("equal", [0.25] * 4), ("fixed", [0.125, 0.125, 0.25, 0.5])):
        boosting = bench.boosting(boo_objective="forward", boo_weights=rule, boo_steps=1)
        for slot in range(4):
            boosting.grow(slot)
        torch.testing.assert_close(bench.fitted()[1].exp(), torch.tensor([truth, truth]))


def test_the_target_mixes_old_prior_and_new_codes_by_numbers_of_images(digits: Stream) -> None:
    settings = tiny(method="boo", tasks=1, boo_target="full", boo_objective="literal")
    trainer = trained(settings, digits)
    train, valid = digits[1].train.images[:5], digits[1].valid.images
    task = TaskImages(1, "next", train, valid, len(train), tuple(trainer.sizes))
    trainer.method.see(2)
    trainer.method.parts[0].begin_task(trainer.replicas, task)
    boosting: Any = trainer.method.parts[0].boosting  # type: ignore[attr-defined]
    _, posterior, z = boosting.codes("test")
    target = boosting.target(posterior)
    share = trainer.sizes[0] / (trainer.sizes[0] + 5)
    memory = trainer.method.memory()
    for replica in range(2):
        old = DiagonalMixture(*(memory[name][replica, 0] for name in ("log_weights", "mean", "log_variance")))
        new = distributions.Normal(posterior.mean[replica], posterior.log_variance[replica].div(2).exp())
        codes = new.log_prob(z[replica].unsqueeze(1)).sum(-1).exp().mean(1)
        truth = share * old.log_prob(z[replica]).exp() + (1 - share) * codes
        ours = DiagonalMixture(*(part[replica] for part in target)).log_prob(z[replica]).exp()
        torch.testing.assert_close(ours, truth, rtol=1e-3, atol=1e-6)


# --- components that diverge ----------------------------------------------------------------------------------------


class Diverging(Descent):
    """Ends outside the finite numbers in replica 1."""

    def __call__(self, start: list[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
        learned = super().__call__(start, *arguments, **options)
        for tensor in learned:
            tensor[1] = math.nan
        return learned


@every_objective
def test_a_component_that_diverged_goes_back_to_its_start(
    objective: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learned(steps: int) -> tuple[Tensor, Tensor]:
        boosting = bench.boosting(boo_objective=objective, boo_steps=steps)
        if objective == "corrective":
            boosting.after_epoch(1)
        else:
            boosting.grow(0)
            boosting.grow(1)
        return bench.fitted()

    whole, still = learned(5), learned(0)
    monkeypatch.setattr(boovae.boosting.fit, "Descent", Diverging)
    hurt = learned(5)
    for part in range(2):
        torch.testing.assert_close(hurt[part][0], whole[part][0])
        torch.testing.assert_close(hurt[part][1], still[part][1])
    assert not torch.equal(whole[0][1], still[0][1])


@every_objective
def test_a_run_survives_components_that_diverge(
    objective: str, digits: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny(method="boo", boo_objective=objective, tasks=2, epochs=3)
    whole = trained(settings, digits)
    monkeypatch.setattr(boovae.boosting.fit, "Descent", Diverging)
    recorder = Recorder()
    hurt = trained(settings, digits, recorder)
    assert finite(hurt)
    assert same(hurt, whole, replica=0)
    said = [event["divergence"] for event in recorder.of("components") if "divergence" in event]
    assert all(math.isfinite(value) for value in itertools.chain(*itertools.chain(*said)))
    assert not recorder.of("divergence")
