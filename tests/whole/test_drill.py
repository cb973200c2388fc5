"""The reduced drill, and that it would notice a loss."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

import boovae
import drill
import fuzz_requests
import soak
import two_at_once
from boovae.training.checkpoint import load_checkpoint
from conftest import tiny
from kills import MOMENTS, RUNS, SMALL, Killer, difference

ROOT = Path(__file__).parents[2]


def test_the_reduced_drill_ends_without_a_loss(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(boovae.__file__).parents[1])}
    words = [sys.executable, str(ROOT / "benchmarks" / "drill.py"), "--reduced", "--keep", str(tmp_path / "drill")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("kills survived", "identical", "0 crashed", "refused", "as documented", "leak", "0 losses"):
        assert row in done.stdout
    assert re.search(r"fuzzed requests: 300 \(.*\); 0 failures", done.stderr)
    assert re.search(r"two processes at once: 4 \(2 downloads, 2 classifiers.*\); 1[0-2] good files", done.stderr)


def test_the_whole_drill_kills_at_least_fifty_times_at_every_moment() -> None:
    assert drill.FULL.kills >= 50
    assert set(drill.FULL.runs) == set(RUNS)
    assert {"component", "evaluation", "write"} <= MOMENTS.keys()
    assert drill.FULL.tasks == 200
    assert drill.FULL.requests >= 10_000
    assert drill.FULL.bench_kills


def test_every_moment_of_a_kill_is_a_place_in_the_program() -> None:
    code = "import kills; [stop(number, print) for stop in kills.MOMENTS.values() for number in range(3)]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", check=True, timeout=60)


def test_a_run_that_is_killed_in_an_evaluation_has_kept_some_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer, out = Killer(tmp_path), tmp_path / "run"
    monkeypatch.setattr(killer.random, "randint", lambda low, high: 3)
    words = ["train", *SMALL.split(), "--method", "standard", "--epochs", "2", "--metric", "nll", "--out", str(out)]
    assert killer.run(words, tmp_path / "output.txt", "evaluation") == -signal.SIGKILL
    loaded = load_checkpoint(out / "checkpoint")
    assert loaded is not None
    assert [tally["done"] > 0 for tally in loaded[1]["tally"].values()] == [True]


def test_parts_and_their_size_can_be_chosen() -> None:
    words = shlex.split("--reduced --only kills soak --runs 'boo, paper' vcl --kills 20 --tasks 60 --seconds 30")
    plan, arguments = drill.planned([*words, "--device", "cuda", "--compile", "off"])
    assert arguments.only == ["kills", "soak"]
    expected = dataclasses.replace(drill.REDUCED, device="cuda", compile="off", kills=20, tasks=60, seconds=30.0)
    assert plan == dataclasses.replace(expected, runs=("boo, paper", "vcl"))
    assert drill.planned([])[0] == drill.FULL


@pytest.mark.parametrize("package", ["fastapi", "httpx2"])
def test_a_part_that_cannot_be_tried_is_a_loss(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    sheet = drill.drill(drill.REDUCED, tmp_path, only=["requests"])
    assert [row[2] for row in sheet.rows] == ["not tried, 1 LOST"]
    assert f"{package} is not installed: pip install" in sheet.losses[0]


def test_an_answer_of_the_servers_own_fault_is_a_failure() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/api/model":
            return httpx2.Response(200, json={"latent_dim": 4})
        if request.url.path == "/api/look":
            raise httpx2.RemoteProtocolError("the server hung up")
        return httpx2.Response(500 if request.url.path == "/api/path" else 404)

    with httpx2.Client(transport=httpx2.MockTransport(answer), base_url="http://127.0.0.1") as client:
        tried, statuses, failures = fuzz_requests.fuzz(client, 100)
    assert tried == 100
    assert statuses[500] > 5
    assert len(failures) - statuses[500] > 5
    assert any("hung up" in failure for failure in failures)


def test_a_bad_file_of_one_of_two_processes_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def race(name: str, cache: Path, address: str, processes: int, kill_after: float | None = None) -> Any:
        return ["torn" if processes == 2 and cache.name == "2" else "whole"] * processes, 0.1

    monkeypatch.setattr(two_at_once, "_race", race)
    outcome = two_at_once.two_at_once(tmp_path, rounds=3)
    assert len(outcome.losses) == 4
    assert (outcome.good, outcome.killed) == (14, 2)


def test_a_soak_whose_time_is_up_says_how_far_it_came() -> None:
    found = soak.soak("standard", 60, limit=0.0)
    assert found.tasks == soak.FEWEST == len(found.resident) == len(found.seconds)
    assert found.leak < 2**20


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
