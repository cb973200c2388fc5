"""Gradient steps and validation of all replicas at once, against a plain loop over modules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from boovae.model.vae import VAE
from boovae.replicas import engine as engine_module
from boovae.replicas import stacked as replicas_module
from boovae.replicas.engine import BLOCK, Engine, validation_chunk
from boovae.replicas.randomness import seed_for
from boovae.replicas.stacked import replica_of
from boovae.replicas.step import Batch, Loss
from boovae.training.trainer import Trainer
from conftest import Recorder
from small import LATENT, make_task, make_trainer, random_images


def random_steps(replicas: int, images: int, steps: int, batch: int) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    order = torch.randint(images, (replicas, steps, batch), generator=generator)
    return order, {"latent": torch.randn(replicas, steps, batch, LATENT, generator=generator)}


def no_noise(replicas: int, images: int) -> dict[str, Tensor]:
    chunk = validation_chunk(images)
    return {"latent": torch.zeros(replicas, -(-images // chunk), chunk, LATENT)}


def plain_module(trainer: Trainer, seed: int) -> VAE:
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(seed, "weights"))
        return trainer.build()


def plain_training(
    model: VAE, rate: float, kl_weight: float, images: Tensor, order: Tensor, noise: Tensor
) -> list[float]:
    """The textbook loop."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    losses = []
    for chosen, latent in zip(order, noise, strict=True):
        bound = model.bound(images[chosen], latent)
        loss = (bound.reconstruction + kl_weight * bound.kl).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


# --- gradient steps -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64", "way")
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("prior", ["normal", "vamp"])
def test_steps_equal_a_plain_loop_over_modules(replicas: int, prior: str) -> None:
    trainer = make_trainer(replicas, prior=prior, components=4)
    steps, kl_weight = 5, 0.7
    images = random_images(40)
    order, noise = random_steps(replicas, 40, steps, 8)
    engine = Engine(trainer.step, images, images[:5], 8, {}, no_noise(replicas, 5))
    rates = [1e-2, 3e-3, 1e-4][:replicas]
    engine.rate.copy_(torch.tensor(rates))
    engine.kl_weight.fill_(kl_weight)
    engine.run_block(order, noise)
    for r, seed in enumerate(trainer.settings.training.seeds):
        model = plain_module(trainer, seed)
        start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        losses = plain_training(model, rates[r], kl_weight, images, order[r], noise["latent"][r])
        assert engine.totals["loss"][r].item() == pytest.approx(sum(losses), rel=1e-9)
        for name, parameter in model.named_parameters():
            moved = (parameter.detach() - start[name]).norm()
            assert moved > 0
            ours = replica_of(trainer.replicas.parameters, r)[name]
            assert (ours - parameter.detach()).norm() < 1e-6 * moved


@pytest.mark.usefixtures("way")
def test_steps_equal_a_plain_loop_in_single_precision() -> None:
    trainer = make_trainer(3)
    images = random_images(40)
    order, noise = random_steps(3, 40, 5, 8)
    engine = Engine(trainer.step, images, images[:5], 8, {}, no_noise(3, 5))
    engine.rate.fill_(1e-3)
    engine.run_block(order, noise)
    for r, seed in enumerate(trainer.settings.training.seeds):
        model = plain_module(trainer, seed)
        plain_training(model, 1e-3, 1.0, images, order[r], noise["latent"][r])
        for name, parameter in model.named_parameters():
            ours = replica_of(trainer.replicas.parameters, r)[name]
            torch.testing.assert_close(ours, parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("float64", "way")
def test_every_replica_may_have_its_own_images() -> None:
    trainer = make_trainer(3)
    images = random_images(3, 40)
    order, noise = random_steps(3, 40, 4, 8)
    valid = random_images(3, 5, seed=1)
    engine = Engine(trainer.step, images, valid, 8, {}, no_noise(3, 5))
    engine.rate.fill_(1e-2)
    engine.run_block(order, noise)
    terms = engine.validate()
    for r, seed in enumerate(trainer.settings.training.seeds):
        model = plain_module(trainer, seed)
        plain_training(model, 1e-2, 1.0, images[r], order[r], noise["latent"][r])
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                replica_of(trainer.replicas.parameters, r)[name], parameter.detach(), rtol=1e-7, atol=1e-9
            )
        bound = model.bound(valid[r], torch.zeros(5, LATENT))
        assert terms["kl"][r].item() == pytest.approx(bound.kl.mean().item(), rel=1e-7)


@pytest.mark.usefixtures("float64")
def test_two_blocks_equal_one_after_the_other() -> None:
    steps = BLOCK + 3
    images = random_images(40)
    order, noise = random_steps(1, 40, steps, 8)
    trainer = make_trainer()
    engine = Engine(trainer.step, images, images[:5], 8, {}, no_noise(1, 5))
    engine.rate.fill_(1e-2)
    for part in (slice(0, BLOCK), slice(BLOCK, steps)):
        engine.run_block(order[:, part], {"latent": noise["latent"][:, part]})
    model = plain_module(trainer, 3)
    losses = plain_training(model, 1e-2, 1.0, images, order[0], noise["latent"][0])
    assert engine.totals["loss"].item() == pytest.approx(sum(losses), rel=1e-8)
    assert engine.moments.steps.tolist() == [steps]


def test_forgetting_the_moments_of_one_replica_leaves_the_others() -> None:
    trainer = make_trainer(3)
    images = random_images(40)
    engine = Engine(trainer.step, images, images[:5], 8, {}, no_noise(3, 5))
    engine.rate.fill_(1e-2)
    engine.run_block(*random_steps(3, 40, 2, 8))
    before = {name: tensor.clone() for name, tensor in engine.moments.second.items()}
    engine.moments.forget(1)
    assert engine.moments.steps.tolist() == [2, 0, 2]
    for name, tensor in engine.moments.second.items():
        assert not tensor[1].any()
        assert torch.equal(tensor[[0, 2]], before[name][[0, 2]])


def test_a_batch_is_never_larger_than_the_task() -> None:
    trainer, recorder = make_trainer(epochs=1, batch_size=100), Recorder()
    trainer.learn(make_task(random_images(10), random_images(4)), recorder)
    assert trainer.engine.moments.steps.tolist() == [1]
    assert trainer.engine.batch_size == 10


def test_every_image_is_seen_at_most_once_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "STACK_LIMIT", 0)  # a loop shows plain tensors
    seen: list[list[float]] = []
    trainer = make_trainer(epochs=2, batch_size=8)
    objective = trainer.step.objective

    def spy(model: VAE, batch: Batch) -> Loss:
        if len(batch["x"]) == 8:
            seen.append(batch["x"][:, 0].tolist())
        return objective(model, batch)

    trainer.step.objective = spy
    trainer.learn(make_task(random_images(20), random_images(3)), Recorder())
    assert len(seen) == 4
    for epoch in (seen[:2], seen[2:]):
        assert len({pixel for batch in epoch for pixel in batch}) == 16
    assert seen[:2] != seen[2:]


# --- validation -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64", "way")
@pytest.mark.parametrize(("images", "chunk"), [(20, 1000), (20, 20), (20, 10), (20, 7), (20, 19), (1, 7)])
def test_validation_is_the_plain_mean_over_the_images(images: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "VALIDATION_CHUNK", chunk)
    trainer = make_trainer(3)
    size = validation_chunk(images)
    chunks = math.ceil(images / size)
    noise = torch.randn(3, chunks, size, LATENT, generator=torch.Generator().manual_seed(2))
    valid = random_images(images)
    engine = Engine(trainer.step, random_images(30, seed=5), valid, 8, {}, {"latent": noise})
    engine.kl_weight.fill_(0.5)
    terms = engine.validate()
    for r, seed in enumerate(trainer.settings.training.seeds):
        model = plain_module(trainer, seed)
        bound = model.bound(valid, noise[r].flatten(0, 1)[:images])
        assert terms["reconstruction"][r].item() == pytest.approx(bound.reconstruction.mean().item(), rel=1e-9)
        assert terms["kl"][r].item() == pytest.approx(bound.kl.mean().item(), rel=1e-9)
        expected = (bound.reconstruction + 0.5 * bound.kl).mean().item()
        assert terms["loss"][r].item() == pytest.approx(expected, rel=1e-9)


def test_validation_changes_neither_weights_nor_moments() -> None:
    trainer = make_trainer(2)
    images = random_images(20)
    engine = Engine(trainer.step, images, images, 8, {}, no_noise(2, 20))
    before = {name: tensor.clone() for name, tensor in trainer.replicas.parameters.items()}
    one = engine.validate()
    two = engine.validate()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.replicas.parameters.items())
    assert not any(tensor.any() for tensor in engine.moments.first.values())
