"""The reduced drill, and that it would notice a loss."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import boovae
import drill
import soak
from conftest import tiny
from kills import MOMENTS, RUNS, difference

ROOT = Path(__file__).parents[1]


def test_the_reduced_drill_ends_without_a_loss(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(boovae.__file__).parents[1])}
    words = [sys.executable, str(ROOT / "benchmarks" / "drill.py"), "--reduced", "--keep", str(tmp_path / "drill")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("kills survived", "identical", "0 crashed", "refused", "as documented", "leak", "0 losses"):
        assert row in done.stdout


def test_the_whole_drill_kills_at_least_fifty_times_at_every_moment() -> None:
    assert drill.FULL.kills >= 50
    assert set(drill.FULL.runs) == set(RUNS)
    assert {"component", "evaluation", "write"} <= MOMENTS.keys()
    assert drill.FULL.tasks == 200


def test_every_difference_between_two_runs_is_named(finished: Callable[..., Path]) -> None:
    settings = tiny(method="boo", tasks=2)
    whole, other = finished(settings), finished(settings)
    assert difference(whole, other) == ""
    newest = max((other / "checkpoint").glob("*.safetensors"), key=lambda path: int(path.stem))
    for path in (newest, other / "metrics.jsonl", other / "samples" / "task_01.png", other / "components.json"):
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert ("checkpoint (tensors)" if path == newest else path.name) in difference(whole, other)
        path.write_bytes(good)
    record = json.loads(newest.with_suffix(".json").read_bytes())
    record["record"]["task_steps"] += 1
    newest.with_suffix(".json").write_text(json.dumps(record))
    assert "record" in difference(whole, other)
    shutil.rmtree(other / "samples")
    (other / ".metrics.jsonl.12ab.tmp").touch()
    assert "samples/task_00.png" in difference(whole, other)
    assert ".tmp" in difference(whole, other)


def test_a_process_that_dies_is_a_loss(tmp_path: Path) -> None:
    assert drill.alone(os._exit, 7) == "exit code 7"
    assert drill.alone(len, "three") == 5


def test_a_leak_and_a_slow_task_are_noticed() -> None:
    tasks = 100
    flat, steady = [2**28] * tasks, [0.1] * tasks

    def result(resident: list[int] = flat, seconds: list[float] = steady, kept: int = 0) -> soak.Soak:
        return soak.Soak("standard", tasks, resident, [0] * tasks, seconds, kept, [0] * tasks)

    assert result().problem == ""
    leaking = [2**28 + 2**18 * task for task in range(tasks)]
    assert "leak" in result(leaking).problem
    assert result(leaking, kept=2**18 * tasks).problem == ""  # that much the method keeps
    assert "times as long" in result(seconds=[0.1 + 0.01 * task for task in range(tasks)]).problem
