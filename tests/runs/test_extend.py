"""One more task from the checkpoint alone: the same model as in one go, whatever has become of the old data."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boovae.cli.main import main
from boovae.data import Stream, load_stream
from boovae.runs.extend import extend
from boovae.runs.reading import read_record
from boovae.runs.train import train
from conftest import tiny
from run_folders import NLL, assert_same_model, events, write_csv, write_npz, write_report

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
    numbers = events(orphan, "evaluation")[-1]["nll"]["per_task"]
    assert numbers[:2] == [[None] * 2] * 2  # their images are gone
    assert table[3].startswith(f"3           {statistics.fmean(numbers[2]):.2f} ± ")
    assert "(of one task)" in table[3]
    main(["eval", str(orphan), "--quiet", "--json"])
    assert json.loads(capsys.readouterr().out) == events(orphan, "evaluation")[-1]
    (*_, name) = [event["name"] for event in events(orphan, "task_start")]
    for number, task in enumerate(("2", name)):
        main(["sample", str(orphan), "--task", task, "--out", str(tmp_path / f"{number}.png")])
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()
    page = write_report([orphan]).read_text()
    assert "march" in page
    assert "unfinished" not in page
    assert read_record(orphan).planned == 3
    assert "3,nll,2," in write_csv(orphan, tmp_path / "run.csv").read_text()
    with pytest.raises(SystemExit):
        main(["extend", str(orphan), "--quiet"])
    assert "name the new images with --data" in capsys.readouterr().err


def test_eval_without_any_image_is_refused(orphan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(orphan), "--quiet"])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / 'private' / 'old.npz'} is not there" in told
    assert f"--moved {tmp_path / 'private' / 'old.npz'} NEW" in told


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
