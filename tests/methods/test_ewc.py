"""Elastic weight consolidation against plain autograd and against its formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from boovae.config import Settings
from boovae.data import ImageSpec, Stream
from boovae.methods import TaskImages, ewc
from boovae.replicas import stacked as replicas_module
from boovae.replicas.randomness import Draw, Generators
from boovae.replicas.stacked import replica_of
from boovae.training.trainer import Trainer
from conftest import tiny, trained
from small import LATENT, PIXELS, random_images


def make_trainer(**changes: Any) -> Trainer:
    chosen: dict[str, Any] = {"method": "ewc", "net": "mlp:8", "latent_dim": LATENT, "replicas": 2, "seed": 3}
    return Trainer(Settings().changed(**{**chosen, **changes}), ImageSpec((PIXELS,)))


def task_of(train: Tensor, own: int | None = None, before: tuple[int, ...] = ()) -> TaskImages:
    own = train.shape[-2] if own is None else own
    return TaskImages(len(before), "a task", train, train, own, before)


def plain_fisher(trainer: Trainer, replica: int, images: Tensor, noise: Tensor) -> dict[str, Tensor]:
    """The textbook: one image after another through an ordinary module."""
    model = trainer.build()
    model.load_state_dict(replica_of(trainer.replicas.tensors(), replica))
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for x, z in zip(images, noise, strict=True):
        bound = model.bound(x.unsqueeze(0), z.unsqueeze(0))
        loss = bound.reconstruction.sum() + trainer.settings.training.kl_weight * bound.kl.sum()
        for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
            total[name] += gradient**2 / len(images)
    return total


def end_of(trainer: Trainer, task: TaskImages) -> dict[str, Tensor]:
    """End a task without training; return the memory."""
    trainer.method.see(task.index + 1)
    trainer.method.parts[0].end_task(trainer.replicas, task)
    return trainer.method.memory()


def wander(trainer: Trainer, seed: int) -> dict[str, Tensor]:
    """Move all weights at random; return them."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in trainer.replicas.parameters.values():
        tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    return {name: tensor.clone() for name, tensor in trainer.replicas.parameters.items()}


def penalty_and_gradient(trainer: Trainer, replica: int) -> tuple[Tensor, dict[str, Tensor]]:
    """What the loss of one replica gains, and its slope, through the functional call that training uses."""
    replicas, state = trainer.replicas, replica_of(trainer.method.state, replica)

    def total(parameters: dict[str, Tensor]) -> Tensor:
        terms = replicas.call(parameters, trainer.method.parts[0].penalty, {"state": state})
        value: Tensor = terms["drift"]
        return value

    gradients, value = torch.func.grad_and_value(total)(replica_of(replicas.parameters, replica))
    return value, gradients


# --- the Fisher information -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64", "way")
@pytest.mark.parametrize("binarize", ["none", "dynamic"])
@pytest.mark.parametrize("images_of", ["all", "each"])
def test_fisher_equals_a_loop_over_images(images_of: str, binarize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four, of which the last is smaller; foreign images in front must not count."""
    trainer = make_trainer(ewc_images=10, kl_weight=0.7, binarize=binarize)
    monkeypatch.setattr(ewc, "CHUNK_IMAGES", 4)
    own = random_images(2, 15) if images_of == "each" else random_images(15)
    foreign = torch.full_like(own, torch.nan)
    memory = end_of(trainer, task_of(torch.cat([foreign, own], dim=-2), own=15))

    generators = Generators((3, 4), torch.device("cpu"))
    order = generators.order(15, "ewc", 0)[:, :10]
    noise = generators.draw(Draw("normal", (10, LATENT)), "ewc", 0, "latent")
    pixels = generators.draw(Draw("uniform", (10, PIXELS)), "ewc", 0, "pixels")
    for replica in range(2):
        images = (own[replica] if images_of == "each" else own)[order[replica]]
        if binarize == "dynamic":
            images = (pixels[replica] < images).double()
        truth = plain_fisher(trainer, replica, images, noise[replica])
        for name, information in truth.items():
            assert information.max() > 0
            torch.testing.assert_close(memory[f"precision.{name}"][replica], 15 * information, rtol=1e-9, atol=1e-12)
            anchor = memory[f"anchor.{name}"][replica]
            assert torch.equal(anchor, trainer.replicas.parameters[name][replica])


@pytest.mark.usefixtures("float64")
def test_a_small_chunk_gives_the_same_fisher(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = make_trainer(), make_trainer()
    one = end_of(large, task_of(random_images(20)))
    monkeypatch.setitem(ewc.CHUNK_VALUES, "cpu", 1)
    other = end_of(small, task_of(random_images(20)))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-10, atol=1e-13)


# --- the penalty ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_the_penalty_and_its_gradient_are_those_of_the_formula() -> None:
    strength, before, now = 7.0, 20, 5
    trainer = make_trainer(ewc_strength=strength)
    memory = end_of(trainer, task_of(random_images(before)))
    trainer.method.see(2)
    trainer.method.parts[0].begin_task(trainer.replicas, task_of(random_images(now, seed=1), before=(before,)))
    at_anchor, flat = penalty_and_gradient(trainer, 0)
    assert at_anchor.item() == 0
    assert not any(gradient.any() for gradient in flat.values())
    weights = wander(trainer, 1)
    for replica in range(2):
        value, gradients = penalty_and_gradient(trainer, replica)
        truth = 0.0
        for name, theta in weights.items():
            moved = (theta - memory[f"anchor.{name}"])[replica]
            pull = strength / now * memory[f"precision.{name}"][replica] * moved
            truth += 0.5 * (pull * moved).sum().item()
            torch.testing.assert_close(gradients[name], pull, rtol=1e-9, atol=1e-12)
        assert value.item() == pytest.approx(truth, rel=1e-9)


@pytest.mark.usefixtures("float64")
def test_three_tasks_in_one_quadratic_are_the_sum_of_their_quadratics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of other sizes, and weights that no task, or only the second, cares about."""
    sizes, now, real = (20, 8, 12), 6, ewc.fisher
    fishers: list[dict[str, Tensor]] = []
    thetas: list[dict[str, Tensor]] = []

    def spy(*arguments: Any) -> dict[str, Tensor]:
        found = real(*arguments)
        found["decoder.0.bias"].zero_()
        if len(fishers) != 1:
            found["decoder.2.bias"].zero_()
        fishers.append(found)
        return found

    monkeypatch.setattr(ewc, "fisher", spy)
    trainer = make_trainer(ewc_strength=3.0)
    for index, size in enumerate(sizes):
        thetas.append(wander(trainer, index))
        memory = end_of(trainer, task_of(random_images(size, seed=index), before=sizes[:index]))
    trainer.method.see(4)
    trainer.method.parts[0].begin_task(trainer.replicas, task_of(random_images(now), before=sizes))

    def truth(theta: dict[str, Tensor], replica: int) -> float:
        return sum(
            3.0 / 2 * size / now * (found[name] * (theta[name] - old[name]) ** 2)[replica].sum().item()
            for size, found, old in zip(sizes, fishers, thetas, strict=True)
            for name in theta
        )

    here, mine = wander(trainer, 10), [penalty_and_gradient(trainer, replica) for replica in range(2)]
    there, other = wander(trainer, 11), [penalty_and_gradient(trainer, replica)[0] for replica in range(2)]
    for replica in range(2):
        change = truth(here, replica) - truth(there, replica)
        assert (mine[replica][0] - other[replica]).item() == pytest.approx(change, rel=1e-8)
        for name, gradient in mine[replica][1].items():
            pulls = [
                3.0 * size / now * (found[name] * (here[name] - old[name]))[replica]
                for size, found, old in zip(sizes, fishers, thetas, strict=True)
            ]
            torch.testing.assert_close(gradient, torch.stack(pulls).sum(0), rtol=1e-8, atol=1e-10)
    nobody, one = "decoder.0.bias", "decoder.2.bias"
    mean = torch.stack([theta[nobody] for theta in thetas]).mean(0)
    torch.testing.assert_close(memory[f"anchor.{nobody}"], mean)
    torch.testing.assert_close(memory[f"anchor.{one}"], thetas[1][one])
    assert all(tensor.isfinite().all() for tensor in memory.values())


@pytest.mark.usefixtures("float64")
def test_online_ewc_decays_the_past_and_stays_at_the_latest_weights() -> None:
    trainer, fresh = make_trainer(ewc_decay=0.25), make_trainer()
    first = dict(end_of(trainer, task_of(random_images(20))))
    latest = wander(trainer, 1)
    memory = end_of(trainer, task_of(random_images(9, seed=1), before=(20,)))
    wander(fresh, 1)
    alone = end_of(fresh, task_of(random_images(9, seed=1), before=(20,)))
    for name, theta in latest.items():
        assert torch.equal(memory[f"anchor.{name}"], theta)
        truth = 0.25 * first[f"precision.{name}"] + alone[f"precision.{name}"]
        torch.testing.assert_close(memory[f"precision.{name}"], truth)


# --- in training ----------------------------------------------------------------------------------------------------


def test_replicas_one_after_another_are_held_like_stacked_ones(digits: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny(method="ewc", tasks=2, ewc_strength=1e3)
    stacked = trained(settings, digits)
    monkeypatch.setattr(replicas_module, "STACK_LIMIT", 0)
    looped = trained(settings, digits)
    for name, tensor in stacked.replicas.parameters.items():
        torch.testing.assert_close(looped.replicas.parameters[name], tensor, rtol=1e-3, atol=1e-4)
