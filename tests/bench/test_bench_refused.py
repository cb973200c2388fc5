"""What the command line of a bench refuses before the first cell begins: one line, exit code 2, no folder made."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from bench_parts import request
from boovae.bench import executors
from boovae.bench import studies as bench
from boovae.cli.main import main
from boovae.errors import InputError


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line that a bench of the digits says of these words."""
    places = ["--out", str(folder / "cells"), "--results", str(folder / "results")]
    with pytest.raises(SystemExit) as left:
        main(["bench", "paper", "--datasets", "digits", "--quiet", *places, *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert not list(folder.iterdir())
    return line


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--address", "127.0.0.1:6379"], "--address is for --executor ray; add it, or leave --address out"),
        (["--partition", "gpu"], "--partition is for --executor slurm; add it, or leave --partition out"),
        (["--minutes", "60", "--executor", "ray"], "--minutes is for --executor slurm"),
        (["--minutes", "0", "--executor", "slurm"], "--minutes is 0; it must be above 0"),
        (["--gpus", "0"], "--gpus is 0.0; it must be above 0"),
        (["--workers", "-1"], "--workers is -1; it must be above 0"),
    ],
)
def test_flags_of_another_executor_and_numbers_without_sense(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in refusal(tmp_path, capsys, *words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--device", "tpu"], "--device tpu is unknown; use auto, cpu or cuda"),
        (["--device", "tpu", "--executor", "slurm"], "--device tpu is unknown; use auto, cpu or cuda"),
        (["--device", "cuda"], "no CUDA device is available here; use --device cpu"),
        (["--datasets", "npz:/nope.npz"], "npz:/nope.npz: no such file; check the path"),
        (["--datasets", "digits", "folder:/nope"], "folder:/nope: no such folder; check the path"),
        (["--datasets", "npz:"], "npz:.: no such file; check the path"),
        (["--data-dir", "/nope"], "--data-dir /nope: no such folder"),
    ],
)
def test_devices_and_data_that_are_not_there(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert complaint in refusal(tmp_path, capsys, *words)


def test_a_cluster_may_have_devices_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    elsewhere = request(Path(), executor="ray", device="cuda:3")
    bench._check_places(elsewhere)
    with pytest.raises(InputError, match="no CUDA device is available here"):
        bench._check_places(dataclasses.replace(elsewhere, executor="local"))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "127.0.0.1:99999"])
def test_an_address_where_nobody_listens_is_told_at_once(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match=r"address .* no Ray cluster answers .*HOST:PORT.*leave address out"):
        executors._check_listening(address)
    assert time.monotonic() - began < 2 * executors.CONNECT


@pytest.mark.parametrize("address", [None, "auto", "local", "cloud://name/part:1"])
def test_addresses_of_other_forms_are_left_to_ray(address: str | None) -> None:
    executors._check_listening(address)
