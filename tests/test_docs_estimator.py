"""The Python of the README and of docs/estimator.md does what these pages say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import boovae.defaults

ROOT = Path(__file__).parents[1]


def blocks(page: str, after: str = "", before: str = "\x00") -> list[str]:
    text = (ROOT / page).read_text().partition(after)[2] if after else (ROOT / page).read_text()
    return re.findall(r"```python\n(.*?)```", text.partition(before)[0], re.DOTALL)


def run(code: list[str], where: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for number, block in enumerate(code):
        exec(compile(block, f"{where}, block {number}", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(boovae.defaults, "SMALL_EPOCHS", 2)
    monkeypatch.chdir(tmp_path)


def test_the_page_of_the_estimator_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(blocks("docs/estimator.md"), "docs/estimator.md")
    model = names["model"]
    assert model.n_tasks_ == 5
    assert names["new"].shape == names["ones"].shape == (64, 8, 8)
    assert names["codes"].shape == (100, 10)
    assert np.isfinite(names["scores"]).all()
    assert "X has values in [0, 255], but the model takes grey values in [0, 1]" in capsys.readouterr().out


def test_the_python_of_the_readme_runs() -> None:
    code = blocks("README.md", after="## In Python", before="## What is measured")
    names = run(code[:1], "README.md")
    assert names["model"].n_tasks_ == 10
