"""The trainer's epochs: the weight of the KL term, binarisation, learning rates, best snapshots, divergence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from boovae.data import load_stream
from boovae.errors import InputError
from boovae.metrics.measure import evaluate
from boovae.model.vae import VAE
from boovae.replicas import stacked as replicas_module
from boovae.replicas.randomness import Draw
from boovae.replicas.step import Batch, Loss
from boovae.runs.train import train
from boovae.training.events import Event
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer
from conftest import Recorder, tiny
from small import PIXELS, make_task, make_trainer, random_images


class Breaks(Recorder):
    """Is broken off by its user in the second epoch."""

    def epoch(self, trainer: Trainer, event: Event) -> None:
        super().epoch(trainer, event)
        if event["epoch"] == 1:
            raise KeyboardInterrupt


def test_a_task_that_was_broken_off_is_not_taken_for_the_next_one() -> None:
    first, second = (make_task(random_images(16), random_images(4)) for _ in range(2))
    trainer = make_trainer(epochs=3)
    trainer.learn(first)
    tensors, record = trainer.state()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(KeyboardInterrupt):
        trainer.learn(second, Breaks())
    with pytest.raises(InputError, match="was interrupted: call load_state"):
        trainer.learn(second)
    again, clean = make_trainer(epochs=3), make_trainer(epochs=3)
    again.load_state(saved, record)
    for learner in (again, clean):
        for task in (first, second)[learner.tasks_done :]:
            learner.learn(task)
    assert again.sizes == clean.sizes == [16, 16]
    for name, tensor in clean.replicas.tensors().items():
        torch.testing.assert_close(again.replicas.tensors()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("images", "complaint"),
    [
        (random_images(8)[:, :5], "images of \\(5,\\) pixels, this model has"),
        (random_images(8) * 16, "outside pixel_range \\[0, 1\\] of this model"),
        (random_images(8) - 1, "outside pixel_range"),
    ],
)
def test_images_of_another_kind_are_refused_before_training(images: Tensor, complaint: str) -> None:
    trainer = make_trainer(epochs=1)
    with pytest.raises(InputError, match=complaint):
        trainer.learn(make_task(images, images))
    trainer.learn(make_task(random_images(16), random_images(4)))  # and nothing was spoilt
    assert trainer.tasks_done == 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"penalty": lambda self, model, batch: {"loss": torch.tensor(7.0)}}, "a penalty is called 'loss'"),
        ({"penalty": lambda self, model, batch: {"kl": torch.tensor(7.0)}}, "a penalty is called 'kl'"),
        ({"draws": lambda self, size: {"x": Draw("uniform", (size, PIXELS))}}, "a draw is called 'x'"),
        ({"training_draws": lambda self, size: {"latent": Draw("normal", (size, 2))}}, "a draw is called 'latent'"),
        (
            {"begin_task": lambda self, *task: self.state.update(pull=torch.ones(5))},
            "'pull' of its state has shape \\(5,\\)",
        ),
    ],
)
def test_a_method_that_would_replace_the_loss_or_the_images_is_refused(
    changes: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(2, epochs=1)
    for name, function in changes.items():
        monkeypatch.setattr(type(trainer.method.parts[0]), name, function)
    with pytest.raises(InputError, match=complaint):
        trainer.learn(make_task(random_images(16), random_images(4)))


def test_replicas_want_their_own_axis() -> None:
    trainer, images = make_trainer(2), random_images(8)
    codes = trainer.replicas.map(lambda model, x: model.posterior(x).mean, images.expand(2, -1, -1))
    assert codes.shape[:2] == (2, 8)
    with pytest.raises(InputError, match="for 2 replicas; it must begin with their number"):
        trainer.replicas.map(lambda model, x: model.posterior(x).mean, images)
    with pytest.raises(InputError, match="3 values of ewc_strength for 2 replicas"):
        Trainer(trainer.settings, trainer.spec, candidates={"ewc_strength": [1.0, 2.0, 3.0]})


def test_what_cannot_be_measured_or_drawn_is_refused() -> None:
    task = make_task(random_images(16), random_images(4))
    trainer = make_trainer(epochs=1, samples=4)
    with pytest.raises(InputError, match="1 of them, but 0 are learned"):
        evaluate(trainer, [task], None, [], metrics=("nll",))
    trainer.learn(task)
    trainer.learn(task)
    event = evaluate(trainer, [task, task], None, [], metrics=("nll",))  # the first evaluation of all
    assert event.forgetting is not None
    assert np.isnan(event.forgetting.own[0]).all()
    with pytest.raises(InputError, match="did you mean 'nll'"):
        evaluate(trainer, [task, task], None, [], metrics=("nil",))
    for number in (-1, 2):
        with pytest.raises(InputError, match="has learned tasks 0 to 1"):
            generate(trainer, 3, task=number)
    with pytest.raises(InputError, match="count is 0"):
        generate(trainer, 0)


def test_kl_weight_grows_linearly_to_its_value() -> None:
    trainer, recorder = make_trainer(2, epochs=6, kl_warmup=4, kl_weight=0.5), Recorder()
    trainer.learn(make_task(random_images(16), random_images(4)), recorder)
    for event, wanted in zip(recorder.of("epoch"), [0, 0.125, 0.25, 0.375, 0.5, 0.5], strict=True):
        for split, weight in (("train", wanted), ("valid", 0.5)):  # validation always counts the whole KL
            terms = {name: np.array(values) for name, values in event[split].items()}
            np.testing.assert_allclose((terms["loss"] - terms["reconstruction"]) / terms["kl"], weight, atol=1e-4)


def test_without_warm_up_the_kl_weight_is_there_at_once() -> None:
    trainer, recorder = make_trainer(epochs=1, kl_weight=2.0), Recorder()
    trainer.learn(make_task(random_images(16), random_images(4)), recorder)
    terms = {name: values[0] for name, values in recorder.of("epoch")[0]["train"].items()}
    assert (terms["loss"] - terms["reconstruction"]) / terms["kl"] == pytest.approx(2.0, rel=1e-4)


def test_dynamic_binarisation_is_drawn_again_in_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "STACK_LIMIT", 0)  # a loop shows plain tensors
    targets: list[Tensor] = []
    bound_at = VAE.bound_at

    def spy(model: VAE, x: Tensor, *others: Any) -> Any:
        targets.append(x.clone())
        return bound_at(model, x, *others)

    monkeypatch.setattr(VAE, "bound_at", spy)
    epochs, images = 40, 64
    grey = torch.linspace(0, 1, PIXELS)
    valid = torch.ones(5, PIXELS)
    trainer = make_trainer(epochs=epochs, early_stop=epochs, batch_size=images, binarize="dynamic")
    # All images are the same, so that their order makes no difference.
    trainer.learn(make_task(grey.repeat(images, 1), valid), Recorder())
    train = torch.stack([target for target in targets if len(target) == images])
    assert len(train) == epochs
    assert set(train.unique().tolist()) == {0.0, 1.0}
    assert not any(torch.equal(train[epoch], train[epoch + 1]) for epoch in range(epochs - 1))
    torch.testing.assert_close(train.mean((0, 1)), grey, atol=0.05, rtol=0)
    assert train[..., 0].max() == 0  # black stays black
    assert train[..., -1].min() == 1  # white stays white
    assert all(torch.equal(target, valid) for target in targets if len(target) == 5)


@pytest.mark.parametrize("binarize", ["none", "threshold"])
def test_without_dynamic_binarisation_images_are_taken_as_they_are(binarize: str) -> None:
    trainer = make_trainer(binarize=binarize)
    assert set(trainer.objective.draws(8, training=True)) == {"latent"}


def test_a_finished_task_leaves_the_best_weights_not_the_last() -> None:
    # A rate this high makes the loss jump, so that the best epoch is rarely the last.
    trainer, recorder = make_trainer(3, epochs=15, learning_rate=0.1), Recorder()
    valid = random_images(6, seed=4)
    trainer.learn(make_task(random_images(24), valid), recorder)
    history = np.array([event["valid"]["loss"] for event in recorder.of("epoch")])
    end = recorder.events[-1]
    assert end["event"] == "task_end"
    assert end["best_epoch"] == history.argmin(0).tolist()
    assert end["best_epoch"] != [14, 14, 14]
    np.testing.assert_allclose(end["best_loss"], history.min(0), rtol=1e-6)
    np.testing.assert_allclose(trainer.engine.validate()["loss"].numpy(), history.min(0), rtol=1e-5)


def test_learning_makes_the_loss_fall() -> None:
    trainer, recorder = make_trainer(2, epochs=40), Recorder()
    pattern = (torch.arange(PIXELS) % 2).float().repeat(40, 1)
    trainer.learn(make_task(pattern, pattern[:8]), recorder)
    first, last = recorder.of("epoch")[0]["valid"]["loss"], recorder.of("epoch")[-1]["valid"]["loss"]
    assert all(after < 0.3 * before for before, after in zip(first, last, strict=True))


def test_replicas_of_one_run_equal_runs_of_their_own() -> None:
    task = make_task(random_images(20), random_images(6, seed=1))
    together = make_trainer(3, epochs=3)
    together.learn(task, Recorder())
    for r, seed in enumerate(together.settings.training.seeds):
        alone = make_trainer(seed=seed, epochs=3)
        alone.learn(task, Recorder())
        for name, tensor in alone.replicas.parameters.items():
            torch.testing.assert_close(together.replicas.parameters[name][r], tensor[0], rtol=1e-4, atol=1e-5)


def test_the_learning_rate_falls_as_half_a_cosine() -> None:
    task, recorder = make_task(random_images(24), random_images(6, seed=4)), Recorder()
    make_trainer(epochs=4, schedule="cosine").learn(task, recorder)
    rates = [event["learning_rate"][0] for event in recorder.of("epoch")]
    assert rates == pytest.approx([1e-2, 1e-2 * (0.5 + 0.5**1.5), 5e-3, 1e-2 * (0.5 - 0.5**1.5)], rel=1e-6)


# --- divergence -----------------------------------------------------------------------------------------------------


def diverging(trainer: Trainer, replica: int, epochs: set[int], *, poison: bool = True) -> None:
    """Break the training loss of one replica in some epochs: NaN with its gradient, or infinite without one."""
    objective = trainer.step.objective

    def broken(model: VAE, batch: Batch) -> Loss:
        loss = objective(model, batch)
        if len(batch["x"]) == trainer.settings.training.batch_size and trainer.epoch in epochs:
            chosen = batch["state"]["number"] == replica
            if poison:
                loss = loss._replace(value=loss.value * torch.where(chosen, math.nan, 1.0))
            else:
                loss = loss._replace(value=loss.value + torch.where(chosen, math.inf, 0.0))
        return loss

    trainer.step.objective = broken
    trainer.method.parts[0].state = {"number": torch.arange(len(trainer.replicas))}


def test_a_replica_that_has_stopped_takes_no_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "STACK_LIMIT", 0)  # one after another, as convolutions and large networks run
    task = make_task(random_images(24), random_images(6, seed=4))
    trainer, recorder, taken = make_trainer(3, epochs=40, early_stop=2, seed=0), Recorder(), []
    trainer.step.track = lambda state, step: taken.append(1)
    trainer.learn(task, recorder)
    epochs = recorder.events[-1]["epochs"]
    assert len(set(epochs)) > 1
    assert len(taken) == sum(epochs) * trainer.engine.steps_per_epoch
    for event in recorder.of("epoch"):
        resting = [value is None for value in event["train"]["loss"]]
        assert resting == [event["epoch"] >= count for count in epochs]
        assert resting == [not active for active in event["active"]]
    for seed in range(3):
        alone = make_trainer(1, epochs=40, early_stop=2, seed=seed)
        alone.learn(task, Recorder())
        for name, tensor in alone.replicas.parameters.items():
            assert torch.equal(trainer.replicas.parameters[name][seed], tensor[0])


def test_a_diverged_replica_goes_back_and_the_others_do_not_notice() -> None:
    task = make_task(random_images(24), random_images(6, seed=4))
    healthy, recorder = make_trainer(3, epochs=6), Recorder()
    healthy.learn(task, Recorder())
    trainer = make_trainer(3, epochs=6)
    diverging(trainer, 1, {2, 3})
    trainer.learn(task, recorder)
    told = recorder.of("divergence")
    assert [(event["epoch"], event["replica"], event["retry"]) for event in told] == [(2, 1, 1), (3, 1, 2)]
    assert recorder.of("epoch")[2]["train"]["loss"][1] is None
    assert [event["learning_rate"][1] for event in recorder.of("epoch")] == [1e-2, 1e-2, 1e-2, 5e-3, 2.5e-3, 2.5e-3]
    for name, tensor in trainer.replicas.parameters.items():
        assert tensor.isfinite().all()
        assert torch.equal(tensor[[0, 2]], healthy.replicas.parameters[name][[0, 2]])


def test_a_replica_that_diverges_three_times_is_frozen_at_its_best() -> None:
    trainer, recorder = make_trainer(2, epochs=8), Recorder()
    diverging(trainer, 0, {2, 3, 4})
    trainer.learn(make_task(random_images(24), random_images(6, seed=4)), recorder)
    told = [event["retry"] for event in recorder.of("divergence")]
    assert told == [1, 2, "frozen"]
    assert trainer.frozen.tolist() == [True, False]
    assert [event["active"][0] for event in recorder.of("epoch")] == [True] * 5 + [False] * 3
    best = recorder.events[-1]["best_epoch"][0]
    assert best <= 1
    loss = trainer.engine.validate()["reconstruction"][0].item() + trainer.engine.validate()["kl"][0].item()
    assert loss == pytest.approx(recorder.of("epoch")[best]["valid"]["loss"][0], rel=1e-5)


def test_what_was_learned_before_an_epoch_may_be_the_best_is_not_lost_by_a_divergence() -> None:
    """Even in the last epoch: the replica ends where the epoch before did."""
    task, last = make_task(random_images(24), random_images(6, seed=4)), 5
    trainer, shorter = make_trainer(2, epochs=last + 1), make_trainer(2, epochs=last + 1)
    for each in (trainer, shorter):
        each.method.first_eligible = 100
    diverging(trainer, 0, {last})
    kept: dict[str, Tensor] = {}

    class Before(Recorder):
        def epoch(self, trainer: Trainer, event: Event) -> None:
            if event["epoch"] == last - 1:
                kept.update({name: tensor.clone() for name, tensor in trainer.replicas.parameters.items()})

    shorter.learn(task, Before())
    trainer.learn(task, Recorder())
    for name, tensor in trainer.replicas.parameters.items():
        assert torch.equal(tensor[0], kept[name][0])
        assert torch.equal(tensor[1], shorter.replicas.parameters[name][1])


@pytest.mark.parametrize(("train", "valid", "missing"), [(0, 4, "training"), (8, 0, "validation")])
def test_a_task_without_images_is_refused(train: int, valid: int, missing: str) -> None:
    with pytest.raises(InputError, match=f"task 'only' has no {missing} images"):
        make_trainer().learn(make_task(random_images(train), random_images(valid)), Recorder())


def test_batch_normalisation_is_no_matter_where_no_layer_has_it() -> None:
    trainer = make_trainer(epochs=1, normalisation="batch")
    trainer.learn(make_task(random_images(1), random_images(1)), Recorder())
    assert trainer.tasks_done == 1


def test_an_epoch_in_which_a_replica_diverged_is_not_its_best() -> None:
    trainer, recorder = make_trainer(2, epochs=5), Recorder()
    # The training loss overflows while the validation loss still falls.
    diverging(trainer, 0, {4}, poison=False)
    pattern = (torch.arange(PIXELS) % 2).float().repeat(40, 1)
    trainer.learn(make_task(pattern, pattern[:6]), recorder)
    losses = [event["valid"]["loss"][0] for event in recorder.of("epoch")]
    assert losses == sorted(losses, reverse=True)  # so the last epoch would be the best
    end = recorder.events[-1]
    assert end["best_epoch"][0] == 3
    assert end["best_loss"][0] == pytest.approx(losses[3])


def test_pseudo_inputs_of_a_vamp_prior_are_not_one_and_the_same() -> None:
    trainer, plain = make_trainer(2, prior="vamp", components=4, epochs=2), make_trainer(2)
    for name, tensor in plain.replicas.parameters.items():  # the networks start as with any other prior
        assert torch.equal(trainer.replicas.parameters[name], tensor)
    trainer.learn(make_task(random_images(16), random_images(4)), Recorder())
    inputs = trainer.replicas.map(lambda model: model.prior.pseudo_inputs)
    assert torch.pdist(inputs.flatten(0, 1)).min() > 0.1  # of all components and replicas
    assert 0.1 < inputs.std() < 0.2


def test_a_run_keeps_to_the_tasks_and_the_kind_of_images_it_began_with(tmp_path: Path) -> None:
    settings = tiny(tasks=None, epochs=1)
    stream = load_stream("digits", limit=24)[:3]
    folder = train(settings, stream[:2], tmp_path / "run", device="cpu", metrics=("nll",))
    assert train(settings, stream[:2], folder, device="cpu", metrics=("nll",)) == folder  # it is finished
    with pytest.raises(InputError, match="was started with tasks 0, 1, not 0, 1, 2"):
        train(settings, stream, folder, device="cpu", metrics=("nll",))
    with pytest.raises(InputError, match="binarize is dynamic, but the images of digits are none"):
        train(tiny(tasks=None, binarize="dynamic"), stream, tmp_path / "other", device="cpu")
    assert not (tmp_path / "other").exists()


def test_a_run_is_continued_with_the_settings_that_it_has_however_they_are_named(tmp_path: Path) -> None:
    settings, stream = tiny(method="boo", tasks=1, epochs=1), load_stream("digits", limit=24)
    folder = train(settings, stream, tmp_path / "run", device="cpu", metrics=("nll",))
    named = settings.changed(boo_lambda=0)  # its default, and no float
    assert train(named, stream, folder, device="cpu", metrics=("nll",)) == folder
    with pytest.raises(InputError, match=r"other settings \(boo_lambda the default there, 1\.0 here\)"):
        train(settings.changed(boo_lambda=1), stream, folder, device="cpu", metrics=("nll",))
