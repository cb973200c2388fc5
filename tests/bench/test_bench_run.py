"""Running the cells of a bench: skipped, resumed, lost, failed, in use elsewhere, no space left."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import boovae.runs.train
from bench_parts import GIVEN, Inline, job_of, request
from boovae.bench import executors
from boovae.bench import scheduler as matrix_module
from boovae.bench import studies as bench
from boovae.bench.cells import Cell, plan
from boovae.bench.executors import Executor, Handle, Local, Slurm
from boovae.bench.results import read_summary, summary_path
from boovae.bench.scheduler import Board, Matrix
from boovae.bench.worker import Answer, Job, lock_of, work
from boovae.cli.main import main
from boovae.errors import RunError
from boovae.metrics.schema import to_json
from conftest import with_kills

METHODS = ("standard", "ewc")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_module, "LOOK", 0.01)
    monkeypatch.setattr(matrix_module, "BUSY", 0.05)


def cells(*methods: str) -> list[Cell]:
    return plan(["digits"], methods or METHODS, GIVEN, 2)


def run(planned: list[Cell], folder: Path, executor: Executor, board: Board | None = None) -> Matrix:
    folder.mkdir(exist_ok=True)
    matrix = Matrix(planned, folder, executor, lambda cell: job_of(cell, folder), board or Board(folder))
    matrix.run()
    return matrix


def failing(label: str, answer: Answer, times: int = 10) -> Inline:
    left = itertools.count(times, -1)
    return Inline(lambda job: answer if job["label"] == label and next(left) > 0 else None)


def numbers(folder: Path, planned: list[Cell]) -> list[object]:
    summaries = [read_summary(folder, cell) for cell in planned]
    return [summary and [to_json(each) for each in summary["evaluations"]] for summary in summaries]


@pytest.mark.parametrize(
    ("share", "at_once"), [(None, 2), (1.0, 2), (0.6, 2), (0.5, 4), (0.34, 6), (0.4, 4), (0.25, 8), (0.1, 20)]
)
def test_no_gpu_is_given_away_more_than_once(
    share: float | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "_places", lambda device: ["0", "1"])
    assert Local(request(Path(), gpus=share), 100).slots == at_once


def test_finished_cells_are_skipped(tmp_path: Path) -> None:
    first, second = Inline(), Inline()
    assert run(cells(), tmp_path, first).failed == {}
    assert first.done == list(METHODS)
    run(cells(), tmp_path, second)
    assert second.done == []
    run(cells("standard", "ewc", "si"), tmp_path, second)
    assert second.done == ["si"]


def test_a_failed_cell_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    broken = failing("standard", {"state": "failed", "error": "out of luck"})
    assert run(cells(), tmp_path, broken).failed == {"digits standard": "out of luck"}
    assert [summary is None for summary in numbers(tmp_path, cells())] == [True, False]


def test_a_failed_cell_is_told_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boovae.runs.train, "train", None)  # every worker fails by itself
    (cell,) = cells("standard")
    (error,) = run([cell], tmp_path, Inline()).failed.values()
    assert error.endswith(f"; see {tmp_path / cell.name}.log")


def test_a_worker_tells_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def burst(*arguments: object, **options: object) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(boovae.runs.train, "train", burst)
    (cell,) = cells("standard")
    assert work(job_of(cell, tmp_path)) == {"state": "failed", "error": "MemoryError: too large"}
    assert "MemoryError" in (tmp_path / f"{cell.name}.log").read_text()


def test_a_lost_cell_runs_again_but_not_for_ever(tmp_path: Path) -> None:
    once = failing("standard", {"state": "lost", "error": "gone"}, times=1)
    assert run(cells(), tmp_path / "once", once).failed == {}
    assert once.done == ["standard", "standard", "ewc"]
    always = failing("standard", {"state": "lost", "error": "gone"})
    assert run(cells(), tmp_path / "always", always).failed == {"digits standard": "gone"}
    assert always.done.count("standard") == matrix_module.LIVES + 1


def test_a_cell_that_gets_further_with_every_worker_goes_on(tmp_path: Path) -> None:
    (cell,) = cells("standard")
    log, jobs = tmp_path / cell.name / "metrics.jsonl", itertools.count(1)

    def cut_off(job: Job) -> Answer | None:  # as a time limit of Slurm does
        if (number := next(jobs)) > 3 * matrix_module.LIVES:
            shutil.rmtree(log.parent)
            return None
        log.parent.mkdir(exist_ok=True)
        log.write_text("." * number)
        return {"state": "lost", "error": "time limit"}

    assert run([cell], tmp_path, Inline(cut_off)).failed == {}


def test_a_cell_that_another_process_has_is_waited_for_and_never_run_twice(tmp_path: Path) -> None:
    planned = cells()
    held = lock_of(tmp_path, planned[0].name)
    held.acquire()

    class Noticing(Board):
        def note(self, text: str) -> None:
            if "another process" in text:
                notes.append(text)

        def finished(self, cell: Cell) -> None:  # the other process ends when ours has done the other cell
            if held.is_locked:
                summary_path(tmp_path, planned[0].name).write_text((elsewhere / f"{planned[0].name}.json").read_text())
                held.release()

    elsewhere, notes = tmp_path / "elsewhere", list[str]()
    run(planned[:1], elsewhere, Inline())
    executor = Inline(slots=2)
    run(planned, tmp_path, executor, Noticing(tmp_path))
    assert executor.done == ["ewc"]
    assert len(notes) == 1
    assert all(numbers(tmp_path, planned))


def test_a_worker_leaves_a_cell_that_is_taken(tmp_path: Path) -> None:
    (cell,) = cells("standard")
    with lock_of(tmp_path, cell.name):
        assert work(job_of(cell, tmp_path)) == {"state": "busy", "error": ""}
    assert read_summary(tmp_path, cell) is None


def test_no_space_left_stops_the_bench_with_finished_cells_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = cells("standard", "ewc", "si")

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill(job: Job) -> None:
        if job["label"] == "ewc":
            monkeypatch.setattr("boovae.runs.run.save_checkpoint", full)

    executor = Inline(fill)
    with pytest.raises(RunError, match=r"No space left.*finished cells.*are intact"):
        run(planned, tmp_path, executor)
    assert executor.done == ["standard", "ewc"]
    assert [summary is None for summary in numbers(tmp_path, planned)] == [False, True, True]
    monkeypatch.undo()
    run(planned, tmp_path, Inline())
    assert all(numbers(tmp_path, planned))


def test_a_bench_that_dies_again_and_again_ends_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = cells("standard", "boo")
    run(planned, tmp_path / "calm", Inline())
    lives = itertools.chain((2, 3, 5), itertools.repeat(10**6))
    assert with_kills(lambda: run(planned, tmp_path / "killed", Inline()), monkeypatch, lives) == 3
    assert numbers(tmp_path / "killed", planned) == numbers(tmp_path / "calm", planned)


def test_the_board_counts_tasks_and_says_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    planned = cells("standard", "ewc", "joint")
    board = Board(tmp_path)
    board.begin(planned, planned[1:])
    assert (board.done, board.total, board.seconds_left) == (2, 6, None)
    samples = tmp_path / planned[1].name / "samples"
    samples.mkdir(parents=True)
    (samples / "task_00.png").touch()
    clock[0] += 10
    board.show([planned[1]])
    assert (board.done, board.seconds_left) == (3, 30.0)
    assert board.counted == "1 of 3 cells, 3 of 6 tasks, about 30.0 s left"
    board.failed(planned[2], "out of luck")
    assert board.seconds_left == 10.0  # nobody will do its two tasks


class GoneError(Exception):
    """A worker that was lost."""


class BrokenError(GoneError):
    """Work that has failed, which submitit counts among the lost jobs."""


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (GoneError("time limit\nlog"), {"state": "lost", "error": "GoneError: time limit"}),
        (BrokenError("trace\nout of luck"), {"state": "failed", "error": "out of luck"}),
    ],
)
def test_work_that_failed_on_a_cluster_is_told_from_a_lost_worker(error: Exception, answer: Answer) -> None:
    def result() -> Answer:
        raise error

    assert Handle(lambda: True, result, lambda: None, failed=BrokenError, lost=GoneError).poll() == answer
    assert Handle(lambda: False, result, lambda: None, failed=BrokenError, lost=GoneError).poll() is None


def test_slurm_jobs_do_the_same(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    planned = cells("standard")
    assert run(planned, tmp_path, Slurm(request(tmp_path, out=tmp_path, device="cpu"), 1, "debug")).failed == {}
    assert all(numbers(tmp_path, planned))


@pytest.mark.slow
def test_slurm_jobs_that_are_killed_run_again(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    planned = cells("standard", "boo")
    executor = Slurm(request(tmp_path, out=tmp_path, device="cpu"), 2, "local")
    killed: list[int] = []

    class Killing(Board):
        def show(self, running: list[Cell]) -> None:  # type: ignore[override]
            if not killed and (tmp_path / planned[1].name / "config.toml").exists():
                job = matrix._running[planned[1]].result.__self__  # type: ignore[attr-defined]
                killed.append(int(job.job_id))
                os.kill(int(job.job_id), signal.SIGKILL)

    matrix = Matrix(planned, tmp_path, executor, lambda cell: job_of(cell, tmp_path), Killing(tmp_path))
    matrix.run()
    assert killed
    assert matrix.failed == {}
    assert all(numbers(tmp_path, planned))


def command(folder: Path, config: Path, *more: str) -> subprocess.Popen[str]:
    words = ["bench", "paper", "--datasets", "digits", "--methods", *METHODS, "--tasks", "2", "--replicas", "2"]
    words += ["--config", str(config), "--out", str(folder / "cells"), "--results", str(folder / "results")]
    program = [sys.executable, "-m", "boovae", *words, *more, "--json", "--device", "cpu"]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write_config(path: Path) -> Path:
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in GIVEN.items() if name != "replicas")
    path.write_text("".join(lines))
    return path


def test_the_command_runs_cells_as_processes_and_prints_what_came_of_them(tmp_path: Path) -> None:
    output, messages = command(tmp_path, write_config(tmp_path / "tiny.toml")).communicate(timeout=240)
    outcome = json.loads(output)
    assert (outcome["study"], outcome["cells"], outcome["failed"]) == ("paper", 2, {})
    assert "2 of 2 cells, 4 of 4 tasks" in messages
    for name in (
        "digits.csv",
        "nll.csv",
        "nll.md",
        "diversity.md",
        "differences.csv",
        "report.html",
        "digits_curves.svg",
    ):
        assert (tmp_path / "results" / name).stat().st_size > 0


def test_records_beside_the_results_are_all_that_another_machine_needs(tmp_path: Path) -> None:
    config, here, there = write_config(tmp_path / "tiny.toml"), tmp_path / "here", tmp_path / "there"
    command(here, config).communicate(timeout=240)
    shutil.copytree(here / "results" / "cells", there / "cells")
    output, _ = command(there, config, "--only-tables").communicate(timeout=240)
    assert json.loads(output)["missing"] == []
    for name in ("nll.csv", "diversity.csv", "digits_samples.png", "digits_curves.svg"):
        assert (there / "results" / name).read_bytes() == (here / "results" / name).read_bytes()


def test_failed_cells_are_named_and_the_exit_code_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_run", lambda *rest: {"digits ewc": "out of luck"})
    words = ["bench", "paper", "--datasets", "digits", "--methods", "ewc", "--json"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--out", str(tmp_path / "cells"), "--results", str(tmp_path / "results")])
    assert left.value.code == 1
    output = capsys.readouterr()
    assert "1 of 1 cells failed, so there are no tables" in output.err
    assert "digits ewc: out of luck" in output.err
    assert json.loads(output.out)["failed"] == {"digits ewc": "out of luck"}
    assert not (tmp_path / "results" / "nll.md").exists()  # empty ones would replace good ones


def test_finished_cells_of_other_images_are_not_taken_for_those_of_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "paper", "--methods", "standard", "--tasks", "1", "--replicas", "1", "--device", "cpu", "--quiet"]
    words += ["--datasets", f"npz:{tmp_path / 'mine.npz'}", "--config", str(write_config(tmp_path / "tiny.toml"))]
    words += ["--workers", "1", "--out", str(tmp_path / "cells"), "--results", str(tmp_path / "results")]
    for seed in (0, 0, 1):
        images = np.random.default_rng(seed).integers(0, 255, (40, 8, 8), dtype=np.uint8)
        np.savez(tmp_path / "mine.npz", images=images, labels=np.repeat([0, 1], 20))
        if seed == 0:
            main(words)
    with pytest.raises(SystemExit):
        main(words)
    assert "have changed since this cell was finished" in capsys.readouterr().err


def working(folder: Path, *more: str) -> tuple[subprocess.Popen[str], Path]:
    """Return a bench whose cells would take minutes, and the folder of its cells; one of them is being trained."""
    config = write_config(folder / "long.toml")
    config.write_text(re.sub(r"epochs = .*", "epochs = 100000", config.read_text()))
    process, out = command(folder, config, "--workers", "1", *more), folder / "cells"
    wait_until(lambda: any("epoch" in log.read_text() for log in out.glob("*.log")))
    return process, out


def wait_until(happened: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("numbers", [[signal.SIGTERM] * 2, [signal.SIGINT] * 2, [signal.SIGINT, signal.SIGTERM]])
def test_a_bench_that_is_stopped_twice_says_where_everything_is(numbers: list[signal.Signals], tmp_path: Path) -> None:
    process, out = working(tmp_path)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.1)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 1
    assert messages.splitlines()[-1] == f"boovae: stopped; everything is in {out}: the same command continues it"
    (log,) = out.glob("*.log")
    wait_until(lambda: "stopped; everything is in" in log.read_text())
    assert "Traceback" not in log.read_text()


def test_a_worker_whose_bench_is_gone_ends_without_an_error(tmp_path: Path) -> None:
    (cell,) = cells("standard")
    words = [sys.executable, "-m", "boovae.bench.worker", json.dumps(job_of(cell, tmp_path))]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert read_summary(tmp_path, cell) is not None


@pytest.mark.slow
def test_killed_at_any_moment_and_started_again_the_table_is_the_same(tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.toml")
    assert json.loads(command(tmp_path / "calm", config).communicate(timeout=240)[0])["failed"] == {}
    for seconds in (4.0, 6.0):
        process = command(tmp_path / "killed", config)
        time.sleep(seconds)
        process.kill()  # its workers go on and hold their cells
        process.communicate()
    assert json.loads(command(tmp_path / "killed", config).communicate(timeout=240)[0])["failed"] == {}
    for name in ("nll.csv", "diversity.csv"):
        assert (tmp_path / "killed/results" / name).read_text() == (tmp_path / "calm/results" / name).read_text()
