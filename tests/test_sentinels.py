"""Models that went wrong on purpose are named in plain words, with the flag that helps; sound ones are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from boovae.cli import main
from boovae.data import Stream
from boovae.metrics.posterior import posterior_health
from boovae.report import write_report
from boovae.report.findings import warnings
from boovae.report.read import read_run
from boovae.run import train
from boovae.training.replicas import replica_of
from boovae.vae import VAE
from conftest import tiny, trained

COLLAPSE, EXPLODING, IDLE = "posterior collapse", "--log-variance-range", "--components"


def found(stream: Stream, folder: Path, **changes: Any) -> list[str]:
    settings = tiny(**{"tasks": 1, "replicas": 1, "epochs": 15, "learning_rate": 1e-2, **changes})
    return warnings(read_run(train(settings, stream, folder, metrics=("nll",))))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kl_weight": 100.0}, COLLAPSE),
        ({"log_variance_range": (-6.0, -2.0)}, EXPLODING),
        ({"method": "boo", "components": 8, "boo_prune": 0.24}, IDLE),
    ],
)
def test_what_went_wrong_is_named(digits: Stream, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    texts = found(digits, tmp_path / "run", **changes)
    assert sum(words in text for text in texts) == 1
    assert all(text.endswith(".") for text in texts)
    page = write_report([tmp_path / "run"]).read_text(encoding="utf-8")
    assert words in page


def test_a_sound_model_gets_no_warning_of_these(digits: Stream, tmp_path: Path) -> None:
    texts = found(digits, tmp_path / "run", method="boo", components=3, boo_steps=5)
    assert not any(words in text for text in texts for words in (COLLAPSE, EXPLODING, IDLE))


def test_the_terminal_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "train --tasks 1 --limit 20 --epochs 10 --net mlp:8 --samples 5 --method standard --metric nll --json"
    command = [*words.split(), "--kl-weight", "100", "--learning-rate", "0.01", "--out", str(tmp_path / "run")]
    main(command)
    shown = capsys.readouterr()
    assert "warning: The latent space says nothing about the images of task “0”" in shown.err
    assert json.loads(shown.out)["event"] == "evaluation"
    main([*command, "--quiet"])
    assert "warning" not in capsys.readouterr().err


def test_active_units_are_counted_as_defined(digits: Stream) -> None:
    trainer = trained(tiny(method="multihead", tasks=2, epochs=3), digits)
    health = posterior_health(trainer, [digits[0], None])
    view = trainer.method.view(trainer.replicas, 0)
    for replica in range(2):
        posterior = view.call(replica_of(view.tensors(), replica), VAE.posterior, digits[0].test.images)
        expected = int((posterior.mean.double().var(0, correction=0) > 0.01).sum())
        assert health["active_units"][0][replica] == expected
        assert health["at_upper_limit"][0][replica] == float((posterior.log_variance > 2 - 1e-3).double().mean())
    assert health["active_units"][1] == [None, None]
    assert torch.tensor(health["active_units"][0]).max() > 0
