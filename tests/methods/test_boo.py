"""Boo inside a run: the growth of a task's components, every switch, what is remembered, and trouble."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

from boovae.config import Settings
from boovae.data import Stream, load_stream
from boovae.methods import resolve
from boovae.metrics.measure import evaluate
from boovae.model.priors.boosted import EMPTY
from boovae.training.events import Event
from boovae.training.trainer import Trainer
from conftest import Recorder, finite, same, tiny, trained

every_objective = pytest.mark.parametrize("objective", ["corrective", "forward", "literal"])


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


# --- growth ---------------------------------------------------------------------------------------------------------


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


# --- every switch ---------------------------------------------------------------------------------------------------


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


# --- what is remembered ---------------------------------------------------------------------------------------------


def test_resume_is_exact_in_the_middle_of_growth(harmless_kills: Callable[..., int]) -> None:
    changes = {"boo_first": "learned", "tasks": 2, "batch_size": 3, "epochs": 3, "replicas": 1, "samples": 5}
    settings = tiny(method="boo", boo_objective="literal", boo_lambda=1.0, **changes)
    generator = random.Random(0)
    lives = iter(lambda: generator.randint(2, 3), None)
    assert harmless_kills(settings, lives) >= 4


def test_what_boo_remembers_is_a_handful_of_images_per_task(digits: Stream) -> None:
    trainer = trained(tiny(method="boo"), digits)
    memory = trainer.method.memory()
    assert memory["pseudo_inputs"].shape == (2, 3, 3, 64)  # replicas, tasks, components, pixels
    assert trainer.method.images_stored() == 0
    torch.testing.assert_close(memory["log_weights"].exp().sum(-1), torch.ones(2, 3))


@pytest.mark.parametrize("masses", ["sizes", "equal"])
def test_the_dilution_is_what_a_task_has_lost_of_the_prior(masses: str) -> None:
    stream = Stream.from_tasks([torch.rand(count, 8, 8) for count in (40, 20, 10)])
    trainer = Trainer(tiny(method="boo", boo_masses=masses, samples=2, epochs=1), stream.spec)
    history: list[Any] = []
    held = []
    for seen, task in enumerate(stream, start=1):
        trainer.learn(task, Recorder())
        history.append(evaluate(trainer, stream[:seen], None, history, metrics=("nll",)))
        held.append(trainer.replicas.buffers["prior.log_masses"][0, :seen])
    lost = [(held[task][task] - held[-1][task]).item() for task in range(3)]
    assert history[-1].forgetting.dilution.tolist() == pytest.approx(lost, abs=1e-5)


@pytest.mark.slow
def test_boo_with_distillation_forgets_a_tenth_of_what_fine_tuning_forgets() -> None:
    stream = load_stream("digits")[:4]

    def forgotten(method: str) -> float:
        settings = resolve({"dataset": "digits", "method": method, "replicas": 2, "samples": 300})
        trainer = Trainer(settings.changed(tasks=4), stream.spec)
        history: list[Any] = []
        for seen, task in enumerate(stream, start=1):
            trainer.learn(task, Recorder())
            history.append(evaluate(trainer, stream[:seen], None, history, metrics=("nll",)))
        change = history[-1].forgetting.own[:-1]
        return sum(map(sum, change)) / (len(change) * 2)

    assert forgotten("boo+distill") < 0.1 * forgotten("standard")


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


def test_a_task_of_identical_images_is_learned(digits: Stream) -> None:
    stream = small_stream(digits[0].train.images, torch.full((12, 64), 0.5))
    trainer = trained(tiny(method="boo+distill", tasks=2), stream)
    assert finite(trainer)


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


def test_growth_continues_after_a_component_without_weight(digits: Stream) -> None:
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


def test_growth_continues_after_a_network_diverged(digits: Stream) -> None:
    """The replica goes back to where the epoch before ended, with the components it had, and gets the others."""

    class Saboteur(Weights):
        def epoch(self, trainer: Trainer, event: Event) -> None:
            super().epoch(trainer, event)
            if event["epoch"] == 1:
                trainer.replicas.parameters["encoder.head.weight"][1] = math.nan

    saboteur = Saboteur()
    settings = tiny(method="boo", boo_objective="forward", components=5, epochs=6, tasks=1)
    trainer = trained(settings, digits, saboteur)
    assert [event["retry"] for event in saboteur.of("divergence")] == [1]
    assert (saboteur.weights[-1] > 0).all()
    assert finite(trainer)


@pytest.mark.parametrize(("epochs", "last"), [(1, 0), (2, 1), (4, 2), (5, 4)])
def test_nothing_is_fitted_after_the_last_epoch(epochs: int, last: int, digits: Stream) -> None:
    """The model is kept as it was before: what is logged as its components must be them."""
    recorder = Recorder()
    trainer = trained(tiny(method="boo", epochs=epochs, boo_until=32, early_stop=50, tasks=1), digits, recorder)
    (curve,) = [event for event in recorder.of("components") if "divergence" in event]
    assert curve["epoch"] == last
    stored = trainer.replicas.buffers["prior.pseudo_inputs"][:, 0]
    assert torch.equal(stored, trainer.replicas.buffers["prior.live_inputs"])
