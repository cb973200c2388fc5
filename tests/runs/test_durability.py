"""A disk that is full, a folder that is read-only or gone, a process that holds it: a clear end, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import boovae
import boovae.runs.train
from boovae.cli.main import main
from boovae.data import Stream
from boovae.errors import InputError, RunError
from boovae.files import write_file
from boovae.runs.run import Run
from boovae.runs.train import train
from boovae.training.checkpoint import load_checkpoint
from boovae.training.events import Event
from boovae.training.trainer import Trainer
from conftest import Killed, tiny
from kills import difference
from run_folders import NLL, events, write_csv

SOURCE = str(Path(boovae.__file__).parents[1])
# A network so small that its checkpoints stay smaller than the log.
TRAIN = "train --net mlp:4 --latent-dim 2 --limit 24 --tasks 3 --epochs 20 --batch-size 8 --method standard --quiet"
WORDS = [*TRAIN.split(), "--samples", "20", "--metric", "nll"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse to write beyond so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def whole(digits: Stream, tmp_path: Path) -> Path:
    return train(tiny(), digits, tmp_path / "whole", metrics=NLL)


def test_a_disk_that_fills_up_ends_the_run_and_the_rest_is_done_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, full = tmp_path / "whole", tmp_path / "full"
    main([*WORDS, "--out", str(whole)])
    log = (whole / "metrics.jsonl").stat().st_size
    done: list[int] = []
    for share in (0.6, 0.9):
        with largest_file(int(share * log)), pytest.raises(SystemExit) as stop:
            main([*WORDS, "--out", str(full)])
        assert stop.value.code == 1
        error = capsys.readouterr().err
        assert os.strerror(errno.EFBIG) in error
        assert "intact" in error or "as it was" in error
        assert "Traceback" not in error
        checkpoint = load_checkpoint(full / "checkpoint")
        assert checkpoint is not None
        done.append(len(checkpoint[1]["sizes"]))
    assert done == [1, 2]
    main([*WORDS, "--out", str(full)])
    assert difference(whole, full) == ""


def inside_a_namespace(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script where it may mount file systems; skips where nobody may."""
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = [*words, f"mount -t tmpfs none {folder}"]
    if shutil.which("unshare") is None or subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    environment = os.environ | {"PYTHONPATH": SOURCE}
    return subprocess.run([*words, script], env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_real_file_system_that_is_full_and_then_read_only(tmp_path: Path) -> None:
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    command = f"{sys.executable} -m boovae {' '.join(WORDS)} --out {disk}/run"
    done = inside_a_namespace(
        f"mount -t tmpfs -o size=48k none {disk}; {command}; echo first $?; cp -r {disk}/run {saved}; "
        f"mount -o remount,ro {disk}; {command}; echo second $?",
        disk,
    )
    assert "first 1" in done.stdout
    assert "second 2" in done.stdout
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert os.strerror(errno.EROFS) in done.stderr
    assert "Traceback" not in done.stderr
    main([*WORDS, "--out", str(saved)])
    main([*WORDS, "--out", str(tmp_path / "whole")])
    assert difference(tmp_path / "whole", saved) == ""


def test_a_folder_that_vanishes_ends_the_run_and_is_not_begun_anew(
    whole: Path, digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"

    def vanish(run: Run, trainer: Trainer, event: Event) -> None:
        if trainer.tasks_done == 1 and trainer.epoch == 2:
            shutil.move(run.folder, elsewhere)
            run.folder.mkdir()  # the place where a disk was mounted

    with monkeypatch.context() as patch:
        patch.setattr(Run, "epoch", vanish)
        with pytest.raises(RunError, match="No such file"):
            train(tiny(), digits, run, metrics=NLL)
    assert list(run.iterdir()) == []
    train(tiny(), digits, elsewhere, metrics=NLL)
    assert difference(whole, elsewhere) == ""


def test_files_and_folders_are_synced_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, Path.replace

    def noted_sync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append("folder" if name.is_dir() else "file")
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    write_file(tmp_path / "file", b"content")
    assert done == ["file", "rename", "folder"]
    done.clear()
    write_file(tmp_path / "new" / "folder" / "file", b"content")
    assert done == ["folder", "folder", "file", "rename", "folder"]  # the new folders are in theirs, too


def test_a_torn_line_of_wall_times_does_not_spoil_the_next(finished: Callable[..., Path], digits: Stream) -> None:
    run = finished()
    with (run / "timing.jsonl").open("ab") as file:
        file.write(b'{"event": "ta')
    with Run.open(run) as opened:
        opened.timing({"event": "task", "task": 9})
    tasks = [json.loads(line)["task"] for line in (run / "timing.jsonl").read_text().splitlines()]
    assert tasks == [0, 1, 9]


def test_a_task_that_was_timed_twice_counts_once(finished: Callable[..., Path], tmp_path: Path) -> None:
    run = finished()
    (run / "timing.jsonl").unlink()
    with Run.open(run) as opened:
        for task in (0, 1, 1):  # killed before its checkpoint, a task is evaluated and timed again
            opened.timing({"event": "task", "task": task, "train_seconds": 7.0, "evaluate_seconds": 2.0, "steps": 1})
    assert "# seconds: train 14.0, evaluate 4.0\n" in write_csv(run, tmp_path / "run.csv").read_text()


def test_what_a_killed_write_left_is_removed(finished: Callable[..., Path], digits: Stream) -> None:
    run = finished()
    for name in (".components.json.12ab.tmp", "samples/.task_00.png.12ab.tmp"):
        (run / name).write_bytes(b"half")
    train(tiny(tasks=2), digits, run, metrics=NLL)
    assert list(run.rglob("*.tmp")) == []


def test_a_shorter_log_than_the_checkpoint_says_is_refused(finished: Callable[..., Path], digits: Stream) -> None:
    run = finished()
    content = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(content[:-10])
    with pytest.raises(InputError, match="shorter than the checkpoint says"):
        train(tiny(tasks=2), digits, run, metrics=NLL)
    assert (run / "metrics.jsonl").read_bytes() == content[:-10]


def test_a_real_divergence_survives_kills(harmless_kills: Callable[..., int], tmp_path: Path) -> None:
    """A learning rate that no network stands: replicas go back, slow down and are given up, killed or not."""
    settings = tiny(tasks=2, epochs=6, learning_rate=1e20, batch_size=1)  # several blocks in an epoch
    lives = iter(lambda: 3, None)
    assert harmless_kills(settings, lives) >= 2
    retries = [event["retry"] for event in events(tmp_path / "whole", "divergence") if event["task"] == 0]
    assert retries == [1, 1, 2, 2, "frozen", "frozen"]


# --- two processes --------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from boovae.files import hold_folder
hold_folder(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_holds_while_its_process_lives_and_not_longer(
    finished: Callable[..., Path], digits: Stream, tmp_path: Path
) -> None:
    run = finished()
    words = [sys.executable, "-c", HOLDER, str(run)]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": SOURCE})
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="in use by another process"):
            train(tiny(tasks=2), digits, run, metrics=NLL)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (run / ".lock").exists()  # a stale one: nobody holds it
    train(tiny(tasks=2), digits, run, metrics=NLL)


def test_a_run_that_another_process_made_meanwhile_is_not_overwritten(
    finished: Callable[..., Path], tmp_path: Path
) -> None:
    run = finished()
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="already holds a run"):
        Run.create(run, tiny(tasks=2), {})
    assert (run / "metrics.jsonl").read_bytes() == before
    with Run.open(run):  # and the refusal has let go of the folder
        pass


def test_killed_before_the_settings_are_written_a_run_begins_anew(
    whole: Path, digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*of_settings: object) -> str:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("boovae.runs.run.to_toml", die)
        with pytest.raises(Killed):
            train(tiny(), digits, tmp_path / "run", metrics=NLL)
    train(tiny(), digits, tmp_path / "run", metrics=NLL)
    assert difference(whole, tmp_path / "run") == ""
