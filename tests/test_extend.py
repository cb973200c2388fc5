"""One more task from the checkpoint alone: the same model as in one go, whatever has become of the old data."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import boovae.run
from boovae.cli import main
from boovae.config import Settings
from boovae.data import Stream, load_stream
from boovae.errors import InputError, RunError
from boovae.extend import extend
from boovae.report import write_csv, write_report
from boovae.report.read import read_run
from boovae.run import Run, train
from boovae.training.checkpoint import load_checkpoint
from boovae.training.events import Event
from boovae.training.trainer import Trainer
from conftest import Killed, tiny, with_kills

NLL = ("nll",)


def events(folder: Path, *kinds: str) -> list[Event]:
    """Return the log, all of it or some kinds of events."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in lines if not kinds or event["event"] in kinds]


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return everything the newest checkpoint holds: the model and the memory."""
    loaded = load_checkpoint(folder / "checkpoint")
    assert loaded is not None
    return loaded[0]


def assert_same_model(one: Path, other: Path) -> None:
    expected, found = tensors(one), tensors(other)
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def content(folder: Path) -> dict[str, bytes]:
    """Return every byte of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_npz(path: Path, stream: Stream, tasks: list[int], **more: Any) -> str:
    """Write some tasks with their split as a file of their own; return how to name it."""
    chosen = [stream[index] for index in tasks]
    parts = [(getattr(task, split), code) for task in chosen for code, split in enumerate(("train", "valid", "test"))]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        images=np.concatenate([part.images.numpy().reshape(-1, *stream.shape) for part, _ in parts]),
        labels=np.concatenate([part.labels.numpy() for part, _ in parts]),
        split=np.concatenate([np.full(len(part.labels), code) for part, code in parts]),
        **more,
    )
    return f"npz:{path}"


@pytest.fixture(scope="module")
def finished(digits: Stream, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return copies of finished runs of two tasks; each is trained once."""
    home, made = tmp_path_factory.mktemp("finished"), itertools.count()
    runs: dict[Settings, Path] = {}

    def copy(settings: Settings | None = None) -> Path:
        settings = settings or tiny(tasks=2)
        if settings not in runs:
            stream = digits if settings.dataset == "digits" else load_stream(settings.dataset)
            runs[settings] = train(settings, stream, home / str(next(made)), metrics=NLL)
        return Path(shutil.copytree(runs[settings], home / str(next(made))))

    return copy


@pytest.fixture
def third(digits: Stream, tmp_path: Path) -> str:
    """The digits' third task as somebody else's file."""
    return write_npz(tmp_path / "elsewhere" / "march.npz", digits, [2])


# --- the promise ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["standard", "boo+distill", "joint"])
def test_extending_equals_training_in_one_go(method: str, digits: Stream, tmp_path: Path) -> None:
    whole = train(tiny(method=method, tasks=3), digits, tmp_path / "whole")
    parts = train(tiny(method=method, tasks=2), digits, tmp_path / "parts")
    config = (parts / "config.toml").read_bytes()
    extend(parts)
    assert_same_model(whole, parts)
    assert [e for e in events(parts) if e["event"] not in ("run", "extend")] == events(whole)[1:]
    assert (parts / "samples" / "task_02.png").read_bytes() == (whole / "samples" / "task_02.png").read_bytes()
    assert (parts / "config.toml").read_bytes() == config


@pytest.mark.parametrize("method", ["standard", "boo+distill"])
def test_the_images_may_come_from_a_file(
    method: str, digits: Stream, finished: Callable[..., Path], third: str, tmp_path: Path
) -> None:
    whole = train(tiny(method=method, tasks=3), digits, tmp_path / "whole", metrics=NLL)
    parts = extend(finished(tiny(method=method, tasks=2)), third, name="2", metrics=NLL)
    assert_same_model(whole, parts)
    assert [e for e in events(parts) if e["event"] not in ("run", "extend")] == events(whole)[1:]


@pytest.mark.parametrize("binarize", ["dynamic", "threshold"])
def test_binarised_images_too(binarize: Any, tmp_path: Path) -> None:
    stream = load_stream("digits", limit=24, binarize=binarize)
    whole = train(tiny(binarize=binarize, tasks=2), stream, tmp_path / "whole", metrics=NLL)
    parts = train(tiny(binarize=binarize, tasks=1), stream, tmp_path / "parts", metrics=NLL)
    assert_same_model(whole, extend(parts, metrics=NLL))


def test_the_event_says_what_was_learned(finished: Callable[..., Path], third: str) -> None:
    run = extend(finished(), third, metrics=NLL, command="boovae extend mine")
    kinds = [event["event"] for event in events(run) if event["event"] in ("extend", "task_start")]
    assert kinds == ["task_start", "task_start", "extend", "task_start"]
    (event,) = events(run, "extend")
    assert (event["task"], event["name"], event["source"]) == (2, "march", third)
    assert event["images"] == events(run, "task_start")[-1]["images"] == {"train": 24, "valid": 12, "test": 24}
    assert event["split"]["dataset"] == third
    made = json.loads((run / "environment.json").read_text())
    assert made["extensions"]["2"]["command"] == "boovae extend mine"


def test_extending_twice_and_moving_the_folder(
    digits: Stream, finished: Callable[..., Path], third: str, tmp_path: Path
) -> None:
    settings = tiny(method="boo+distill", tasks=2)
    whole = train(tiny(method="boo+distill", tasks=4), digits, tmp_path / "whole", metrics=NLL)
    run = extend(finished(settings), third, metrics=NLL)
    moved = Path(shutil.move(run, tmp_path / "another place"))
    extend(moved, write_npz(tmp_path / "elsewhere" / "april.npz", digits, [3]), metrics=NLL)
    assert_same_model(whole, moved)
    assert [event["name"] for event in events(moved, "task_start")] == ["0", "1", "march", "april"]
    assert events(moved, "evaluation")[-1]["nll"] == events(whole, "evaluation")[-1]["nll"]


def test_own_tasks_and_others_may_alternate(finished: Callable[..., Path], third: str) -> None:
    run = finished()
    extend(run, third, name="2")  # the name of the dataset's next task is taken
    extend(run)
    assert [event["name"] for event in events(run, "extend")] == ["2", "2 (2)"]
    last = events(run, "evaluation")[-1]
    assert last["diversity"]["classes"] == [0, 1, 2]  # classes of one name are one class
    assert all(None not in row for row in last["nll"]["per_task"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compile", ["off", "on"])
def test_extending_equals_training_in_one_go_on_a_gpu(compile: Any, digits: Stream, tmp_path: Path) -> None:
    options: dict[str, Any] = {"metrics": NLL, "device": "cuda", "compile": compile}
    whole = train(tiny(method="boo+distill", tasks=3), digits, tmp_path / "whole", **options)
    parts = train(tiny(method="boo+distill", tasks=2), digits, tmp_path / "parts", **options)
    assert_same_model(whole, extend(parts, metrics=NLL, device="cuda"))  # compiled as the run was


# --- old data that is gone ------------------------------------------------------------------------------------------


@pytest.fixture
def orphan(digits: Stream, tmp_path: Path) -> Path:
    """A run whose data has been deleted."""
    source = write_npz(tmp_path / "private" / "old.npz", digits, [0, 1])
    settings = tiny(dataset=source, method="boo+distill", tasks=None, limit=None)
    run = train(settings, load_stream(source), tmp_path / "orphan")
    shutil.rmtree(tmp_path / "private")
    return run


def test_the_old_data_may_be_gone(
    digits: Stream, orphan: Path, third: str, finished: Callable[..., Path], tmp_path: Path
) -> None:
    extend(orphan, third)
    assert_same_model(orphan, extend(finished(tiny(method="boo+distill", tasks=2)), third, metrics=NLL))
    last = events(orphan, "evaluation")[-1]
    unknown = [None, None]
    for key in ("per_task", "own", "effective_samples"):
        assert last["nll"][key][:2] == [unknown, unknown]
        assert None not in last["nll"][key][2]
    assert last["nll"]["pooled"] == unknown
    assert last["forgetting"]["own"][:2] == last["forgetting"]["pooled"][:2] == [unknown, unknown]
    assert not {"diversity", "frechet", "classifier"} & last.keys()
    (note,) = events(orphan, "note")
    assert "no images of 0, 1" in note["text"]


def test_what_is_known_later_is_measured(digits: Stream, orphan: Path, third: str, tmp_path: Path) -> None:
    extend(orphan, third)
    extend(orphan, write_npz(tmp_path / "elsewhere" / "april.npz", digits, [3]))
    last = events(orphan, "evaluation")[-1]
    assert [None in row for row in last["nll"]["own"]] == [True, True, False, False]
    assert [None in row for row in last["forgetting"]["own"]] == [True, True, False, False]


def test_eval_sample_and_report_without_the_old_data(
    orphan: Path, third: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["extend", str(orphan), "--data", third, "--quiet"])
    table = capsys.readouterr().out.splitlines()
    assert table[3].split()[:2] == ["3", "-"]
    main(["eval", str(orphan), "--quiet", "--json"])
    assert json.loads(capsys.readouterr().out) == events(orphan, "evaluation")[-1]
    main(["sample", str(orphan), "--task", "2", "--out", str(tmp_path / "new.png")])
    assert (tmp_path / "new.png").stat().st_size > 0
    page = write_report([orphan]).read_text()
    assert "march" in page
    assert "unfinished" not in page
    assert read_run(orphan).planned == 3
    assert "3,nll,2," in write_csv(orphan, tmp_path / "run.csv").read_text()
    with pytest.raises(SystemExit):
        main(["extend", str(orphan), "--quiet"])
    assert "name the new images with --data" in capsys.readouterr().err


def test_eval_without_any_image_is_refused(orphan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(orphan), "--quiet"])
    assert stop.value.code == 2
    assert "old.npz: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("fate", ["gone", "changed"])
def test_eval_when_an_extension_lost_its_images(
    fate: str, finished: Callable[..., Path], digits: Stream, third: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = extend(finished(), third)
    assert "diversity" in events(run, "evaluation")[-1]
    path = Path(third.removeprefix("npz:"))
    path.unlink()
    if fate == "changed":
        write_npz(path, digits, [3])
    main(["eval", str(run), "--json"])
    output = capsys.readouterr()
    assert "no images of march" in output.err
    event = json.loads(output.out)
    assert [None in row for row in event["nll"]["per_task"]] == [False, False, True]
    assert event["nll"]["pooled"] == [None, None]
    assert "diversity" not in event


def test_a_run_that_measured_no_nll_can_be_extended(digits: Stream, tmp_path: Path) -> None:
    run = extend(train(tiny(tasks=1), digits, tmp_path / "run", metrics=("diversity",)))
    assert events(run, "evaluation")[-1]["forgetting"]["own"] == [[None, None], [0.0, 0.0]]


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


@pytest.mark.parametrize("moment", ["save_checkpoint", "evaluate", "save_samples"])
def test_killed_at_a_bad_moment_it_ends_the_same(
    moment: str, finished: Callable[..., Path], third: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments: Any, **options: Any) -> None:
        raise Killed

    settings = tiny(method="boo+distill", tasks=2)
    whole, killed = extend(finished(settings), third, metrics=NLL), finished(settings)
    with monkeypatch.context() as patch:
        patch.setattr(boovae.run, moment, die)
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
        with pytest.raises(InputError, match="in the middle of learning 'march'"):
            extend(stopped, data, name=name, metrics=NLL)
    assert content(stopped) == before


def test_a_stopped_extension_goes_on_wherever_its_images_lie_now(
    stopped: Path, third: str, finished: Callable[..., Path], tmp_path: Path
) -> None:
    assert not read_run(stopped).finished
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
    "another size": (lambda path: odd(path, 28, 28), None, r"--data npz:.*28 x 28.*8 x 8"),
    "colours": (lambda path: odd(path, 8, 8, 3), None, r"--data npz:.*3 x 8 x 8.*images of 8 x 8"),
    "flat": (lambda path: odd(path, 64), None, r"--data npz:.*images of 64, .*8 x 8"),
    "pixels out of range": (lambda path: odd(path, 8, 8, high=255.0), None, r"--data npz:.*outside pixel_range"),
    "no images": (odd, None, r"--data npz:.*no pixels"),
    "no file": (lambda path: f"npz:{path / 'none.npz'}", None, r"--data npz:.*no such file"),
    "no dataset": (lambda path: "digist", None, r"--data digist:.*did you mean 'digits'"),
    "a name that is taken": (lambda path: None, "1", r"--name 1:.*choose another"),
    "no name": (lambda path: None, " ", r"--name"),
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
    monkeypatch.setattr(boovae.run, "CHECKPOINT_SECONDS", 0.0)

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
    assert "no run folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_all_tasks_of_the_dataset_learned(digits: Stream, tmp_path: Path) -> None:
    settings = tiny(class_order=(3, 4), tasks=None)
    run = train(settings, load_stream("digits", limit=24, class_order=(3, 4)), tmp_path / "run", metrics=NLL)
    with pytest.raises(InputError, match=r"all 2 tasks of digits are learned.*--data"):
        extend(run)


@pytest.mark.parametrize("lost", ["metrics.jsonl", "environment.json", "checkpoint"])
def test_half_a_run_folder_is_refused(lost: str, finished: Callable[..., Path]) -> None:
    run = finished()
    shutil.move(run / lost, run.with_name(f"{run.name} {lost}"))
    before = content(run)
    with pytest.raises(InputError, match=r"copy the whole run folder|no checkpoint"):
        extend(run)
    assert content(run) == before


# --- by hand --------------------------------------------------------------------------------------------------------


def test_the_command_says_what_is_carried(
    finished: Callable[..., Path], third: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tiny(method="boo+distill", tasks=2))
    held = events(run, "evaluation")[-1]["ledger"]
    main(["extend", str(run), "--data", third, "--name", "two", "--metric", "nll", "--json"])
    output = capsys.readouterr()
    assert f"carried from 2 tasks, per replica: memory {held['memory_bytes']:,} bytes" in output.err
    assert f"networks {4 * held['parameters']:,} bytes, stored images 0" in output.err
    assert json.loads(output.out) == events(run, "evaluation")[-1]
    assert "report.html" in output.err
    assert events(run, "extend")[0]["name"] == "two"


def test_a_folder_of_pictures(finished: Callable[..., Path], tmp_path: Path) -> None:
    from PIL import Image

    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "may" / name).mkdir(parents=True)
        for index in range(12):
            pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "may" / name / f"{index}.png")
    run = finished()
    for data in (tmp_path / "may", f"folder:{tmp_path / 'may'}"):
        extend(run, str(data))
    assert [event["name"] for event in events(run, "extend")] == ["may", "may (2)"]
    last = events(run, "evaluation")[-1]
    assert len(last["diversity"]["classes"]) == 4  # one task, two new classes, and the second month the same two
    assert len(last["nll"]["per_task"]) == 4
