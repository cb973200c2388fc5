"""The evaluation event: its schema is that of the docs, and what a stranger wrote is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from boovae.errors import InputError
from boovae.metrics.evaluation import Evaluation, read_evaluation
from boovae.metrics.schema import to_json

ROOT = Path(__file__).parents[2]


def test_the_docs_have_the_schema() -> None:
    written = (ROOT / "docs" / "evaluation.schema.json").read_text(encoding="utf-8")
    schema = msgspec.json.schema(Evaluation, schema_hook=lambda kind: {})
    assert written == json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def test_records_of_the_benches_are_written_as_they_were_read() -> None:
    """Some of the oldest lack parts; those are NaN."""
    same = total = 0
    for path in sorted((ROOT / "results").rglob("cells/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for event in record["evaluations"]:
            total += 1
            same += json.dumps(to_json(read_evaluation(event, str(path), len(record["seeds"])))) == json.dumps(event)
    assert total > 500
    assert same > 0.95 * total


def test_a_log_with_one_distance_alone_is_read() -> None:
    event = {"event": "evaluation", "task": 0, "frechet": {"pooled": [2.0], "features": "classifier"}}
    found = read_evaluation(event, "here", 1)
    assert found.seen == 1
    assert found.frechet is not None
    assert found.frechet.sets["classifier"].frechet.tolist() == [2.0]
    assert found.frechet.sets["classifier"].kid is None


def test_what_is_not_finite_is_nan_and_null_in_the_log() -> None:
    event = {"event": "evaluation", "task": 0, "nll": {"pooled": [None, float("inf"), 1.0]}}
    found = read_evaluation(event, "here", 3)
    assert found.nll is not None
    assert np.isnan(found.nll.pooled).tolist() == [True, True, False]
    assert to_json(found)["nll"]["pooled"] == [None, None, 1.0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"task": 10**12}, "'task' must be a whole number"),
        ({"task": None}, "'task' must be a whole number"),
        ({"seen": 5}, "'seen' must be 2"),
        ({"nll": 3}, "'nll' must be an object"),
        ({"nll": {}}, "'nll.pooled' is missing"),
        ({"nll": {"pooled": [1.0]}}, r"'nll.pooled' has shape \(1,\), expected \(2,\)"),
        ({"nll": {"pooled": [1.0, {}]}}, "'nll.pooled' is not a list of numbers"),
        ({"nll": {"pooled": [1.0, 2.0], "own": [[1.0, 2.0]]}}, r"'nll.own' has shape \(1, 2\), expected \(2, 2\)"),
        ({"nll": {"pooled": [1.0, 2.0], "per_task": [[1.0], [1.0, 2.0]]}}, "'nll.per_task' is not a list of numbers"),
        ({"nll": {"pooled": [1.0, 2.0], "samples": -1}}, "'nll.samples' must be a whole number"),
        ({"frechet": {"sets": {"a": {"frechet": [1.0]}}}}, r"'frechet.sets.a.frechet' has shape \(1,\)"),
        ({"ledger": None}, "'ledger' must be an object"),
        ({"ledger": {"memory": {"a": "many"}}}, "'ledger.memory"),
        ({"others": {"mmd": {"mmd": [1.0]}}}, r"'others.mmd.mmd' has shape \(1,\)"),
        (
            {"diversity": {"table": [1.0] * 2, "proportions": [[0.5]] * 2, "classes": [1, 2]}},
            "'diversity.proportions",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(change: dict[str, Any], complaint: str) -> None:
    event = {"event": "evaluation", "task": 1, "seen": 2} | change
    with pytest.raises(InputError, match=rf"metrics.jsonl, line 7: {complaint}.*; restore the file"):
        read_evaluation(event, "metrics.jsonl, line 7", 2)
