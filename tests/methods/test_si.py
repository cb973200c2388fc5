"""Synaptic intelligence against a plain loop of steps and against its formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from boovae.config import Settings
from boovae.data import ImageSpec, Stream
from boovae.methods import TaskImages
from boovae.methods.si import SISettings
from boovae.model.vae import VAE
from boovae.replicas.engine import Engine, validation_chunk
from boovae.replicas.stacked import replica_of
from boovae.training.events import Event
from boovae.training.trainer import Trainer
from conftest import Recorder, tiny, trained
from small import LATENT, PIXELS, random_images

STRENGTH, DAMPING = 5.0, 0.2


def make_trainer(**changes: Any) -> Trainer:
    chosen: dict[str, Any] = {"method": "si", "net": "mlp:8", "latent_dim": LATENT, "replicas": 2, "seed": 3}
    chosen |= {"si_strength": STRENGTH, "si_damping": DAMPING}
    return Trainer(Settings().changed(**{**chosen, **changes}), ImageSpec((PIXELS,)))


def begin(trainer: Trainer, index: int, images: Tensor) -> TaskImages:
    """Begin a task as the trainer does, with steps that the test chooses."""
    task = TaskImages(index, "a task", images, images, len(images), (len(images),) * index)
    trainer.method.see(index + 1)
    trainer.method.parts[0].begin_task(trainer.replicas, task)
    noise = {"latent": torch.zeros(2, 1, validation_chunk(len(images)), LATENT)}
    trainer.engine = engine = Engine(trainer.step, images, images, 8, trainer.method.state, noise)
    engine.rate.copy_(torch.tensor([1e-2, 3e-3]))
    return task


def random_importance(trainer: Trainer) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        f"importance.{name}": torch.rand(tensor.shape, generator=generator)
        for name, tensor in trainer.replicas.parameters.items()
    }


def plain_path(
    model: VAE, importance: dict[str, Tensor], images: Tensor, rate: float, steps: Tensor, noise: Tensor
) -> Any:
    """The textbook: Adam on loss and penalty, credit by the gradient of the loss alone."""
    parameters = dict(model.named_parameters())
    anchor = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    path = {name: torch.zeros_like(parameter) for name, parameter in anchor.items()}
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    for chosen, latent in zip(steps, noise, strict=True):
        bound = model.bound(images[chosen], latent)
        loss = (bound.reconstruction + bound.kl).mean()
        plain = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        for name, parameter in parameters.items():
            if importance:
                drift = importance[f"importance.{name}"] * (parameter - anchor[name]) ** 2
                loss = loss + STRENGTH * drift.sum()
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        for (name, parameter), gradient in zip(parameters.items(), plain, strict=True):
            path[name] -= gradient * (parameter.detach() - before[name])
    return path, anchor, {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.usefixtures("float64", "way")
@pytest.mark.parametrize("index", [0, 1], ids=["first", "second"])
def test_credit_and_importance_equal_a_plain_loop(index: int) -> None:
    trainer, images = make_trainer(), random_images(30)
    importance = random_importance(trainer) if index else {}
    trainer.method.parts[0].memory = {name: tensor.clone() for name, tensor in importance.items()}
    models = [trainer.build() for _ in range(2)]
    for replica, model in enumerate(models):
        model.load_state_dict(replica_of(trainer.replicas.tensors(), replica))
    task = begin(trainer, index, images)
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(30, (2, 7, 8), generator=generator)
    noise = torch.randn(2, 7, 8, LATENT, generator=generator)
    trainer.engine.run_block(steps, {"latent": noise})
    found = {name: tensor.clone() for name, tensor in trainer.method.state.items()}
    trainer.method.parts[0].end_task(trainer.replicas, task)
    for replica, rate in enumerate((1e-2, 3e-3)):
        old = replica_of(importance, replica)
        path, anchor, end = plain_path(models[replica], old, images, rate, steps[replica], noise[replica])
        for name, credit in path.items():
            assert credit.abs().max() > 0
            torch.testing.assert_close(found[f"path.{name}"][replica], credit, rtol=1e-6, atol=1e-10)
            truth = old.get(f"importance.{name}", 0) + credit.clamp(min=0) / ((end[name] - anchor[name]) ** 2 + DAMPING)
            kept = trainer.method.memory()[f"importance.{name}"][replica]
            torch.testing.assert_close(kept, truth, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("float64")
def test_the_penalty_is_zero_at_the_anchor_and_else_as_the_formula_says() -> None:
    trainer = make_trainer()
    importance = random_importance(trainer)
    trainer.method.parts[0].memory = importance
    begin(trainer, 1, random_images(10))
    start = {name: tensor.clone() for name, tensor in trainer.replicas.parameters.items()}

    def drift(model: VAE, state: dict[str, Tensor]) -> Tensor:
        return trainer.method.parts[0].penalty(model, {"state": state})["drift"]

    assert trainer.replicas.map(drift, trainer.method.state).tolist() == [0, 0]
    for tensor in trainer.replicas.parameters.values():
        tensor += 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    found = trainer.replicas.map(drift, trainer.method.state)
    for replica in range(2):
        truth = sum(
            STRENGTH * (importance[f"importance.{name}"] * (tensor - start[name]) ** 2)[replica].sum().item()
            for name, tensor in trainer.replicas.parameters.items()
        )
        assert found[replica].item() == pytest.approx(truth, rel=1e-9)


# --- snapshots ------------------------------------------------------------------------------------------------------


class Diary(Recorder):
    """Keeps what was tracked after every epoch, by task and epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.weights: dict[tuple[int, int], dict[str, Tensor]] = {}

    def epoch(self, trainer: Trainer, event: Event) -> None:
        key = event["task"], event["epoch"]
        self.states[key] = {name: tensor.clone() for name, tensor in trainer.method.state.items()}
        self.weights[key] = {name: tensor.clone() for name, tensor in trainer.replicas.parameters.items()}


#: Steps so large that the best epoch is not the last, and not the same for all replicas.
RESTLESS: dict[str, Any] = {"method": "si", "learning_rate": 0.02, "schedule": "plateau", "early_stop": 2, "epochs": 30}


def test_credit_belongs_to_the_best_snapshot(digits: Stream) -> None:
    diary = Diary()
    trainer = trained(tiny(**RESTLESS, tasks=1, replicas=3), digits, diary)
    (end,) = diary.of("task_end")
    last = max(epoch for _, epoch in diary.states)
    assert min(end["best_epoch"]) < last
    for replica, best in enumerate(end["best_epoch"]):
        state, weights = diary.states[0, best], diary.weights[0, best]
        for name, tensor in trainer.replicas.parameters.items():
            assert torch.equal(tensor[replica], weights[name][replica])
            moved = tensor - state[f"anchor.{name}"]
            truth = state[f"path.{name}"].clamp(min=0) / (moved**2 + trainer.settings.of(SISettings).si_damping)
            kept = trainer.method.memory()[f"importance.{name}"]
            torch.testing.assert_close(kept[replica], truth[replica], rtol=1e-6, atol=0)


def test_a_replica_that_stops_early_gets_no_credit_from_training_on(digits: Stream) -> None:
    diary = Diary()
    together = trained(tiny(**RESTLESS, tasks=2, replicas=3), digits, diary)
    first, _ = diary.of("task_end")
    assert len(set(first["epochs"])) > 1
    for replica in range(3):
        alone = trained(tiny(**RESTLESS, tasks=2, replicas=1, seed=replica), digits)
        for name, tensor in alone.method.memory().items():
            assert torch.equal(together.method.memory()[name][replica], tensor[0])
