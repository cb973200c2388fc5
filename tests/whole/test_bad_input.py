"""Every row of docs/bad-input.md, tried out: it is refused with the words of the page, or works."""

from __future__ import annotations

from pathlib import Path

import pytest

from bad_input import CASES, attempt, documented


def test_the_page_and_the_cases_are_the_same() -> None:
    assert list(documented()) == list(CASES)
    assert len(CASES) >= 40
    assert all(row.message for row in documented().values() if row.refused)


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, tmp_path: Path) -> None:
    assert attempt(CASES[name], documented()[name], tmp_path / "input") == ""
