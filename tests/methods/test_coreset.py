"""Coreset: which images are kept, that they stay the same, and how much they count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from boovae.data import Stream
from boovae.errors import InputError
from boovae.methods import make_method
from boovae.methods.coreset import Coreset, farthest_points
from boovae.metrics.cost import ledger
from boovae.metrics.likelihood import log_likelihood
from boovae.model.vae import VAE
from boovae.training.trainer import Trainer
from conftest import Recorder, begun, finite, same, step, tiny, trained

every_choice = pytest.mark.parametrize("choice", ["random", "kcenter"])


def coreset(trainer: Trainer) -> Coreset:
    return next(part for part in trainer.method.parts if isinstance(part, Coreset))


def places(images: Tensor, among: Tensor) -> list[int]:
    """Return where each image (m, D) stands among others (N, D), bit for bit."""
    equal = (images.unsqueeze(1) == among).all(2)
    assert equal.any(1).all(), "an image that is not there"
    return equal.int().argmax(1).tolist()


# --- what is kept ---------------------------------------------------------------------------------------------------


@every_choice
@pytest.mark.parametrize("mode", ["append", "batch"])
def test_kept_images_are_training_images_stored_once_and_never_looked_up_again(
    choice: str, mode: str, digits: Stream
) -> None:
    settings = tiny(method="coreset", coreset_images=5, coreset_choice=choice, coreset_mode=mode)
    trainer, poor = (Trainer(settings, digits.spec) for _ in range(2))
    seen: list[Tensor] = []
    for index, task in enumerate(digits[:3]):
        train = task.train.images.clone()
        own = Stream.from_tasks([train], test=[task.test.images], valid=[task.valid.images], shape=digits.shape)[0]
        trainer.learn(task, Recorder())
        poor.learn(own, Recorder())
        for split in (own.train, own.valid, own.test):
            split.images.fill_(math.nan)  # whoever comes back for more gets this
        images = poor.method.memory()["images"]
        assert images.shape == (2, index + 1, 5, train.shape[1])
        chosen = [places(images[replica, index], train) for replica in range(2)]
        assert all(len(set(one)) == 5 for one in chosen)
        assert set(chosen[0]) != set(chosen[1])
        seen.append(images[:, index].clone())
        assert all(torch.equal(images[:, task], kept) for task, kept in enumerate(seen))
    assert same(trainer, poor)


def test_appended_images_are_the_kept_ones_and_validation_is_the_tasks_own(digits: Stream) -> None:
    settings = tiny(method="coreset", coreset_images=4)
    trainer = begun(trained(tiny(method="coreset", coreset_images=4, tasks=2), digits), digits[2])
    own = digits[2].train.images
    images = trainer.engine.train
    assert images.shape == (2, 8 + len(own), own.shape[1])
    assert torch.equal(images[:, :8], trainer.method.memory()["images"].flatten(1, 2))
    assert torch.equal(images[:, 8:], own.expand(2, -1, -1))
    # Each is in an epoch once, so the share of kept images is M / (N + M).
    assert trainer.engine.steps_per_epoch == (8 + len(own)) // settings.training.batch_size
    valid = torch.cat([part[0] for part in trainer.engine._valid_parts], dim=1)
    assert torch.equal(valid, digits[2].valid.images.expand(2, -1, -1))
    assert trainer.engine.state == {}


def test_a_task_with_fewer_images_keeps_all_of_them_and_says_so(digits: Stream) -> None:
    few = [digits[0].train.images[:6], digits[1].train.images[:20], digits[2].train.images[:4]]
    tests = [task.test.images for task in digits[:3]]
    stream = Stream.from_tasks(few, test=tests, valid=tests, shape=digits.shape)
    for mode in ("append", "batch"):
        settings = tiny(method="coreset", coreset_images=9, coreset_mode=mode, batch_size=4)
        recorder = Recorder()
        trainer = trained(settings, stream, recorder)
        memory = trainer.method.memory()
        assert memory["images"].shape == (2, 3, 9, few[0].shape[1])
        assert memory["images"].isfinite().all()
        assert memory["counts"].tolist() == [6, 9, 4]
        assert trainer.method.images_stored() == 19
        kept = coreset(trainer).stored_images()
        assert kept is not None
        assert kept.shape[1] == 19
        assert sorted(places(kept[1, :6], few[0])) == list(range(6))
        assert sorted(places(kept[0, -4:], few[2])) == list(range(4))
        notes = recorder.of("note")
        assert [event["task"] for event in notes] == [0, 2]
        assert "coreset: the task has only 6 images" in notes[0]["text"]
        assert finite(trainer)


def test_the_ledger_counts_images_and_bytes(digits: Stream) -> None:
    cost = ledger(trained(tiny(method="coreset", coreset_images=5, tasks=3), digits))
    assert cost.images_stored == 15
    assert cost.memory == {"counts": 3 * 8, "images": 15 * math.prod(digits.shape) * 4}
    combined = ledger(trained(tiny(method="standard+coreset", coreset_images=5, tasks=2), digits))
    assert combined.images_stored == 10
    assert set(combined.memory) == {"coreset.counts", "coreset.images"}


# --- far from each other --------------------------------------------------------------------------------------------


def brute_force(images: Tensor, start: int, count: int) -> list[int]:
    chosen = [start]
    while len(chosen) < count:
        left = [index for index in range(len(images)) if index not in chosen]
        chosen.append(max(left, key=lambda i: min(float((images[i] - images[c]).norm()) for c in chosen)))
    return chosen


def radius(images: Tensor, chosen: Tensor) -> float:
    """Return how far the farthest image (N, D) is from the nearest chosen one."""
    return float(torch.cdist(images, images[chosen]).min(1).values.max())


def test_kcenter_is_the_greedy_choice_of_farthest_points(digits: Stream) -> None:
    images = torch.stack([digits[0].train.images[:19], digits[3].train.images[:19]])
    start = torch.tensor([4, 17])
    chosen = farthest_points(images, start, 7)
    for replica in range(2):
        assert chosen[replica].tolist() == brute_force(images[replica], int(start[replica]), 7)


def test_kcenter_covers_the_images_at_least_as_well_as_random_ones(digits: Stream) -> None:
    generator = torch.Generator().manual_seed(0)
    for task in digits[:4]:
        images = task.train.images
        start = torch.randint(len(images), (1,), generator=generator)
        ours = radius(images, farthest_points(images.unsqueeze(0), start, 5)[0])
        random = [radius(images, torch.randperm(len(images), generator=generator)[:5]) for _ in range(50)]
        assert ours <= sum(random) / len(random)
        assert ours <= 2 * min(random)  # what Gonzalez proved against any choice


def test_kcenter_chooses_no_image_twice_even_among_equal_ones() -> None:
    chosen = farthest_points(torch.ones(3, 6, 2), torch.tensor([0, 2, 5]), 6)
    assert chosen.sort(1).values.tolist() == [list(range(6))] * 3


def test_kcenter_keeps_what_the_run_says(digits: Stream) -> None:
    settings = tiny(method="coreset", coreset_images=5, coreset_choice="kcenter", tasks=2)
    images = trained(settings, digits).method.memory()["images"]
    for index in range(2):  # the second task's training set has kept images in front
        train = digits[index].train.images
        for replica in range(2):
            chosen = places(images[replica, index], train)
            assert chosen == brute_force(train, chosen[0], 5)


# --- how much they count --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "coreset."])
def test_in_every_batch_each_image_counts_the_same(prefix: str, digits: Stream) -> None:
    """loss . B / (B + M) is the mean over the B images of the batch and the M kept ones."""
    settings = tiny(method="standard+coreset" if prefix else "coreset", coreset_images=3, coreset_mode="batch", tasks=2)
    trainer = begun(trained(settings, digits), digits[2])
    kept, x = trainer.method.memory()[f"{prefix}images"].flatten(1, 2), digits[2].train.images[:8]
    batch = step(trainer, x, kl_weight=0.7)
    assert batch[f"{prefix}kept_noise"].shape == (2, 6, 4)

    def per_image(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        bound = model.bound(x, noise)
        return bound.reconstruction + 0.7 * bound.kl

    everything = torch.cat([batch["x"], kept], dim=1)
    noise = torch.cat([batch["latent"], batch[f"{prefix}kept_noise"]], dim=1)
    expected = trainer.replicas.map(per_image, everything, noise).mean(1)
    terms = trainer.replicas.map(trainer.objective, batch).terms
    torch.testing.assert_close(terms["loss"] * 8 / (8 + 6), expected)
    torch.testing.assert_close(terms[f"{prefix}kept"], terms["loss"] - terms["reconstruction"] - 0.7 * terms["kl"])


def test_more_kept_images_than_the_batch_has_take_turns(digits: Stream) -> None:
    """B of the M kept images are in a step, each once, and stand for all M."""
    settings = tiny(method="coreset", coreset_images=9, coreset_mode="batch", batch_size=5, tasks=2)
    trainer = begun(trained(settings, digits), digits[2])
    batch = step(trainer, digits[2].train.images[:5])
    assert batch["kept_order"].shape == (2, 18)
    assert batch["kept_noise"].shape == (2, 5, 4)
    kept = trainer.method.memory()["images"].flatten(1, 2)
    chosen = torch.stack([batch["kept_order"][r].sort().indices[:5] for r in range(2)])
    assert not torch.equal(chosen[0], chosen[1])

    def mean(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        bound = model.bound(x, noise)
        return (bound.reconstruction + bound.kl).mean()

    subset = kept.take_along_dim(chosen.unsqueeze(2), dim=1)
    expected = 18 / 5 * trainer.replicas.map(mean, subset, batch["kept_noise"])
    torch.testing.assert_close(trainer.replicas.map(trainer.objective, batch).terms["kept"], expected)
    draws = trainer.objective.draws(5, training=True)
    orders = trainer.generators.draw_all(draws, 2, 0, 0, steps=16)["kept_order"].argsort(2)[..., :5]
    assert (orders.sort(2).values.diff(dim=2) > 0).all()
    assert set(orders[0].flatten().tolist()) == set(range(18))  # sooner or later all of them


def test_kept_images_in_the_batch_are_binarised_like_it(digits: Stream) -> None:
    settings = tiny(method="coreset", coreset_images=3, coreset_mode="batch", binarize="dynamic", tasks=1)
    trainer = Trainer(settings, replace(digits.spec, binarize="dynamic"))
    trainer.learn(digits[0], Recorder())
    begun(trainer, digits[1])
    kept = trainer.method.memory()["images"].flatten(1, 2)
    assert ((kept > 0) & (kept < 1)).any()  # grey in the memory
    batch = step(trainer, digits[1].train.images[:8])
    binary = (batch["pixels"][:, :3] < kept).float()

    def total(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        bound = model.bound(x, noise)
        return (bound.reconstruction + bound.kl).sum()

    expected = trainer.replicas.map(total, binary, batch["kept_noise"]) / 8
    torch.testing.assert_close(trainer.replicas.map(trainer.objective, batch).terms["kept"], expected)


def test_kept_images_in_the_batch_are_scored_by_the_components_of_finished_tasks(digits: Stream) -> None:
    settings = tiny(method="boo+coreset", coreset_images=3, coreset_mode="batch", tasks=1)
    trainer = begun(trained(settings, digits), digits[1])
    batch = step(trainer, digits[1].train.images[:8])
    kept = trainer.method.memory()["coreset.images"].flatten(1, 2)

    def total(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        posterior = model.posterior(x)
        z = posterior.rsample(noise)
        kl: Tensor = posterior.log_prob(z) - model.prior(model.posterior, task=0).log_prob(z)
        return (kl - model.likelihood.log_prob(model.decode(z), x)).sum()

    expected = trainer.replicas.map(total, kept, batch["coreset.kept_noise"]) / 8
    torch.testing.assert_close(trainer.replicas.map(trainer.objective, batch).terms["coreset.kept"], expected)


def test_early_stopping_does_not_look_at_kept_images(digits: Stream) -> None:
    recorder = Recorder()
    trained(tiny(method="coreset", coreset_mode="batch", tasks=2), digits, recorder)
    epochs = [event for event in recorder.of("epoch") if event["task"] == 1]
    for event in epochs:
        valid = event["valid"]
        assert valid["kept"] == [0.0, 0.0]
        whole = [a + b for a, b in zip(valid["reconstruction"], valid["kl"], strict=True)]
        assert valid["loss"] == pytest.approx(whole, rel=1e-5)
        assert min(event["train"]["kept"]) > 0


@pytest.mark.parametrize("mode", ["append", "batch"])
def test_the_first_task_is_that_of_standard(mode: str, digits: Stream) -> None:
    assert same(
        trained(tiny(method="standard+coreset", coreset_mode=mode, tasks=1), digits), trained(tiny(tasks=1), digits)
    )


@pytest.mark.parametrize("other", ["joint", "multihead"])
def test_what_it_cannot_be_combined_with_is_refused(other: str) -> None:
    with pytest.raises(InputError, match=other):
        make_method(tiny(method=f"{other}+coreset"))


def test_a_killed_run_with_kept_images_in_its_batches_ends_with_the_same_bytes(
    harmless_kills: Callable[..., int],
) -> None:
    settings = tiny(method="standard+coreset", coreset_mode="batch", coreset_images=2, batch_size=2)
    assert harmless_kills(settings, itertools.cycle([2, 3])) >= 3


def test_kept_images_keep_the_old_task_and_more_so_in_every_batch(digits: Stream) -> None:
    def old_task(**changes: Any) -> Tensor:
        trainer = trained(tiny(epochs=25, learning_rate=1e-2, tasks=2, coreset_images=6, **changes), digits)
        return -log_likelihood(trainer.replicas, digits[0].test.images, 100).log_prob.mean(1)

    forgotten, append = old_task(method="standard"), old_task(method="standard+coreset")
    batch = old_task(method="standard+coreset", coreset_mode="batch")
    assert (append < forgotten - 2).all()
    assert (batch < append - 2).all()


@pytest.mark.slow
def test_compiled_steps_take_ever_more_kept_images(digits: Stream) -> None:
    settings = tiny(method="coreset", coreset_mode="batch", coreset_images=5)  # 5, then 10 beside a batch of 8
    plain, compiled = (Trainer(settings, digits.spec, compile=compile) for compile in (False, True))
    for task in digits[:3]:
        plain.learn(task, Recorder())
        compiled.learn(task, Recorder())
    for name, tensor in plain.replicas.parameters.items():
        torch.testing.assert_close(compiled.replicas.parameters[name], tensor, rtol=0, atol=1e-4)
