"""Generative replay: who generates the images, how many there are, how much they count and which prior scores them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from boovae.data import Stream, Task
from boovae.errors import InputError
from boovae.methods import METHODS, make_method
from boovae.methods.method import Method, TaskImages
from boovae.methods.replay import Replay
from boovae.metrics.cost import ledger
from boovae.metrics.likelihood import log_likelihood
from boovae.model.vae import VAE
from boovae.replicas.stacked import Replicas
from boovae.training.events import Event
from boovae.training.trainer import Trainer
from conftest import Recorder, begun, finite, same, step, tiny, trained


def under_way(trainer: Trainer, task: Task) -> Trainer:
    """Let the trainer begin a task; then move the model away from its teacher."""
    begun(trainer, task)
    for tensor in trainer.replicas.parameters.values():
        tensor.mul_(1.1)
    return trainer


def replay(trainer: Trainer) -> Replay:
    return next(part for part in trainer.method.parts if isinstance(part, Replay))


def generated(trainer: Trainer, batch: dict[str, Any]) -> Tensor:
    """Return what replay generates for a batch, (R, n, D)."""
    images: Tensor = trainer.replicas.map(replay(trainer).generated, batch)
    return images


def before(trainer: Trainer, z: Tensor) -> Tensor:
    """Return the mean images (R, n, D) of latents z by the model as it is now."""
    images: Tensor = trainer.replicas.map(VAE.images, z)
    return images


# --- the teacher ----------------------------------------------------------------------------------------------------


def test_the_teacher_is_the_model_before_the_task_and_stays_so(digits: Stream) -> None:
    class Watch(Recorder):
        states: list[dict[str, Tensor]]

        def epoch(self, trainer: Trainer, event: Event) -> None:
            self.states.append({name: tensor.clone() for name, tensor in trainer.engine.state.items()})

    watch = Watch()
    watch.states = []
    trainer = trained(tiny(method="replay", tasks=1), digits)
    start = {name: tensor.clone() for name, tensor in trainer.replicas.parameters.items()}
    trainer.learn(digits[1], watch)
    assert len(watch.states) == 4
    for state in watch.states:
        assert {*state} == {*start, "weight"}
        assert all(torch.equal(state[name], tensor) for name, tensor in start.items())
    assert all(not torch.equal(trainer.replicas.parameters[name], tensor) for name, tensor in start.items())


def test_images_come_from_the_teacher_and_its_prior_alone(digits: Stream) -> None:
    trainer = trained(tiny(method="replay", replay_images=6, tasks=1), digits)
    old = Trainer(trainer.settings, digits.spec)
    old.load_state(*trainer.state())
    under_way(trainer, digits[1])
    batch = step(trainer, digits[1].train.images[:8])
    torch.testing.assert_close(generated(trainer, batch), before(old, batch["replay_normal"]))
    assert not torch.allclose(generated(trainer, batch), before(trainer, batch["replay_normal"]), atol=1e-3)


def test_a_prior_of_pseudo_inputs_is_frozen_with_the_teacher(digits: Stream) -> None:
    trainer = trained(tiny(method="replay", prior="vamp", tasks=1), digits)
    old = Trainer(trainer.settings, digits.spec)
    old.load_state(*trainer.state())
    under_way(trainer, digits[1])
    batch = step(trainer, digits[1].train.images[:8])

    def sampled(model: VAE, uniform: Tensor, normal: Tensor) -> Tensor:
        return model.images(model.prior(model.posterior).sample(uniform, normal))

    expected = old.replicas.map(sampled, batch["replay_uniform"], batch["replay_normal"])
    torch.testing.assert_close(generated(trainer, batch), expected)


@pytest.mark.parametrize("method", ["replay", "boo+replay"])
def test_no_gradient_reaches_the_teacher(method: str, digits: Stream) -> None:
    trainer = under_way(trained(tiny(method=method, replay_images=6, boo_reencode=True, tasks=1), digits), digits[1])
    batch, name = step(trainer, digits[1].train.images[:8]), "replay.replay" if "+" in method else "replay"

    def term(parameters: dict[str, Tensor], state: dict[str, Tensor], buffers: Any, batch: Any) -> Tensor:
        loss = trainer.replicas.call({**parameters, **buffers}, trainer.objective, {**batch, "state": state})
        replayed: Tensor = loss.penalties[name]
        return replayed

    arguments = (trainer.replicas.parameters, batch["state"], trainer.replicas.buffers, batch)
    of_student, of_teacher = vmap(grad(term, argnums=(0, 1)))(*arguments)
    assert all(tensor.abs().max() > 0 for key, tensor in of_student.items() if "weight" in key)
    weight = "replay.weight" if "+" in method else "weight"
    assert of_teacher.pop(weight).abs().min() > 0
    assert all((tensor == 0).all() for tensor in of_teacher.values())


def test_every_step_and_every_replica_has_images_of_its_own(digits: Stream) -> None:
    trainer = under_way(trained(tiny(method="replay", replay_images=6, tasks=1), digits), digits[1])
    block = trainer.generators.draw_all(trainer.objective.draws(8, training=True), 1, 0, 0, steps=3)
    images = torch.stack(
        [
            generated(trainer, {"state": trainer.engine.state, **{name: draw[:, i] for name, draw in block.items()}})
            for i in range(3)
        ]
    )
    flat = images.flatten(0, 2)  # 3 steps, 2 replicas, 6 images
    assert len(torch.unique(flat, dim=0)) == 36
    assert images.min() >= 0
    assert images.max() <= 1


# --- how many, how much ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 24])
def test_the_share_of_generated_images_in_a_step_is_as_set(
    count: int, digits: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    posterior = VAE.posterior

    def counted(model: VAE, x: Tensor) -> Any:
        sizes.append(x.shape[-2])
        return posterior(model, x)

    trainer = under_way(trained(tiny(method="standard+replay", replay_images=count, tasks=1), digits), digits[1])
    monkeypatch.setattr(VAE, "posterior", counted)
    trainer.replicas.map(trainer.objective, step(trainer, digits[1].train.images[:8]))
    assert sizes == [8, count]  # replayed: count / (count + 8)


def test_the_cost_of_a_step_and_the_memory_do_not_grow(digits: Stream) -> None:
    trainer = trained(tiny(method="replay", tasks=2), digits)
    shapes = {name: draw.shape for name, draw in trainer.objective.draws(8, training=True).items()}
    trainer.learn(digits[2], Recorder())
    assert {name: draw.shape for name, draw in trainer.objective.draws(8, training=True).items()} == shapes
    assert ledger(trainer).memory_bytes == ledger(trainer).images_stored == 0


def test_the_term_is_the_weighted_elbo_of_the_generated_images(digits: Stream) -> None:
    """Weight c . (images before / images now), by the tasks' own sizes."""
    tasks = [
        dataclasses.replace(task, train=type(task.train)(task.train.images[:count], task.train.labels[:count]))
        for task, count in zip(digits[:3], (12, 18, 10), strict=True)
    ]
    trainer = Trainer(tiny(method="replay", replay_images=6, replay_weight=0.4, kl_weight=0.7), digits.spec)
    for task in tasks[:2]:
        trainer.learn(task, Recorder())
    under_way(trainer, tasks[2])
    batch = step(trainer, tasks[2].train.images[:8], kl_weight=0.1)  # the batch's own KL weight is still growing
    torch.testing.assert_close(batch["state"]["weight"], torch.full((2,), 0.4 * (12 + 18) / 10))

    def mean(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        bound = model.bound(x, noise)
        return (bound.reconstruction + 0.7 * bound.kl).mean()

    expected = 0.4 * 30 / 10 * trainer.replicas.map(mean, generated(trainer, batch), batch["replay_noise"])
    terms = trainer.replicas.map(trainer.objective, batch).terms
    torch.testing.assert_close(terms["replay"], expected)
    torch.testing.assert_close(terms["loss"], terms["reconstruction"] + 0.1 * terms["kl"] + terms["replay"])


# --- with other priors and data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reencode", [False, True])
def test_with_boo_old_components_generate_and_score(reencode: bool, digits: Stream) -> None:
    settings = tiny(method="boo+replay", replay_images=6, boo_reencode=reencode, tasks=1)
    trainer = trained(settings, digits)
    old = Trainer(settings, digits.spec)
    old.load_state(*trainer.state())
    under_way(trainer, digits[1])
    batch = step(trainer, digits[1].train.images[:8])
    uniform, normal, noise = (batch[f"replay.replay_{name}"] for name in ("uniform", "normal", "noise"))

    def sampled(model: VAE, uniform: Tensor, normal: Tensor) -> Tensor:
        return model.images(model.prior(model.posterior, task=0).sample(uniform, normal))

    def mean(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        posterior = model.posterior(x)
        z = posterior.rsample(noise)
        kl: Tensor = posterior.log_prob(z) - model.prior(model.posterior, task=0).log_prob(z)
        return (kl - model.likelihood.log_prob(model.decode(z), x)).mean()

    images = old.replicas.map(sampled, uniform, normal)
    expected = trainer.replicas.map(mean, images, noise) * len(digits[0].train.images) / len(digits[1].train.images)
    torch.testing.assert_close(trainer.replicas.map(trainer.objective, batch).terms["replay.replay"], expected)


@pytest.mark.parametrize("binarize", ["dynamic", "threshold"])
def test_where_images_are_binary_replayed_ones_are_drawn_from_their_means(binarize: str, digits: Stream) -> None:
    settings = tiny(method="replay", replay_images=6, binarize=binarize, tasks=1)
    trainer = Trainer(settings, replace(digits.spec, binarize=binarize))
    trainer.learn(digits[0], Recorder())
    old = Trainer(settings, digits.spec)
    old.load_state(*trainer.state())
    under_way(trainer, digits[1])
    for training in (True, False):
        batch = step(trainer, digits[1].train.images[:8], training=training)
        expected = batch["replay_pixels"] < before(old, batch["replay_normal"])
        assert (generated(trainer, batch) == expected).float().mean() > 0.999  # but for rounding at the threshold


def test_images_binarised_behind_the_settings_back_are_refused(digits: Stream) -> None:
    trainer = Trainer(tiny(method="replay"), replace(digits.spec, binarize="dynamic"))
    trainer.learn(digits[0], Recorder())
    with pytest.raises(InputError, match="binarize"):
        trainer.learn(digits[1], Recorder())


def test_each_replica_may_have_images_of_its_own_beside_replay(digits: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnImages(Method):
        """Gives each replica its own images."""

        name = "own-images"

        def images(self, replicas: Replicas, task: TaskImages) -> TaskImages:
            return dataclasses.replace(task, train=torch.stack([task.train, 1 - task.train]))

    monkeypatch.setitem(METHODS, "own-images", OwnImages)
    trainer = trained(tiny(method="own-images+replay", binarize="threshold", tasks=2), digits)
    assert finite(trainer)


# --- the whole ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["replay", "standard+replay"])
def test_the_first_task_is_that_of_standard(method: str, digits: Stream) -> None:
    assert same(trained(tiny(method=method, tasks=1), digits), trained(tiny(tasks=1), digits))


@pytest.mark.parametrize("other", ["joint", "multihead"])
def test_what_it_cannot_be_combined_with_is_refused(other: str) -> None:
    with pytest.raises(InputError, match=other):
        make_method(tiny(method=f"replay+{other}"))


@pytest.mark.parametrize("base", ["standard", "boo"])
def test_replay_keeps_the_old_task(base: str, digits: Stream) -> None:
    def old_task(method: str) -> Tensor:
        trainer = trained(tiny(method=method, epochs=25, learning_rate=1e-2, tasks=2, replay_images=16), digits)
        return -log_likelihood(trainer.replicas, digits[0].test.images, 100).log_prob.mean(1)

    assert (old_task(f"{base}+replay") < old_task(base) - 5).all()


def test_with_boo_a_killed_run_ends_with_the_same_bytes(harmless_kills: Callable[..., int]) -> None:
    settings = tiny(method="boo+replay", replay_images=6, batch_size=2, tasks=2)
    assert harmless_kills(settings, itertools.cycle([2, 3])) >= 2
