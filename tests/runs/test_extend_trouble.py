"""Extensions that were stopped in the middle, and what is refused with the run untouched."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boovae.cli.main import main
from boovae.data import Stream, load_stream
from boovae.errors import InputError, RunError
from boovae.runs.extend import extend
from boovae.runs.reading import read_record
from boovae.runs.run import Run
from boovae.runs.train import train
from boovae.training import checkpoint
from boovae.training.events import Event
from boovae.training.trainer import Trainer
from conftest import Killed, tiny, with_kills
from run_folders import NLL, assert_same_model, content, write_npz

# --- stopped in the middle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["standard", "boo+distill"])
def test_killed_again_and_again_it_ends_the_same(
    method: str, finished: Callable[..., Path], third: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny(method=method, tasks=2)
    whole, killed = extend(finished(settings), third, metrics=NLL), finished(settings)
    assert with_kills(lambda: extend(killed, third, metrics=NLL), monkeypatch, itertools.count(2)) >= 2
    assert_same_model(whole, killed)
    for name in ("metrics.jsonl", "samples/task_02.png"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()


@pytest.mark.parametrize("moment", ["run.save_checkpoint", "train.evaluate", "train.save_samples"])
def test_killed_at_a_bad_moment_it_ends_the_same(
    moment: str, finished: Callable[..., Path], third: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments: Any, **options: Any) -> None:
        raise Killed

    settings = tiny(method="boo+distill", tasks=2)
    whole, killed = extend(finished(settings), third, metrics=NLL), finished(settings)
    with monkeypatch.context() as patch:
        patch.setattr(f"boovae.runs.{moment}", die)
        with pytest.raises(Killed):
            extend(killed, third, metrics=NLL)
    extend(killed, third, metrics=NLL)
    assert_same_model(whole, killed)
    assert (whole / "metrics.jsonl").read_bytes() == (killed / "metrics.jsonl").read_bytes()


@pytest.fixture
def stopped(finished: Callable[..., Path], third: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose extension was stopped by Ctrl-C."""
    run = finished()
    stop_at = Run.block

    def block(run: Run, trainer: Trainer) -> None:
        run.stop_requested = trainer.epoch == 2
        stop_at(run, trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "block", block)
        with pytest.raises(RunError, match="the same command continues it"):
            extend(run, third, metrics=NLL)
    return run


def test_another_extension_is_refused_while_one_is_unfinished(stopped: Path, digits: Stream, tmp_path: Path) -> None:
    before = content(stopped)
    other = write_npz(tmp_path / "other.npz", digits, [4])
    for data, name in ((other, None), (None, None), (f"npz:{tmp_path / 'elsewhere' / 'march.npz'}", "may")):
        with pytest.raises(InputError, match="is still learning 'march'"):
            extend(stopped, data, name=name, metrics=NLL)
    assert content(stopped) == before


def test_a_stopped_extension_goes_on_wherever_its_images_lie_now(
    stopped: Path, third: str, finished: Callable[..., Path], tmp_path: Path
) -> None:
    assert not read_record(stopped).finished
    moved = tmp_path / "moved.npz"
    shutil.move(third.removeprefix("npz:"), moved)
    extend(stopped, str(moved), metrics=NLL)  # a path alone will do
    shutil.copy(moved, third.removeprefix("npz:"))
    whole = extend(finished(), third, metrics=NLL)
    assert_same_model(whole, stopped)
    assert (whole / "metrics.jsonl").read_bytes() == (stopped / "metrics.jsonl").read_bytes()


def test_train_leaves_an_extension_alone(stopped: Path, third: str, digits: Stream) -> None:
    before = content(stopped)
    train(tiny(tasks=2), digits, stopped, metrics=NLL)
    assert content(stopped) == before
    extend(stopped, third, metrics=NLL)
    before = content(stopped)
    train(tiny(tasks=2), digits, stopped, metrics=NLL)
    assert content(stopped) == before


# --- what is refused ------------------------------------------------------------------------------------------------


def odd(path: Path, *shape: int, high: float = 1.0) -> str:
    images = np.random.default_rng(0).random((20, *shape)) * high if shape else np.zeros((0, 8, 8))
    np.savez(path / "odd.npz", images=images, labels=np.zeros(len(images), int))
    return f"npz:{path / 'odd.npz'}"


REFUSED: dict[str, tuple[Callable[[Path], str | None], str | None, str]] = {
    "another size": (lambda path: odd(path, 28, 28), None, r"^data npz:.*28 x 28.*8 x 8"),
    "colours": (lambda path: odd(path, 8, 8, 3), None, r"^data npz:.*3 x 8 x 8.*images of 8 x 8"),
    "flat": (lambda path: odd(path, 64), None, r"^data npz:.*images of 64, .*8 x 8"),
    "pixels out of range": (lambda path: odd(path, 8, 8, high=255.0), None, r"^data npz:.*outside pixel_range"),
    "no images": (odd, None, r"^data npz:.*no pixels"),
    "no file": (lambda path: f"npz:{path / 'none.npz'}", None, r"^data npz:.*no such file"),
    "no dataset": (lambda path: "digist", None, r"^data digist:.*did you mean 'digits'"),
    "a name that is taken": (lambda path: None, "1", r"^name 1:.*choose another"),
    "no name": (lambda path: None, " ", r"^name is ' '; use printable"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_and_the_run_untouched(
    case: tuple[Callable[[Path], str | None], str | None, str], finished: Callable[..., Path], tmp_path: Path
) -> None:
    data, name, message = case
    run = finished()
    before = content(run)
    with pytest.raises(InputError, match=message):
        extend(run, data(tmp_path), name=name)
    assert content(run) == before


def test_a_run_in_the_middle_is_refused(digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)

    def die(run: Run, trainer: Trainer, event: Event) -> None:
        if trainer.tasks_done == 1 and trainer.epoch == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Run, "epoch", die)
        with pytest.raises(Killed):
            train(tiny(tasks=2), digits, tmp_path / "run", metrics=NLL, command="boovae train --tasks 2")
    before = content(tmp_path / "run")
    with pytest.raises(InputError, match=r"1 of 2 tasks.*`boovae train --tasks 2`"):
        extend(tmp_path / "run")
    assert content(tmp_path / "run") == before


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["extend", str(tmp_path), "--quiet"])
    assert stop.value.code == 2
    assert "not a run folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_all_tasks_of_the_dataset_learned(digits: Stream, tmp_path: Path) -> None:
    settings = tiny(class_order=(3, 4), tasks=None)
    run = train(settings, load_stream("digits", limit=24, class_order=(3, 4)), tmp_path / "run", metrics=NLL)
    with pytest.raises(InputError, match=r"all 2 tasks of digits are learned: name the new images with data$"):
        extend(run)


@pytest.mark.parametrize("lost", ["metrics.jsonl", "environment.json", "checkpoint"])
def test_half_a_run_folder_is_refused(lost: str, finished: Callable[..., Path]) -> None:
    run = finished()
    shutil.move(run / lost, run.with_name(f"{run.name} {lost}"))
    before = content(run)
    with pytest.raises(InputError, match=r"copy the whole run folder|no checkpoint"):
        extend(run)
    assert content(run) == before
