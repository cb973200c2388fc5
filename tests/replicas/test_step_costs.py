"""The script that times a step of every method."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import methods
from boovae.methods import make_method


def test_steps_are_timed_and_compared_with_standard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split("--methods standard replay --replicas 1 --images 250 --tasks 2 3 --device cpu")
    monkeypatch.setattr("sys.argv", ["methods.py", *words, "--out", str(tmp_path / "steps.json")])
    methods.main()
    steps = json.loads((tmp_path / "steps.json").read_text())["ms"]
    assert steps.keys() == {"standard", "replay"}
    assert all(times.keys() == {"2", "3"} and min(times.values()) > 0 for times in steps.values())
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("standard  "))
    assert row.split()[-1] == "1.00"


def test_every_timed_method_is_one() -> None:
    for method in methods.METHODS:
        for dataset in methods.SHAPES:
            make_method(methods.settings_of(method, dataset, replicas=1))
