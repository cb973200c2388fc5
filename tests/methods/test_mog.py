"""The mixture of free Gaussians: what it learns, what EM finds, what it remembers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from boovae.data import Split, Stream
from boovae.methods.mog import LEAST_VARIANCE, gaussian_em
from boovae.model.distributions import DiagonalMixture
from boovae.training.trainer import Trainer
from conftest import Recorder, finite, tiny, trained


def two_groups(count: int = 4000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(count, 2, generator=generator)
    first = torch.rand(count, generator=generator) < 0.7
    return torch.where(first.unsqueeze(1), 0.5 * z + torch.tensor([-3.0, 1.0]), 1.5 * z + torch.tensor([4.0, 0.0]))


def start(components: int, z: Tensor) -> DiagonalMixture:
    even = torch.full((components,), -math.log(components))
    return DiagonalMixture(even, z[:components].clone(), torch.zeros(components, 2))


def test_em_finds_the_gaussians_that_are_there() -> None:
    z = two_groups()
    fitted = gaussian_em(
        z, DiagonalMixture(torch.zeros(2).log_softmax(0), torch.tensor([[-1.0, 0], [1, 0]]), torch.zeros(2, 2))
    )
    torch.testing.assert_close(fitted.log_weights.exp(), torch.tensor([0.7, 0.3]), rtol=0, atol=0.03)
    torch.testing.assert_close(fitted.mean, torch.tensor([[-3.0, 1.0], [4.0, 0.0]]), rtol=0, atol=0.12)
    deviation = (0.5 * fitted.log_variance).exp()
    torch.testing.assert_close(deviation, torch.tensor([[0.5, 0.5], [1.5, 1.5]]), rtol=0.08, atol=0)


def test_em_raises_the_likelihood_and_survives_identical_codes() -> None:
    z = two_groups(300)
    before = start(5, z)
    assert gaussian_em(z, before).log_prob(z).mean() > before.log_prob(z).mean()
    same = gaussian_em(torch.ones(20, 2), start(3, torch.ones(20, 2)))
    assert all(part.isfinite().all() for part in same)
    assert (same.log_variance >= math.log(LEAST_VARIANCE) - 1e-6).all()
    assert same.log_weights.exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_the_components_learn_with_the_networks_and_accumulate(digits: Stream) -> None:
    settings = tiny(method="mog")
    trainer, earlier = Trainer(settings, digits.spec), torch.empty(2, 0, 3, 4)
    for done, task in enumerate(digits[:3], start=1):
        trainer.learn(task, Recorder())
        memory = trainer.method.memory()
        assert memory["mean"].shape == (2, done, 3, 4)  # replicas, tasks, components, latents
        torch.testing.assert_close(memory["log_weights"].exp().sum(-1), torch.ones(2, done))
        assert torch.equal(memory["mean"][:, :-1], earlier)
        earlier = memory["mean"].clone()
        images = trainer.replicas.map(lambda model, z: model.images(z), memory["mean"][:, -1])
        torch.testing.assert_close(memory["pseudo_inputs"][:, -1], images)
    still = trained(tiny(method="mog", epochs=1, learning_rate=1e-9, tasks=1), digits).method.memory()["mean"]
    moved = trained(tiny(method="mog", tasks=1), digits).method.memory()["mean"]
    assert not torch.allclose(still, moved, atol=1e-3)


def test_penalties_appear_with_the_second_task_and_can_be_switched_off(digits: Stream) -> None:
    recorder = Recorder()
    trained(tiny(method="mog", tasks=2), digits, recorder)
    epochs = recorder.of("epoch")
    assert {"encoder", "decoder"} & set(epochs[0]["train"]) == set()
    assert {"encoder", "decoder"} <= set(epochs[-1]["train"])
    free = Recorder()
    trained(tiny(method="mog", tasks=2, mog_lambda=0.0), digits, free)
    assert all("encoder" not in event["train"] for event in free.of("epoch"))


def test_em_weighs_the_components_and_gradients_keep_them_equal(digits: Stream) -> None:
    equal, weighed = (
        trained(tiny(method="mog", mog_fit=fit, tasks=1), digits).method.memory()["log_weights"].exp()
        for fit in ("gradient", "em")
    )
    torch.testing.assert_close(equal, torch.full_like(equal, 1 / 3))
    assert (weighed - 1 / 3).abs().max() > 0.01
    torch.testing.assert_close(weighed.sum(-1), torch.ones(2, 1))


@pytest.mark.filterwarnings("error")
def test_a_task_of_one_image_leaves_the_prior_whole(digits: Stream) -> None:
    rare = replace(digits[1], train=Split(digits[1].train.images[:1], digits[1].train.labels[:1]))
    trainer = Trainer(tiny(method="mog"), digits.spec)
    for task in (digits[0], rare):
        trainer.learn(task, Recorder())
    assert finite(trainer)
    assert not trainer.frozen.any()
