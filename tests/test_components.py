"""Learning the components of a task inside a run: the fits, the greedy growth, every switch, and trouble."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, distributions

import boovae.components
from boovae.boosting import Descent
from boovae.components import Minorisation
from boovae.config import Settings
from boovae.data import Stream, load_stream
from boovae.distributions import DiagonalMixture
from boovae.methods import TaskImages
from boovae.priors.boosted import EMPTY
from boovae.run import train
from boovae.training.events import Event
from boovae.training.replicas import Replicas
from boovae.training.trainer import Trainer
from boovae.vae import VAE
from conftest import Recorder, finite, in_torch, same, tiny, train_with_kills, trained

OBJECTIVES = ("corrective", "forward", "literal")
RULES = ("em", "bisection", "equal", "fixed")
every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


def live_weights(trainer: Trainer) -> Tensor:
    log_weights: Tensor = trainer.replicas.buffers["prior.live_log_weights"]
    return log_weights.exp()


class Weights(Recorder):
    """Keeps the weights (R, K) of the task in training after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def epoch(self, trainer: Trainer, event: Event) -> None:
        self.weights.append(live_weights(trainer).clone())

    def logged(self, key: str) -> list[Any]:
        """What the method logged under a name, in order."""
        return [event[key] for event in self.of("components") if key in event]


# --- one fit --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bench:
    """Networks that have learned all ten digits as one task, and that task's images."""

    trainer: Trainer
    task: TaskImages

    def minorisation(self, **changes: Any) -> Minorisation:
        """A fresh start: no components yet."""
        buffers = self.replicas.buffers
        buffers["prior.live_inputs"].zero_()
        buffers["prior.live_log_weights"].fill_(EMPTY)
        return Minorisation(dataclasses.replace(self.trainer.settings, **changes), (0.0, 1.0))

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
        bench.minorisation(boo_steps=steps, boo_start=start, boo_rate=0.05).fit(bench.replicas, bench.task, epoch=0)
        inputs, log_weights = bench.fitted()
        assert inputs.min() >= 0
        assert inputs.max() <= 1
        torch.testing.assert_close(log_weights.exp().sum(1), torch.ones(2))
        divergences.append(bench.divergence())
    # Clusters are as good as a fit where there are so few images.
    assert (divergences[1] < divergences[0] + (0.1 if start == "clusters" else -0.2)).all()


def test_the_last_fit_says_what_each_number_of_components_would_reach(bench: Bench) -> None:
    minorisation = bench.minorisation(boo_steps=20)
    assert minorisation.fit(bench.replicas, bench.task, epoch=0) is None
    curve = minorisation.fit(bench.replicas, bench.task, epoch=1)
    assert curve is not None
    assert curve.shape == (4, 2)
    assert (curve[0] - curve[-1] > 0.3).all()
    # With all of them it is the divergence of the fit, up to the noise of the codes.
    torch.testing.assert_close(curve[-1], bench.divergence(), rtol=0, atol=0.2)


def test_a_tolerance_keeps_the_components_that_gain_more(bench: Bench) -> None:
    curve = bench.minorisation(boo_steps=20).fit(bench.replicas, bench.task, epoch=1)
    assert curve is not None
    gains = curve[:-1] - curve[1:]
    assert gains[0].min() > 0.25 > gains[1].max()
    bench.minorisation(boo_steps=20, boo_tolerance=0.25).fit(bench.replicas, bench.task, epoch=1)
    log_weights = bench.fitted()[1]
    assert (log_weights > EMPTY / 2).sum(1).tolist() == [2, 2]
    torch.testing.assert_close(log_weights.exp().sum(1), torch.ones(2))
    torch.testing.assert_close(bench.divergence(), curve[1], rtol=0, atol=0.2)


@pytest.mark.parametrize(
    ("objective", "weights"),
    [*(("forward", rule) for rule in RULES), *(("literal", rule) for rule in RULES[:2])],
)
def test_growth_lowers_the_divergence_and_says_to_what(objective: str, weights: str, bench: Bench) -> None:
    minorisation = bench.minorisation(boo_objective=objective, boo_weights=weights, boo_steps=20, boo_first="learned")
    divergences = []
    for slot in range(3):
        said = minorisation.grow(bench.replicas, bench.task, slot)
        weight = bench.fitted()[1].exp()
        torch.testing.assert_close(weight.sum(1), torch.ones(2))
        assert (weight[:, slot + 1 :] == 0).all()
        divergences.append(bench.divergence())
        torch.testing.assert_close(said, divergences[-1], rtol=0, atol=0.4)
    # The literal objective may run away; a fitted weight then keeps its component from doing harm.
    assert (divergences[-1] < divergences[0] + (-0.2 if objective == "forward" else 0.05)).all()


def test_a_refused_component_changes_nothing_and_does_not_end_the_growth(bench: Bench) -> None:
    bench.minorisation(boo_objective="forward", boo_steps=20).grow(bench.replicas, bench.task, 0)
    before = bench.fitted()[1]
    for slot, tolerance in ((1, 1e6), (2, 1e-3)):
        settings = dataclasses.replace(bench.trainer.settings, boo_objective="forward", boo_tolerance=tolerance)
        said = Minorisation(settings, (0.0, 1.0)).grow(bench.replicas, bench.task, slot)
        after = bench.fitted()[1]
        assert said.isnan().tolist() == [slot == 1] * 2
        assert torch.equal(after, before) == (slot == 1)
    assert (after.exp() > 0).tolist() == [[True, False, True, False]] * 2


def test_a_new_component_has_the_weight_its_rule_gives_it(bench: Bench) -> None:
    for rule, truth in (("equal", [0.25] * 4), ("fixed", [0.125, 0.125, 0.25, 0.5])):
        minorisation = bench.minorisation(boo_objective="forward", boo_weights=rule, boo_steps=1)
        for slot in range(4):
            minorisation.grow(bench.replicas, bench.task, slot)
        torch.testing.assert_close(bench.fitted()[1].exp(), torch.tensor([truth, truth]))


def test_the_target_mixes_old_prior_and_new_codes_by_numbers_of_images(digits: Stream) -> None:
    settings = tiny(method="boo", tasks=1, boo_target="full", boo_objective="literal")
    trainer = trained(settings, digits)
    train, valid = digits[1].train.images[:5], digits[1].valid.images
    task = TaskImages(1, "next", train, valid, len(train), tuple(trainer.sizes))
    trainer.method.see(2)
    trainer.method.begin_task(trainer.replicas, task)
    minorisation = Minorisation(settings, (0.0, 1.0))
    _, posterior, z = minorisation.codes(trainer.replicas, task, ("test",))
    target = minorisation._target(trainer.replicas, task, posterior)
    share = trainer.sizes[0] / (trainer.sizes[0] + 5)
    memory = trainer.method.memory()
    for replica in range(2):
        old = DiagonalMixture(*(memory[name][replica, 0] for name in ("log_weights", "mean", "log_variance")))
        new = distributions.Normal(posterior.mean[replica], posterior.log_variance[replica].div(2).exp())
        codes = new.log_prob(z[replica].unsqueeze(1)).sum(-1).exp().mean(1)
        truth = share * old.log_prob(z[replica]).exp() + (1 - share) * codes
        ours = DiagonalMixture(*(part[replica] for part in target)).log_prob(z[replica]).exp()
        torch.testing.assert_close(ours, truth, rtol=1e-3, atol=1e-6)


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["forward", "literal"])
@pytest.mark.parametrize("first", ["mean", "learned"])
def test_greedy_growth_adds_a_component_after_each_epoch_and_says_so(
    objective: str, first: str, digits: Stream
) -> None:
    recorder = Weights()
    settings = tiny(method="boo", boo_objective=objective, boo_first=first, boo_weights="equal", tasks=2, epochs=5)
    trained(settings, digits, recorder)
    assert len(recorder.weights) == 10
    for epoch, weights in enumerate(recorder.weights):
        there = min(2 + epoch % 5, 3)
        truth = torch.tensor([1 / there] * there + [0.0] * (3 - there))
        torch.testing.assert_close(weights, truth.expand(2, 3))
    sizes = [[1], [2], [3]] if first == "learned" else [[2], [3]]
    assert recorder.logged("sizes") == sizes * 2
    assert all(math.isfinite(value) for value in itertools.chain(*itertools.chain(*recorder.logged("divergence"))))


def test_the_mean_image_comes_first(digits: Stream) -> None:
    class Look(Recorder):
        def block(self, trainer: Trainer) -> None:
            if trainer.epoch == 0:
                first = trainer.replicas.buffers["prior.live_inputs"][:, 0]
                mean = digits[trainer.tasks_done].train.images.mean(0)
                torch.testing.assert_close(first, mean.expand(2, -1))
                torch.testing.assert_close(live_weights(trainer), torch.tensor([[1.0, 0, 0]] * 2))
                self.events.append({"looked": True})

    look = Look()
    trained(tiny(method="boo", boo_objective="literal", tasks=2, epochs=1), digits, look)
    assert {"looked": True} in look.events


def test_the_step_back_drops_components_once_after_twice_their_number_of_epochs(digits: Stream) -> None:
    recorder = Weights()
    changes = {"boo_weights": "equal", "boo_prune": 0.4, "epochs": 7, "tasks": 1}
    trained(tiny(method="boo", boo_objective="literal", **changes), digits, recorder)
    there = [(weights > 0).sum(1).tolist() for weights in recorder.weights]
    assert there[:5] == [[2, 2], [3, 3], [3, 3], [3, 3], [3, 3]]
    assert max(there[5]) < 3  # three shares above 0.4 do not fit into one
    assert there[6] == there[5]
    torch.testing.assert_close(recorder.weights[5].sum(1), torch.ones(2))


@every_objective
def test_a_large_tolerance_leaves_one_component_and_none_takes_all(objective: str, digits: Stream) -> None:
    for tolerance, there in ((1e6, 1), (0.0, 3)):
        recorder = Weights()
        settings = tiny(method="boo", boo_objective=objective, boo_tolerance=tolerance, tasks=1, boo_prune=0.0)
        trained(settings, digits, recorder)
        assert (recorder.weights[-1] > 0).sum(1).tolist() == [there, there]
        if objective != "corrective":
            refused = [value is None for value in itertools.chain(*itertools.chain(*recorder.logged("divergence")))]
            assert refused == [there == 1] * 4


def switches() -> Iterator[tuple[str, Any]]:
    """Every value of every setting of boo that is a choice."""
    for name, hint in get_type_hints(Settings).items():
        if name.startswith("boo_"):
            if get_origin(hint) is Literal:
                yield from ((name, value) for value in get_args(hint))
            elif hint is bool:
                yield from ((name, value) for value in (False, True))


#: Everything is on: the paper's text, with all the mixtures whole.
ON: dict[str, Any] = {
    "boo_objective": "literal",
    "boo_weights": "bisection",
    "boo_elbo": "full",
    "boo_target": "full",
    "boo_mixture": "full",
    "boo_lambda": 1.0,
    "boo_lambda_schedule": "tasks",
    "boo_steps": 2,
    "epochs": 3,
    "batch_size": 16,
    "replicas": 1,
}
CHANGES = [{name: value} for name, value in switches() if ON.get(name, getattr(Settings, name)) != value]
CHANGES += [{"boo_floor": 0.05}, {"boo_samples": 4}, {"boo_prune": 0.3}, {"boo_tolerance": 0.3}]


@pytest.fixture(scope="module")
def uneven(digits: Stream) -> Stream:
    """Three tasks with different numbers of images."""
    images = [task.train.images.view(-1, 8, 8)[: 16 - 4 * index] for index, task in enumerate(digits[:3])]
    return Stream.from_tasks(images)


@pytest.fixture(scope="module")
def plain(uneven: Stream) -> Trainer:
    return trained(tiny(method="boo", **ON), uneven)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(map(str, change.values())))
def test_every_switch_trains_and_makes_a_difference(change: dict[str, Any], uneven: Stream, plain: Trainer) -> None:
    recorder = Weights()
    trainer = trained(tiny(method="boo", **{**ON, **change}), uneven, recorder)
    assert finite(trainer)
    for weights in recorder.weights:
        torch.testing.assert_close(weights.sum(1), torch.ones(1))
    torch.testing.assert_close(trainer.method.memory()["log_weights"].exp().sum(-1), torch.ones(1, 3))
    assert not same(trainer, plain)


def test_target_and_mixture_make_a_difference_to_the_forward_objective_too(uneven: Stream) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"boo_target": "current"},
        {"boo_mixture": "current"},
        {"boo_first": "learned"},
    ]
    runs = [trained(tiny(method="boo", **{**ON, "boo_objective": "forward", **one}), uneven) for one in changes]
    assert all(map(finite, runs))
    assert not any(same(one, other) for one, other in itertools.combinations(runs, 2))


def test_resume_is_exact_in_the_middle_of_growth(
    digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"boo_first": "learned", "tasks": 2, "batch_size": 3, "epochs": 3, "replicas": 1, "samples": 5}
    settings = tiny(method="boo", boo_objective="literal", boo_lambda=1.0, **changes)
    train(settings, digits, tmp_path / "whole", metrics=("nll",))
    generator = random.Random(0)
    lives = iter(lambda: generator.randint(2, 3), None)
    assert train_with_kills(settings, digits, tmp_path / "killed", monkeypatch, lives, metrics=("nll",)) >= 4
    whole, killed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()
    one, other = (sorted((tmp_path / name / "checkpoint").glob("*.safetensors"))[-1] for name in ("whole", "killed"))
    assert one.read_bytes() == other.read_bytes()


# --- trouble --------------------------------------------------------------------------------------------------------


def small_stream(*tasks: Tensor) -> Stream:
    return Stream.from_tasks([images.view(-1, 8, 8) for images in tasks])


@every_objective
def test_more_components_than_images_are_noted_and_do_no_harm(objective: str, digits: Stream) -> None:
    stream = small_stream(digits[0].train.images[:4], digits[1].train.images)
    recorder = Recorder()
    trainer = trained(tiny(method="boo", boo_objective=objective, components=5, tasks=2, epochs=3), stream, recorder)
    notes = recorder.of("note")
    own = len(stream[0].train.images)
    assert [(note["task"], note["text"]) for note in notes] == [(0, f"boo: fewer images ({own}) than components (5)")]
    assert finite(trainer)
    torch.testing.assert_close(trainer.method.memory()["log_weights"].exp().sum(-1), torch.ones(2, 2))


@every_objective
def test_a_task_of_identical_images_needs_one_component(objective: str, digits: Stream) -> None:
    stream = small_stream(digits[0].train.images, digits[1].train.images[:1].repeat(12, 1))
    for steps in (3, 0):
        recorder = Weights()
        settings = tiny(method="boo", boo_objective=objective, boo_steps=steps, boo_prune=0.0, tasks=2, epochs=3)
        trainer = trained(settings, stream, recorder)
        assert finite(trainer)
    # Components that stay where they start are all the same.
    assert recorder.logged("kept")[1] == [1, 1]
    assert recorder.logged("twins")[1] == [2, 2]


@every_objective
def test_pruning_everything_keeps_the_largest(objective: str, digits: Stream) -> None:
    recorder = Weights()
    trainer = trained(tiny(method="boo", boo_objective=objective, boo_prune=0.99, epochs=6, tasks=1), digits, recorder)
    assert finite(trainer)
    assert recorder.logged("kept") == [[1, 1]]
    weights = trainer.method.memory()["log_weights"].exp()
    torch.testing.assert_close(weights.sort(-1).values, torch.tensor([0.0, 0.0, 1.0]).expand(2, 1, 3))


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
        minorisation = bench.minorisation(boo_objective=objective, boo_steps=steps)
        if objective == "corrective":
            minorisation.fit(bench.replicas, bench.task, epoch=1)
        else:
            minorisation.grow(bench.replicas, bench.task, slot=0)
            minorisation.grow(bench.replicas, bench.task, slot=1)
        return bench.fitted()

    whole, still = learned(5), learned(0)
    monkeypatch.setattr(boovae.components, "Descent", Diverging)
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
    monkeypatch.setattr(boovae.components, "Descent", Diverging)
    recorder = Weights()
    hurt = trained(settings, digits, recorder)
    assert finite(hurt)
    assert same(hurt, whole, replica=0)
    assert all(math.isfinite(value) for value in itertools.chain(*itertools.chain(*recorder.logged("divergence"))))
    assert not recorder.of("divergence")


def test_growth_goes_on_after_a_component_without_weight(digits: Stream) -> None:
    class Starve(Weights):
        def epoch(self, trainer: Trainer, event: Event) -> None:
            super().epoch(trainer, event)
            if event["epoch"] == 0:
                weights = trainer.replicas.buffers["prior.live_log_weights"]
                weights[1] = torch.tensor([0.0, EMPTY, EMPTY])

    recorder = Starve()
    trained(tiny(method="boo", boo_objective="literal", boo_weights="equal", tasks=1), digits, recorder)
    torch.testing.assert_close(recorder.weights[1][1], torch.tensor([2 / 3, 0, 1 / 3]))
    assert all(math.isfinite(value) for value in itertools.chain(*itertools.chain(*recorder.logged("divergence"))))


def test_growth_goes_on_after_a_network_diverged(digits: Stream) -> None:
    """The replica starts the task again with one component, and gets those that are still to come."""

    class Saboteur(Weights):
        def epoch(self, trainer: Trainer, event: Event) -> None:
            super().epoch(trainer, event)
            if event["epoch"] == 1:
                trainer.replicas.parameters["encoder.head.weight"][1] = math.nan

    saboteur = Saboteur()
    settings = tiny(method="boo", boo_objective="forward", components=5, epochs=6, tasks=1)
    trainer = trained(settings, digits, saboteur)
    assert [event["retry"] for event in saboteur.of("divergence")] == [1]
    # Lost are the two it had, and the one that was learned with broken weights.
    assert (saboteur.weights[-1] > 0).tolist()[1] == [True, False, False, True, True]
    assert finite(trainer)
