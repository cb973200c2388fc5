"""The records that lie beside the results, made by earlier versions, are those that this version asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from boovae.bench.cells import plan
from boovae.bench.published import DATASETS, METHODS
from boovae.config import folder_name
from boovae.methods import from_mapping

RECORDS = sorted((Path(__file__).parents[2] / "results").glob("*/cells/*.json"))


def test_the_bench_of_the_paper_finds_all_its_cells() -> None:
    cells = plan(DATASETS, METHODS, {"replicas": 5, "seed": 0}, tasks=10)
    assert len(cells) >= 3 * 13
    assert {cell.name for cell in cells} <= {path.stem for path in RECORDS if path.parts[-3] == "paper"}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: str(path.stem))
def test_a_record_has_the_name_of_its_settings(path: Path) -> None:
    settings = from_mapping(json.loads(path.read_text(encoding="utf-8"))["settings"])
    assert folder_name(settings) == path.stem
