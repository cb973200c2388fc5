"""What all tests share: a private cache, one thread, a tiny stream of real digits and a tiny model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import boovae.run
from boovae.config import Settings, resolve
from boovae.data import Stream, load_stream
from boovae.run import Run, train
from boovae.training.events import Event
from boovae.training.trainer import Trainer

TINY: dict[str, Any] = {
    "method": "standard",
    "net": "mlp:16",
    "latent_dim": 4,
    "limit": 24,
    "tasks": 3,
    "epochs": 4,
    "batch_size": 8,
    "replicas": 2,
    "components": 3,
    "samples": 20,
    "generated": 60,
    "boo_steps": 3,
    "boo_until": 2,
    "distill_latents": 10,
}


@pytest.fixture(autouse=True, scope="session")
def _quiet_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's cache out of the tests; tiny tensors run faster on one thread."""
    os.environ["BOOVAE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands that tests start
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def digits() -> Stream:
    """Ten tasks of a few real handwritten digits each."""
    return load_stream("digits", limit=TINY["limit"])


@pytest.fixture
def float64() -> Iterator[None]:
    """Double precision everywhere, so that only a different formula makes a difference."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def shared_data() -> Path:
    """Where the real datasets lie; skips where they do not."""
    folder = Path(os.environ.get("BOOVAE_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not (folder / "mnist").is_dir():
        pytest.skip("the real datasets are not here")
    return folder


def tiny(**changes: Any) -> Settings:
    """Return the settings of a run that takes a moment."""
    return dataclasses.replace(resolve({"dataset": "digits", **TINY}), **changes)


class Recorder:
    """An observer that keeps the events and may act after an epoch."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def block(self, trainer: Trainer) -> None:
        pass

    def epoch(self, trainer: Trainer, event: Event) -> None:
        pass


def trained(settings: Settings, stream: Stream, recorder: Recorder | None = None) -> Trainer:
    """Return a trainer that has learned the planned tasks of the stream."""
    trainer = Trainer(settings, stream.shape)
    for task in stream[: settings.tasks]:
        trainer.learn(task, recorder or Recorder())
    return trainer


def same(one: Trainer, other: Trainer, replica: int | None = None) -> bool:
    """Whether two trainers hold the same model bit for bit (one replica of it, or all)."""
    chosen = slice(None) if replica is None else replica
    tensors = one.replicas.tensors(), other.replicas.tensors()
    return all(torch.equal(tensor[chosen], tensors[1][name][chosen]) for name, tensor in tensors[0].items())


class Killed(BaseException):
    """Stands for a process that dies without a word."""


def train_with_kills(
    settings: Settings,
    stream: Stream,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    lives: Iterator[int],
    **options: Any,
) -> int:
    """Train to the end although the process dies, again and again after so many blocks; return how often it died."""
    return with_kills(lambda: train(settings, stream, folder, **options), monkeypatch, lives)


def with_kills(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch, lives: Iterator[int]) -> int:
    """Do some work to the end although the process dies after so many blocks; return how often it died."""
    monkeypatch.setattr(boovae.run, "CHECKPOINT_SECONDS", 0.0)
    checkpointing, kills = Run.block, 0
    while True:
        left = next(lives)

        def block(run: Run, trainer: Trainer) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            checkpointing(run, trainer)

        monkeypatch.setattr(Run, "block", block)
        try:
            work()
            return kills
        except Killed:
            kills += 1
