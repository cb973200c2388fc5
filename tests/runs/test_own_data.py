"""Runs on the user's own pictures: the size and the place of the data are kept, and found again."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from boovae.cli.main import main
from boovae.data import load_stream
from boovae.errors import InputError
from boovae.runs import data
from boovae.runs.data import load_data, recorded
from boovae.runs.evaluate import evaluate_run
from boovae.runs.extend import extend
from boovae.runs.progress import Display, Lines
from boovae.runs.reading import read_record
from boovae.runs.train import train
from conftest import tiny
from run_folders import NLL, events

CLASSES = ("month_1", "month_2", "month_10")


def write_pictures(folder: Path, sides: tuple[int, int] = (10, 20), count: int = 12) -> None:
    """Write pictures of noise whose sides lie between two numbers."""
    generator = np.random.default_rng(len(folder.name))
    folder.mkdir(parents=True)
    for index in range(count):
        pixels = generator.integers(0, 256, generator.integers(*sides, 2), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"img{index}.png")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with pictures of several sizes in `pictures`."""
    for name in CLASSES:
        write_pictures(tmp_path / "pictures" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(out: str = "run", dataset: str = "folder:pictures", display: Display | None = None, **changes: Any) -> Path:
    """Train on the pictures, named by a relative path."""
    settings = tiny(**{"dataset": dataset, "tasks": None, "limit": None, "resize": "auto", "replicas": 1, **changes})
    return train(settings, load_data(settings), Path(out), metrics=NLL, display=display)


def measured(run: Path, **options: Any) -> list[Any]:
    evaluation = evaluate_run(run, metrics=NLL, display=Display(), **options)
    assert evaluation.nll is not None
    return [float(value) for value in evaluation.nll.per_task.ravel()]


def written(run: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((run / "config.toml").read_text())["data"]
    return table


# --- the size -------------------------------------------------------------------------------------------------------


def test_a_size_chosen_from_the_pictures_is_kept_and_used_for_later_ones(place: Path) -> None:
    run = trained()
    size = written(run)["resize"]
    assert tuple(size) == load_stream("folder:pictures", resize="auto").shape
    write_pictures(place / "april", sides=(40, 90))
    extend(run, "april", metrics=NLL)
    numbers = np.asarray(events(run, "evaluation")[-1]["nll"]["per_task"], float)
    assert np.isfinite(numbers).all()
    assert len(numbers) == 4
    np.testing.assert_allclose(measured(run), numbers.ravel(), rtol=1e-4)  # the old ones at that size, too


def test_new_pictures_of_another_size_are_refused_if_the_run_does_not_resize(place: Path) -> None:
    write_pictures(place / "equal" / "a", sides=(8, 9))
    run = trained(dataset="folder:equal", resize=None)
    assert "resize" not in written(run)
    write_pictures(place / "april", sides=(9, 10))
    with pytest.raises(InputError, match=r"images of 9 x 9, but this run has learned images of 8 x 8; resize them"):
        extend(run, "april", metrics=NLL)


def test_new_pictures_in_colour_are_refused_if_the_run_is_grey(place: Path) -> None:
    run = trained(resize=(8, 8))
    (place / "april").mkdir()
    for index in range(3):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(place / "april" / f"{index}.png")
    with pytest.raises(InputError, match=r"3 x 8 x 8 .* learned images of 8 x 8; give them its size and its colours"):
        extend(run, "april", metrics=NLL)


def test_the_next_task_of_data_that_moved_is_learned(place: Path) -> None:
    run = trained(tasks=2)
    (place / "pictures").rename(place / "archive")
    with pytest.raises(InputError, match=r"dataset is not available \(folder:/.*/pictures is not there; .*--moved"):
        extend(run, metrics=NLL)
    extend(run, moved=(place / "pictures", place / "archive"), metrics=NLL)
    assert events(run, "extend")[0]["name"] == "month_10"


def test_the_start_names_the_tasks_in_order_and_the_size(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(display=Lines())
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "3 tasks in order: month_1, month_2, month_10"
    assert re.fullmatch(r"pictures are resized to \d+ x \d+ \(height x width\): the median of 36 is .*", second)


def test_many_tasks_are_named_in_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(30):
        write_pictures(place / "many" / f"week_{index}", sides=(8, 9), count=3)
    settings = tiny(dataset="folder:many", tasks=None, limit=None, replicas=1, epochs=1)

    class Stopped(Display):
        def note(self, text: str) -> None:
            raise KeyboardInterrupt(text)

    with pytest.raises(KeyboardInterrupt, match=r"^30 tasks in order: week_0, week_1, .*, …, week_29$") as shown:
        train(settings, load_data(settings), Path("run"), metrics=NLL, display=Stopped())
    assert len(str(shown.value)) < 160


def test_the_same_run_is_continued_however_its_size_is_given(place: Path) -> None:
    run = trained()
    before = (run / "metrics.jsonl").read_bytes()
    trained(resize=written(run)["resize"])
    trained()
    assert (run / "metrics.jsonl").read_bytes() == before
    with pytest.raises(InputError, match=r"other settings .*resize"):
        trained(resize=(9, 9))


def test_a_network_beyond_the_memory_is_refused_before_training(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "memory_share", lambda: 600_000)
    settings = tiny(dataset="folder:pictures", resize=(16, 16), net="mlp:40", latent_dim=3, replicas=2)
    load_data(settings.changed(replicas=1))
    # 16² -> 40 -> 40 -> 2 x 3 and 3 -> 40 -> 40 -> 16², with biases; two replicas, four floats of 4 bytes for each
    weights = 257 * 40 + 41 * 40 + 2 * 41 * 3 + 4 * 40 + 41 * 40 + 41 * 256
    assert weights * 16 < 600_000 < weights * 32
    with pytest.raises(InputError, match=rf"mlp:40 has {weights:,} weights .*16 x 16 .*resize.*net"):
        load_data(settings)


# --- the place ------------------------------------------------------------------------------------------------------


def test_a_run_is_measured_from_another_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained()
    write_pictures(place / "april")
    main(["extend", str(run), "--data", "april", "--metric", "nll", "--quiet"])
    assert written(run)["dataset"] == f"folder:{place / 'pictures'}"
    assert [event["source"] for event in events(run, "extend")] == [f"folder:{place / 'april'}"]
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    assert len(measured(place / run)) == 4
    assert None not in measured(place / run)


def test_data_that_moved_are_found_in_their_new_place(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained()
    there = measured(run)
    (place / "pictures").rename(place / "archive")
    with pytest.raises(InputError) as refused:
        measured(run)
    assert f"--moved {place / 'pictures'} NEW" in str(refused.value)
    assert measured(run, moved=(place / "pictures", Path("archive"))) == there
    with pytest.raises(InputError, match="moved /nowhere: this run has learned nothing from there"):
        measured(run, moved=(Path("/nowhere"), Path("archive")))
    (place / "new").mkdir()
    (place / "archive").rename(place / "new" / "pictures")  # a folder above them has moved
    main(["eval", str(run), "--metric", "nll", "--json", "--quiet", "--moved", str(place), str(place / "new")])
    shown = json.loads(capsys.readouterr().out)["nll"]["per_task"]
    assert np.ravel(shown).tolist() == there


def test_a_run_is_continued_with_data_that_moved_but_not_with_others(place: Path) -> None:
    run = trained()
    before = (run / "metrics.jsonl").read_bytes()
    (place / "pictures").rename(place / "archive")
    trained(dataset="folder:archive")
    assert (run / "metrics.jsonl").read_bytes() == before
    for name in CLASSES:
        write_pictures(place / "others" / name, sides=(11, 12))
    with pytest.raises(InputError, match="different data than folder:others has now"):
        trained(dataset="folder:others", resize=written(run)["resize"])


@pytest.mark.parametrize("link", [False, True])
def test_the_place_is_kept_as_it_was_named(link: bool, place: Path) -> None:
    (place / "newest").symlink_to(place / "pictures")
    settings = tiny(dataset="folder:newest" if link else "folder:x/../pictures", resize="auto")
    stream = load_stream("folder:pictures", resize="auto")
    assert recorded(settings, stream).data.dataset == f"folder:{place / ('newest' if link else 'pictures')}"


def test_runs_of_earlier_versions_are_measured_and_extended(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They kept the path as it was typed, and sorted `img10` before `img2` and `month_10` before `month_2`."""
    settings = tiny(dataset="folder:pictures", limit=None, tasks=2, resize=(8, 8), replicas=1)
    run = train(settings, load_data(settings, natural=False), Path("run"), metrics=NLL)
    config = run / "config.toml"
    config.write_text(config.read_text().replace(f"folder:{place}/", "folder:"))
    assert written(run)["dataset"] == "folder:pictures"
    assert [task["name"] for task in events(run, "run")[0]["split"]["tasks"]] == ["month_1", "month_10", "month_2"]
    np.testing.assert_allclose(measured(run), np.ravel(events(run, "evaluation")[-1]["nll"]["per_task"]), rtol=1e-4)
    extend(run, metrics=NLL)
    assert events(run, "extend")[0]["name"] == "month_2"
    assert read_record(run).finished
