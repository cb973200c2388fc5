from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from boovae.config import Settings
from boovae.data import Split, Task
from boovae.training import engine as engine_module
from boovae.training import replicas as replicas_module
from boovae.training.engine import BLOCK, Batch, validation_chunk
from boovae.training.randomness import seed_for
from boovae.training.replicas import replica_of
from boovae.training.trainer import Trainer
from boovae.vae import VAE
from conftest import Recorder

PIXELS, LATENT = 12, 3
SETTINGS: dict[str, Any] = {
    "method": "standard",
    "net": "mlp:16",
    "latent_dim": LATENT,
    "batch_size": 8,
    "learning_rate": 1e-2,
    "schedule": "plateau",
}


def make_trainer(replicas: int = 1, binarize: str = "none", **changes: Any) -> Trainer:
    settings = Settings(replicas=replicas, seed=3, **{**SETTINGS, **changes})
    return Trainer(settings, (PIXELS,), binarize=binarize)


def random_images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, PIXELS, generator=torch.Generator().manual_seed(seed))


def make_task(train: Tensor, valid: Tensor) -> Task:
    def split(images: Tensor) -> Split:
        return Split(images, torch.zeros(len(images), dtype=torch.int64))

    return Task("only", split(train), split(valid), split(valid), (0,))


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
    engine, steps, kl_weight = trainer.engine, 5, 0.7
    images = random_images(40)
    order, noise = random_steps(replicas, 40, steps, 8)
    engine.load(images, images[:5], 8, {}, no_noise(replicas, 5))
    rates = [1e-2, 3e-3, 1e-4][:replicas]
    engine.rate.copy_(torch.tensor(rates))
    engine.kl_weight.fill_(kl_weight)
    engine.run_block(order, noise)
    for r, seed in enumerate(trainer.settings.seeds):
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
    trainer.engine.load(images, images[:5], 8, {}, no_noise(3, 5))
    trainer.engine.rate.fill_(1e-3)
    trainer.engine.run_block(order, noise)
    for r, seed in enumerate(trainer.settings.seeds):
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
    trainer.engine.load(images, valid, 8, {}, no_noise(3, 5))
    trainer.engine.rate.fill_(1e-2)
    trainer.engine.run_block(order, noise)
    terms = trainer.engine.validate()
    for r, seed in enumerate(trainer.settings.seeds):
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
    trainer.engine.load(images, images[:5], 8, {}, no_noise(1, 5))
    trainer.engine.rate.fill_(1e-2)
    for part in (slice(0, BLOCK), slice(BLOCK, steps)):
        trainer.engine.run_block(order[:, part], {"latent": noise["latent"][:, part]})
    model = plain_module(trainer, 3)
    losses = plain_training(model, 1e-2, 1.0, images, order[0], noise["latent"][0])
    assert trainer.engine.totals["loss"].item() == pytest.approx(sum(losses), rel=1e-8)
    assert trainer.engine.steps.tolist() == [steps]


def test_forgetting_the_moments_of_one_replica_leaves_the_others() -> None:
    trainer = make_trainer(3)
    images = random_images(40)
    trainer.engine.load(images, images[:5], 8, {}, no_noise(3, 5))
    trainer.engine.rate.fill_(1e-2)
    trainer.engine.run_block(*random_steps(3, 40, 2, 8))
    before = {name: tensor.clone() for name, tensor in trainer.engine.second.items()}
    trainer.engine.reset_optimiser(1)
    assert trainer.engine.steps.tolist() == [2, 0, 2]
    for name, tensor in trainer.engine.second.items():
        assert not tensor[1].any()
        assert torch.equal(tensor[[0, 2]], before[name][[0, 2]])
    trainer.engine.reset_optimiser()
    assert not any(tensor.any() for tensor in (*trainer.engine.first.values(), trainer.engine.steps))


def test_a_batch_is_never_larger_than_the_task() -> None:
    trainer, recorder = make_trainer(epochs=1, batch_size=100), Recorder()
    trainer.learn(make_task(random_images(10), random_images(4)), recorder)
    assert trainer.engine.steps.tolist() == [1]
    assert trainer.engine.batch_size == 10


def test_every_image_is_seen_at_most_once_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "STACK_LIMIT", 0)  # a loop shows plain tensors
    seen: list[list[float]] = []
    trainer = make_trainer(epochs=2, batch_size=8)
    objective = trainer.engine.objective

    def spy(model: VAE, batch: Batch) -> dict[str, Tensor]:
        if len(batch["x"]) == 8:
            seen.append(batch["x"][:, 0].tolist())
        return objective(model, batch)

    trainer.engine.objective = spy
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
    trainer.engine.load(random_images(30, seed=5), valid, 8, {}, {"latent": noise})
    trainer.engine.kl_weight.fill_(0.5)
    terms = trainer.engine.validate()
    for r, seed in enumerate(trainer.settings.seeds):
        model = plain_module(trainer, seed)
        bound = model.bound(valid, noise[r].flatten(0, 1)[:images])
        assert terms["reconstruction"][r].item() == pytest.approx(bound.reconstruction.mean().item(), rel=1e-9)
        assert terms["kl"][r].item() == pytest.approx(bound.kl.mean().item(), rel=1e-9)
        expected = (bound.reconstruction + 0.5 * bound.kl).mean().item()
        assert terms["loss"][r].item() == pytest.approx(expected, rel=1e-9)


def test_validation_changes_neither_weights_nor_moments() -> None:
    trainer = make_trainer(2)
    images = random_images(20)
    trainer.engine.load(images, images, 8, {}, no_noise(2, 20))
    before = {name: tensor.clone() for name, tensor in trainer.replicas.parameters.items()}
    one = trainer.engine.validate()
    two = trainer.engine.validate()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.replicas.parameters.items())
    assert not any(tensor.any() for tensor in trainer.engine.first.values())


# --- the trainer's epochs -------------------------------------------------------------------------------------------


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


def test_dynamic_binarisation_is_drawn_anew_in_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "STACK_LIMIT", 0)  # a loop shows plain tensors
    targets: list[Tensor] = []
    bound = VAE.bound

    def spy(model: VAE, x: Tensor, noise: Tensor, target: Tensor | None = None) -> Any:
        targets.append(x.clone() if target is None else target.clone())
        return bound(model, x, noise, target)

    monkeypatch.setattr(VAE, "bound", spy)
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
    assert set(trainer.draws(8, training=True)) == {"latent"}


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
    for r, seed in enumerate(together.settings.seeds):
        alone = Trainer(Settings(seed=seed, epochs=3, **SETTINGS), (PIXELS,))
        alone.learn(task, Recorder())
        for name, tensor in alone.replicas.parameters.items():
            torch.testing.assert_close(together.replicas.parameters[name][r], tensor[0], rtol=1e-4, atol=1e-5)


# --- divergence -----------------------------------------------------------------------------------------------------


def diverging(trainer: Trainer, replica: int, epochs: set[int], *, poison: bool = True) -> None:
    """Break the training loss of one replica in some epochs: NaN with its gradient, or infinite without one."""
    objective = trainer.engine.objective

    def broken(model: VAE, batch: Batch) -> dict[str, Tensor]:
        terms = objective(model, batch)
        if len(batch["x"]) == trainer.settings.batch_size and trainer.epoch in epochs:
            chosen = batch["state"]["number"] == replica
            if poison:
                terms["loss"] = terms["loss"] * torch.where(chosen, math.nan, 1.0)
            else:
                terms["loss"] = terms["loss"] + torch.where(chosen, math.inf, 0.0)
        return terms

    trainer.engine.objective = broken
    trainer.method.state = lambda: {"number": torch.arange(len(trainer.replicas))}  # type: ignore[method-assign]


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


def test_the_learning_rate_falls_as_half_a_cosine() -> None:
    task, recorder = make_task(random_images(24), random_images(6, seed=4)), Recorder()
    make_trainer(epochs=4, schedule="cosine").learn(task, recorder)
    rates = [event["learning_rate"][0] for event in recorder.of("epoch")]
    assert rates == pytest.approx([1e-2, 1e-2 * (0.5 + 0.5**1.5), 5e-3, 1e-2 * (0.5 - 0.5**1.5)], rel=1e-6)
