"""A network per task: old ones never change, the right one is used, and nonsense is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from boovae.data import Stream
from boovae.errors import InputError
from boovae.methods import make_method
from boovae.metrics.cost import ledger
from boovae.metrics.likelihood import log_likelihood
from boovae.metrics.measure import evaluate
from boovae.model.vae import VAE
from boovae.runs.inspection import components
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer
from conftest import Recorder, tiny, trained


def test_old_heads_are_bit_identical_after_later_tasks(digits: Stream) -> None:
    trainer, kept = Trainer(tiny(method="multihead"), digits.spec), []
    for task in digits[:3]:
        trainer.learn(task, Recorder())
        parameters = trainer.replicas.parameters
        kept.append(
            {name: parameters[name].clone() for name in parameters if name.startswith(("encoder.", "decoder.head."))}
        )
    heads = trainer.method.memory()
    for index, own in enumerate(kept):
        for name, tensor in own.items():
            assert torch.equal(heads[name][:, index], tensor)
    assert not torch.equal(kept[0]["encoder.body.0.weight"], kept[1]["encoder.body.0.weight"])


def test_a_new_task_begins_with_fresh_networks_of_its_own(digits: Stream) -> None:
    class First(Recorder):
        def block(self, trainer: Trainer) -> None:
            if trainer.epoch == 0 and trainer.block == 0:
                self.seen = trainer.replicas.parameters["encoder.body.0.weight"].clone()

    trainer, starts = Trainer(tiny(method="multihead"), digits.spec), []
    for task in digits[:2]:
        first = First()
        trainer.learn(task, first)
        starts.append(first.seen)
    ends = trainer.method.memory()["encoder.body.0.weight"]
    assert not torch.equal(starts[1], ends[:, 0])  # not where the first task left off
    assert not torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[1][0], starts[1][1])  # each replica its own


def test_an_image_is_scored_and_made_by_the_network_of_its_task(digits: Stream) -> None:
    trainer = Trainer(tiny(method="multihead"), digits.spec)
    history: list[Any] = []
    for seen, task in enumerate(digits[:3], start=1):
        trainer.learn(task, Recorder())
        history.append(evaluate(trainer, digits[:seen], None, history, metrics=("nll",)))
    for index in range(3):
        images = digits[index].test.images
        view = trainer.method.view(trainer.replicas, index)
        alone = -log_likelihood(view, images, trainer.settings.evaluation.samples).log_prob.mean(1)
        torch.testing.assert_close(torch.tensor(history[-1].nll.per_task[index]), alone.double(), rtol=1e-5, atol=1e-5)
    wrong = -log_likelihood(trainer.replicas, digits[0].test.images, trainer.settings.evaluation.samples).log_prob.mean(
        1
    )
    assert not torch.allclose(torch.tensor(history[-1].nll.per_task[0]), wrong.double(), atol=1e-2)
    everything, first = generate(trainer, 9), generate(trainer, 9, task=0)
    torch.testing.assert_close(everything[:, 0::3], first[:, 0::3])
    assert not torch.allclose(everything[:, 1::3], first[:, 1::3])


def test_the_frozen_networks_are_counted_as_memory(digits: Stream) -> None:
    trainer = Trainer(tiny(method="multihead"), digits.spec)
    sizes = []
    for task in digits[:2]:
        trainer.learn(task, Recorder())
        sizes.append(sum(tensor.nbytes for tensor in trainer.method.memory().values()))
    assert sizes[1] == 2 * sizes[0] > 0
    assert ledger(trainer).memory == {"networks": sizes[1] // 2}  # per replica, all layers together


@pytest.mark.parametrize("method", ["multihead+distill", "replay+multihead", "joint+multihead"])
def test_invalid_combinations_are_refused_with_the_reason(method: str) -> None:
    with pytest.raises(InputError, match=rf"method={re.escape(repr(method))}: .+"):
        make_method(tiny(method=method))


def test_old_components_cannot_be_held_by_the_network_of_another_task() -> None:
    make_method(tiny(method="boo+multihead"))
    with pytest.raises(InputError, match="boo_lambda=0"):
        make_method(tiny(method="boo+multihead", boo_lambda=1.0))
    with pytest.raises(InputError, match="mog_lambda=0"):
        make_method(tiny(method="multihead+mog"))


@pytest.mark.parametrize("other", ["boo", "mog"])
def test_components_are_placed_with_the_encoder_of_their_task_whatever_the_order(other: str, digits: Stream) -> None:
    """Two names of one combination end with the same bits."""
    changes: dict[str, Any] = {"tasks": 2, "mog_lambda": 0.0, "epochs": 1}
    one, two = (trained(tiny(method=name, **changes), digits) for name in (f"{other}+multihead", f"multihead+{other}"))
    for name, tensor in one.replicas.tensors().items():
        assert torch.equal(two.replicas.tensors()[name], tensor), name


def test_components_are_shown_as_the_network_of_their_task_decodes_them(digits: Stream) -> None:
    trainer = Trainer(tiny(method="boo+multihead"), digits.spec)
    for task in digits[:2]:
        trainer.learn(task, Recorder())
    first = next(component for component in components(trainer) if component.task == 0)
    mean = trainer.replicas.buffers["prior.mean"][:, 0, first.place].unsqueeze(1)
    right, wrong = (
        replicas.map(VAE.images, mean)[0, 0]
        for replicas in (trainer.method.view(trainer.replicas, 0), trainer.replicas)
    )
    torch.testing.assert_close(first.decoded, right)
    assert not torch.allclose(right, wrong, atol=1e-3)
