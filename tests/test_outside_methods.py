"""A method in a file of its own: every command knows it once `BOOVAE_METHODS` names the file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench_parts import GIVEN
from boovae.errors import InputError
from boovae.methods import make_method
from conftest import tiny

PAGE = Path(__file__).parents[1] / "docs" / "adding-a-method.md"


@pytest.fixture
def anchor(tmp_path: Path) -> Path:
    """The method of the page, as a reader would save it."""
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    path = tmp_path / "anchor.py"
    path.write_text(f"from boovae.run import train  # a file may import what it likes\n{match.group(1)}")
    return path


def boovae(*words: str, methods: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BOOVAE_METHODS": str(methods)}
    return subprocess.run(
        [sys.executable, "-m", "boovae.cli", *words], env=environment, capture_output=True, text=True, check=False
    )


def test_it_is_listed_and_workers_of_a_bench_train_it(anchor: Path, tmp_path: Path) -> None:
    assert "keeps the decoder" in boovae("methods", methods=anchor).stdout
    config = tmp_path / "tiny.toml"
    config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in GIVEN.items() if name != "replicas"))
    words = ["bench", "paper", "--datasets", "digits", "--methods", "boo+anchor", "--tasks", "2", "--replicas", "2"]
    words += ["--config", str(config), "--out", str(tmp_path / "cells"), "--results", str(tmp_path / "results")]
    ended = boovae(*words, "--json", "--device", "cpu", methods=anchor)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["failed"] == {}
    assert "boo+anchor,2,nll" in (tmp_path / "results" / "digits.csv").read_text()
    with pytest.raises(InputError, match="BOOVAE_METHODS"):  # this process does not know it
        make_method(tiny(method="boo+anchor"))


def test_a_changed_file_asks_for_its_cells_anew(anchor: Path) -> None:
    program = "from boovae.experiments.grid import plan\n"
    program += "print(*(cell.name for cell in plan(['digits'], ['boo', 'boo+anchor'], {}, 2)))"

    def names() -> list[str]:
        environment = {**os.environ, "BOOVAE_METHODS": str(anchor)}
        return subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).split()

    before = names()
    assert names() == before
    anchor.write_text(anchor.read_text().replace("100 * drift", "200 * drift"))
    after = names()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    ended = boovae("methods", methods=tmp_path / "mistyped.py")
    assert ended.returncode == 2
    assert "BOOVAE_METHODS names" in ended.stderr
    assert "mistyped.py: no such Python file" in ended.stderr


def test_a_file_that_registers_nothing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("")
    ended = boovae("methods", methods=path)
    assert ended.returncode == 2
    assert "registers no method: decorate its class with @register" in ended.stderr
