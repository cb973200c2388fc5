"""`benchmarks/variants.py`: settings compared on validation images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

import variants
from boovae.data import Task
from boovae.metrics.evaluation import Distances
from boovae.metrics.reference import Reference


def test_every_variant_has_a_score_for_each_seed_and_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["long=standard:epochs=2", "short=standard:epochs=1", "again=standard:epochs=1"]
    flags = ["--tasks", "2", "--samples", "3", "--images", "10", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["variants.py", *words, *flags])
    variants.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {
        words[0]: words[1:]
        for words in lines[lines.index(["variant", "NLL", "by", "seed", "by", "task", "seconds"]) + 1 :]
    }
    assert table.keys() == {"long", "short", "again"}
    mean, *rest = map(float, table["short"])
    assert mean == pytest.approx(sum(rest[:2]) / 2, abs=0.01) == pytest.approx(sum(rest[2:4]) / 2, abs=0.1)
    assert table["short"][:-1] == table["again"][:-1] != table["long"][:-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["standard", "b=vcl:bound_samples=2"], "set --bound-samples 1"),
        (["standard:epochs"], "write NAME=METHOD:setting=value"),
        (["standard", "--dataset", "nothing"], "unknown dataset 'nothing'"),
    ],
)
def test_what_cannot_be_compared_is_named_before_anything_is_trained(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["variants.py", *words, "--device", "cpu"])
    with pytest.raises(SystemExit, match=said):
        variants.main()
    assert capsys.readouterr().err == ""


def test_samples_are_compared_with_validation_images(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Task] = []
    scores = Reference.scores

    def watched(self: Reference, samples: Tensor, tasks: Sequence[Task], *others: Any) -> Distances:
        asked.extend(tasks)
        return scores(self, samples, tasks, *others)

    monkeypatch.setattr(Reference, "scores", watched)
    flags = ["--tasks", "2", "--samples", "3", "--images", "10", "--device", "cpu", "--features", "classifier"]
    monkeypatch.setattr("sys.argv", ["variants.py", "short=standard:epochs=1", "long=standard:epochs=8", *flags])
    variants.main()
    *_, head, short, long = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head[-2:] == ["classifier", "seconds"]
    assert 0 < float(long[-2]) < float(short[-2])
    assert len(asked) == 4
    assert all(task.test is task.valid for task in asked)
