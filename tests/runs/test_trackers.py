"""What trackers are told: everything, once, by tags with slashes; and the run does not change."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

import boovae.runs.trackers
from boovae.cli.main import main
from boovae.data import Stream
from boovae.errors import InputError
from boovae.runs.run import Run
from boovae.runs.train import train
from conftest import tiny, train_with_kills

SETTINGS: dict[str, Any] = {"tasks": 2, "epochs": 3, "seed": 4}


class Told:
    """A tracker that keeps what it is told; several processes share the list."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, run: Run) -> None:
        self.closed = False

    def numbers(self, values: dict[str, float], axis: str, step: int) -> None:
        Told.calls.append((axis, step, dict(values)))

    def picture(self, tag: str, path: Path, axis: str, step: int) -> None:
        Told.calls.append((axis, step, tag, path.read_bytes()[:4]))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    Told.calls = []
    monkeypatch.setattr(boovae.runs.trackers, "TensorBoard", Told)
    monkeypatch.setitem(boovae.runs.trackers.PACKAGES, "tensorboard", "json")  # something that is installed


def test_a_tracker_is_told_every_number_of_the_log(digits: Stream, tmp_path: Path) -> None:
    folder = train(tiny(**SETTINGS), digits, tmp_path / "run", metrics=("nll",), log=["tensorboard"])
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [event for event in events if event["event"] == "epoch"]
    told = [call for call in Told.calls if call[0] == "epoch"]
    assert [step for _, step, _ in told] == list(range(6))  # two tasks of three epochs, one axis
    for event, (_, _, values) in zip(epochs, told, strict=True):
        assert values["valid/loss/seed_4"] == event["valid"]["loss"][0]
        assert values["train/kl/seed_5"] == event["train"]["kl"][1]
        assert values["learning_rate/seed_4"] == event["learning_rate"][0]
    evaluation = next(event for event in events if event["event"] == "evaluation" and event["task"] == 1)
    seen, values = next(call[1:] for call in Told.calls if call[:2] == ("tasks_seen", 2))
    assert seen == 2
    assert values["nll/pooled/seed_4"] == evaluation["nll"]["pooled"][0]
    assert values["nll/task_01/seed_5"] == evaluation["nll"]["per_task"][1][1]
    assert values["forgetting/task_00/seed_4"] == evaluation["forgetting"]["own"][0][0]
    assert ("tasks_seen", 2, "pictures/samples", b"\x89PNG") in Told.calls


def test_terms_of_combined_methods_become_parts_of_the_tag(digits: Stream, tmp_path: Path) -> None:
    train(tiny(**SETTINGS, method="boo+distill"), digits, tmp_path / "run", metrics=(), log=["tensorboard"])
    tags = {tag for call in Told.calls if len(call) == 3 for tag in call[2]}
    assert "train/distill/decoder/seed_4" in tags
    assert not any("." in tag for tag in tags)
    assert any(call[2] == "pictures/components" for call in Told.calls if len(call) == 4)


def test_a_run_that_is_killed_tells_nothing_twice_and_leaves_nothing_out(
    digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny(**SETTINGS), digits, tmp_path / "whole", metrics=("nll",), log=["tensorboard"])
    whole, Told.calls = Told.calls, []
    lives = itertools.chain([2, 3, 4], itertools.repeat(1000))
    options: dict[str, Any] = {"metrics": ("nll",), "log": ["tensorboard"]}
    kills = train_with_kills(tiny(**SETTINGS), digits, tmp_path / "killed", monkeypatch, lives, **options)
    assert kills == 3
    assert Told.calls == whole


def test_the_log_is_the_same_with_and_without_a_tracker(digits: Stream, tmp_path: Path) -> None:
    for name, log in (("with", ["tensorboard"]), ("without", [])):
        train(tiny(**SETTINGS), digits, tmp_path / name, metrics=(), log=log)
    assert (tmp_path / "with" / "metrics.jsonl").read_bytes() == (tmp_path / "without" / "metrics.jsonl").read_bytes()


class Package(ModuleType):
    """Stands for wandb and trackio: takes what they take."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.logged: list[dict[str, Any]] = []
        self.metrics: list[str] = []
        self.options: dict[str, Any] = {}
        self.finished = False

    def init(self, **options: Any) -> Package:
        print("a package that talks")
        self.options = options
        return self

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics.append(name)

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def Image(self, path: str) -> str:  # noqa: N802 (their name)
        return f"picture of {Path(path).name}"

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_dashboard_gets_numbers_with_their_place_and_pictures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = Package(name)
    monkeypatch.setitem(sys.modules, name, package)
    words = "train --tasks 1 --limit 20 --epochs 2 --net mlp:8 --samples 5 --boo-steps 1 --metric nll --json --quiet"
    main([*words.split(), "--log", name, "--out", str(tmp_path / "run")])
    json.loads(capsys.readouterr().out)  # stdout is for the result alone
    assert package.options["project"] == "boovae"
    assert package.options["config"]["epochs"] == 2
    assert ("*" in package.metrics) == (name == "wandb")
    assert [values["epoch"] for values in package.logged if "valid/loss/seed_0" in values] == [0, 1]
    assert {"pictures/samples": "picture of task_00.png", "tasks_seen": 1} in package.logged
    assert package.finished


def test_a_missing_or_unknown_tracker_is_named_before_any_work(
    digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'boovae\[wandb\]'"):
        train(tiny(), digits, tmp_path / "run", log=["wandb"])
    with pytest.raises(InputError, match="did you mean 'wandb'"):
        train(tiny(), digits, tmp_path / "run", log=["wandbb"])
    assert not (tmp_path / "run").exists()


def test_tensorboard_reads_what_was_written(digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train(tiny(**SETTINGS), digits, tmp_path / "run", metrics=("nll",), log=["tensorboard"])
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    truth = [event["valid"]["loss"][0] for event in logged if event["event"] == "epoch"]
    found = events.Scalars("valid/loss/seed_4")
    assert [point.step for point in found] == list(range(6))
    assert [point.value for point in found] == pytest.approx(truth, rel=1e-6)
    assert [image.step for image in events.Images("pictures/samples")] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_real_packages_take_a_run(
    name: str, digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip(name)
    folder = train(tiny(**SETTINGS), digits, tmp_path / "run", metrics=("nll",), log=[name])
    kept = folder / "wandb" if name == "wandb" else tmp_path / "trackio"
    assert len(list(kept.rglob("*.png"))) >= 2
