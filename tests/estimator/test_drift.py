"""What EWC and SI have in common: each weight is held to its old value, as firmly as it mattered to old tasks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from boovae.config import Settings
from boovae.data import Stream, Task
from boovae.metrics.likelihood import log_likelihood
from boovae.training.trainer import Trainer
from conftest import Recorder, same, tiny, trained


class Holder(NamedTuple):
    """A method, what it calls the importance of a weight, and strengths that hold, hold firmly and let nothing move."""

    method: str
    importance: str
    held: float
    firm: float
    still: float

    def settings(self, strength: float, **changes: Any) -> Settings:
        return tiny(**{"method": self.method, f"{self.method}_strength": strength, **changes})


EWC = Holder("ewc", "precision", 300.0, 1e3, 1e9)
SI = Holder("si", "importance", 100.0, 100.0, 1e8)
every_holder = pytest.mark.parametrize("holder", [EWC, SI], ids=lambda holder: holder.method)


@pytest.mark.usefixtures("way")
@every_holder
def test_without_strength_it_is_standard_bit_for_bit(holder: Holder, digits: Stream) -> None:
    assert same(trained(holder.settings(0.0), digits), trained(tiny(), digits))


def nll(trainer: Trainer, task: Task) -> Tensor:
    return -log_likelihood(trainer.replicas, task.test.images, 200).log_prob.mean(1)


@every_holder
def test_strength_holds_the_weights_and_what_they_knew(holder: Holder, digits: Stream) -> None:
    """Between fine-tuning and standing still; without strength the first task is forgotten."""
    before = trained(tiny(method=holder.method, epochs=40, tasks=1), digits)
    tensors, record = before.state()
    free, held, still = (
        Trainer(holder.settings(strength, epochs=40), digits.spec) for strength in (0.0, holder.held, holder.still)
    )
    for trainer in (free, held, still):
        trainer.load_state({name: tensor.clone() for name, tensor in tensors.items()}, record)
        trainer.learn(digits[1], Recorder())
    known, forgotten, kept = (nll(trainer, digits[0]) for trainer in (before, free, held))
    assert (forgotten - known > 2).all()
    assert (kept - known < 0.5 * (forgotten - known)).all()
    assert (nll(held, digits[1]) < nll(before, digits[1]) - 1).all()  # and it learned

    def moved(trainer: Trainer) -> float:
        """By how much the weights that matter moved."""
        old = before.replicas.parameters
        return sum(
            float((tensors[f"memory/{holder.importance}.{name}"] * (tensor - old[name]).square()).sum())
            for name, tensor in trainer.replicas.parameters.items()
        )

    assert moved(still) < 0.01 * moved(held) < 0.01 * moved(free)


@every_holder
def test_only_what_tasks_share_is_held(holder: Holder, digits: Stream) -> None:
    def held(method: str, key: str, **changes: Any) -> set[str]:
        memory = trained(tiny(method=method, **changes), digits).method.memory()
        start = f"{key}{holder.importance}."
        return {name.removeprefix(start) for name in memory if name.startswith(start)}

    boosted = held(f"boo+{holder.method}", f"{holder.method}.")
    vamp = held(holder.method, "", prior="vamp", tasks=2)
    for names in (boosted, vamp):
        assert {name.split(".")[0] for name in names} == {"encoder", "decoder"}
    heads = held(f"multihead+{holder.method}", f"{holder.method}.")
    assert heads
    assert all(name.startswith("decoder.body.") for name in heads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_holder
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_captured_step_is_the_plain_step(compiled: bool, holder: Holder, digits: Stream) -> None:
    settings = holder.settings(holder.firm, tasks=2)
    plain, captured = (Trainer(settings, digits.spec, device="cuda", compile=c) for c in (False, compiled))
    plain.step.captures = False
    for trainer in (plain, captured):
        for task in digits[:2]:
            trainer.learn(task, Recorder())
    for name, tensor in (plain.replicas.parameters | plain.method.memory()).items():
        found = (captured.replicas.parameters | captured.method.memory())[name]
        assert (found - tensor).norm() < 0.02 * tensor.norm()
