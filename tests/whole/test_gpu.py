"""What a CUDA device must keep of the promises; `make test-gpu` runs these."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from boovae.cli.main import main
from boovae.config import Settings
from boovae.data import ImageSpec, Stream
from boovae.metrics.features import PictureFeatures
from boovae.metrics.likelihood import log_likelihood, scored_again
from boovae.metrics.reference import Reference
from boovae.runs.train import train
from boovae.training.events import Event
from boovae.training.trainer import Trainer
from conftest import Recorder, same, tiny, train_with_kills

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def trained_on_gpu(settings: Settings, stream: Stream, compiled: bool, recorder: Recorder | None = None) -> Trainer:
    trainer = Trainer(settings, stream.spec, device="cuda", compile=compiled)
    for task in stream[: settings.data.tasks]:
        trainer.learn(task, recorder or Recorder())
    return trainer


@compiled
@pytest.mark.parametrize("net", ["mlp:16", "conv:4"])  # stacked, and side by side on streams
def test_the_same_run_twice_is_the_same_on_a_gpu(net: str, compiled: bool, digits: Stream) -> None:
    settings = tiny(net=net, method="boo+distill")
    one, other = (trained_on_gpu(settings, digits, compiled) for _ in range(2))
    assert same(one, other)
    assert torch.stack([tensor.isfinite().all() for tensor in one.replicas.tensors().values()]).all()


def test_replicas_on_streams_learn_what_they_learn_alone(digits: Stream) -> None:
    settings = tiny(net="conv:4", method="boo", boo_objective="literal", replicas=3)
    together = trained_on_gpu(settings, digits, compiled=False).replicas.tensors()
    alone = trained_on_gpu(settings.changed(seed=2, replicas=1), digits, compiled=False).replicas.tensors()
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name][2], tensor[0])


@compiled
def test_replicas_are_isolated_on_a_gpu(compiled: bool, digits: Stream) -> None:
    class Saboteur(Recorder):
        def epoch(self, trainer: Trainer, event: Event) -> None:
            for tensor in trainer.replicas.parameters.values():
                tensor[1] = math.nan

    hurt = trained_on_gpu(tiny(epochs=6), digits, compiled, Saboteur())
    assert same(hurt, trained_on_gpu(tiny(epochs=6), digits, compiled), replica=0)
    assert hurt.frozen.tolist() == [False, True]


def test_captured_training_learns_as_well_as_the_cpu(digits: Stream) -> None:
    """Other kernels and other random numbers, the same quality."""
    settings = tiny(epochs=60, tasks=1, replicas=4)
    on_gpu = trained_on_gpu(settings, digits, compiled=True)
    on_cpu = Trainer(settings, digits.spec)
    on_cpu.learn(digits[0], Recorder())
    images = digits[0].test.images
    gpu = log_likelihood(on_gpu.replicas, images.cuda(), 500).log_prob.mean().item()
    cpu = log_likelihood(on_cpu.replicas, images, 500).log_prob.mean().item()
    assert gpu == pytest.approx(cpu, abs=0.5)


def test_compiled_likelihood_agrees_with_the_plain_one_on_the_cpu(digits: Stream) -> None:
    trainer = trained_on_gpu(tiny(tasks=1), digits, compiled=False)
    images = digits[0].test.images.cuda()
    fast = log_likelihood(trainer.replicas, images, 2000, compile=True).log_prob
    plain = log_likelihood(trainer.replicas, images, 2000).log_prob
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-4)


def test_images_are_scored_again_as_well_as_on_the_cpu(digits: Stream) -> None:
    trainer, images = trained_on_gpu(tiny(method="boo", tasks=2), digits, compiled=False), digits[0].test.images[:8]
    found = log_likelihood(trainer.replicas, images.cuda(), 1000)
    found.effective_samples.fill_(1.0)
    again = scored_again(trainer.replicas, images.cuda(), 1000, found)
    assert again.fitted.all()
    torch.testing.assert_close(again.log_prob, found.log_prob, atol=0.5, rtol=0.0)
    assert torch.equal(again.log_prob, scored_again(trainer.replicas, images.cuda(), 1000, found).log_prob)


@pytest.mark.parametrize("compile", ["off", "on"])
def test_resume_is_exact_on_a_gpu(
    compile: Literal["off", "on"], digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny(batch_size=2, method="boo+distill")
    options = {"metrics": ("nll",), "device": "cuda", "compile": compile}
    train(settings, digits, tmp_path / "whole", metrics=("nll",), device="cuda", compile=compile)
    assert train_with_kills(settings, digits, tmp_path / "killed", monkeypatch, itertools.count(6), **options) >= 2
    whole, killed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()


def test_the_experiments_run_on_a_gpu(digits: Stream, tmp_path: Path) -> None:
    """The paper's other experiments, small: classifiers, maps and borders are learned on the device."""
    small = ["--dataset", "digits", "--limit", "30", "--epochs", "3", "--replicas", "2", "--device", "cuda", "--quiet"]
    main(["replay", *small, "--tasks", "2", "--classifier-epochs", "3", "--out", str(tmp_path / "replay")])
    main(["latent-map", *small, "--tasks", "2", "--out", str(tmp_path / "map")])
    main(["train", *small, "--detect-tasks", "--metric", "nll", "--out", str(tmp_path / "run")])
    for name in ("replay/replay.png", "replay/replay.csv", "map/latent_map.png", "run/metrics.jsonl"):
        assert (tmp_path / name).stat().st_size > 0


def test_features_from_the_cache_join_those_that_are_computed_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOVAE_CACHE", str(tmp_path))
    spec = ImageSpec((3, 4, 4), (-1.0, 1.0))
    network = PictureFeatures("pixels", torch.nn.Flatten(), "pixels", spec, torch.device("cuda"))
    stream = Stream.from_tasks([2 * torch.rand(40, 3, 4, 4) - 1 for _ in range(2)], pixel_range=(-1.0, 1.0))
    Reference(network).real(stream[0])
    samples = network.features(2 * torch.rand(2, 60, 48) - 1)
    scores = Reference(network).scores(samples, stream)
    found = (scores.frechet, scores.frechet_train, scores.kid, scores.precision, scores.recall)
    assert all(values is not None and np.isfinite(values).all() for values in found)
