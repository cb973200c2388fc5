"""The report's panel of learned components, and what is said about a damaged list of them."""

from __future__ import annotations

import base64
import json
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boovae.errors import InputError
from boovae.report.pictures import grid, png
from made_up_run import Page, make_run
from run_folders import write_report


def add_components(run: Path, tasks: int = 2, replicas: int = 5) -> Path:
    """Put into a run folder what a run with a boosted prior has besides."""
    listed = []
    for task in range(tasks):
        for place in range(3 if task else 1):
            pictures = {key: _png(place / 3) for key in ("pseudo_input", "decoded")}
            cost = 0.25 * place * place if task else None
            numbers = {"weight": 0.125 * (place + 1), "mass": 0.1, "cost": cost, "share": None}
            listed.append({"task": task, "name": str(task), "component": place, **numbers, **pictures})
    (run / "components.json").write_text(json.dumps({"replica": 0, "components": listed}))
    divergence = [[21.0] * replicas, [19.5] * (replicas - 1) + [None], [19.25] * replicas]
    log(
        run,
        {"event": "components", "task": 0, "epoch": 4, "sizes": [1], "divergence": [[99.0] * replicas]},
        {"event": "components", "task": 0, "epoch": 8, "sizes": [1, 2, 3], "divergence": divergence},
        {"event": "components", "task": 1, "kept": [3, 4, 3, 3, 3][:replicas], "twins": [1, 0, 2, 0, 0][:replicas]},
        {"event": "note", "task": 1, "text": "boo: fewer images (9) than components (15)"},
    )
    return run


def log(run: Path, *events: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def _png(shade: float) -> str:
    return base64.b64encode(png(grid(np.full((1, 16), shade), (4, 4), scale=1))).decode()


def test_learned_components_have_a_panel(tmp_path: Path) -> None:
    run = add_components(make_run(tmp_path / "run", tasks=2))
    text = write_report([run]).read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert "Learned components" in text
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert all(image["alt"] for image in images)
    tiles = [image for image in images if str(image["alt"]).startswith("Pseudo-input")]
    assert [image["alt"] for image in tiles] == [
        "Pseudo-input 0 of task digit 0: weight 12.5 %, it is the only one",
        "Pseudo-input 2 of task digit 1: weight 37.5 %, dropping it costs 1.00 nats",
        "Pseudo-input 1 of task digit 1: weight 25.0 %, dropping it costs 0.250 nats",
        "Pseudo-input 0 of task digit 1: weight 12.5 %, dropping it costs ≈ 0 nats",
    ]
    kept = json.loads((run / "components.json").read_text())["components"][3]
    assert tiles[1]["src"] == f"data:image/png;base64,{kept['pseudo_input']}"
    assert "3 components; 3 to 4 kept when the task ended in each replica, 0 to 2 merged as duplicates." in text
    assert "<small>1.00 nats</small>" in text
    assert "from 0.00 to 1.75" in text  # 21 − 19.25: the later measurement of one component counts
    assert "Boo: fewer images (9) than components (15) (task “digit 1”)." in text


def test_pruning_after_the_last_evaluation_is_a_warning(tmp_path: Path) -> None:
    run = add_components(make_run(tmp_path / "run", tasks=2))
    pruned = {"event": "prune", "task": 1, "cost": 0.1, "dropped": [1, 0, 2, 1, 1], "kept": [2, 3, 1, 2, 2]}
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], json.dumps(pruned), *lines[1:]]) + "\n")
    page = write_report([run]).read_text(encoding="utf-8")
    assert "0 to 2 pruned since" in page
    assert "were pruned after the last evaluation" not in page
    log(run, pruned)
    page = write_report([run]).read_text(encoding="utf-8")
    assert "0 to 4 pruned since" in page
    assert "Components of task “digit 1” were pruned after the last evaluation" in page


def test_a_run_without_components_has_no_such_panel(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", tasks=2)]).read_text(encoding="utf-8")
    assert "Learned components" not in page


def test_the_components_of_two_runs_share_no_ids(tmp_path: Path) -> None:
    runs = [add_components(make_run(tmp_path / name, tasks=2)) for name in ("one", "two")]
    page = Page(write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    plots = sum(attributes.get("class") == "plot" for _, attributes in page.tags)
    assert plots == 7 + 2
    assert sum(tag == "summary" for tag, _ in page.tags) == plots + 2 + 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[1, 2", "Expecting"),
        ("[]", "must be an object"),
        ('{"components": {}}', "'components' must be a list"),
        ('{"components": [7]}', "'components[0]' must be an object"),
        ('{"components": [{"task": 0, "component": 0, "decoded": ""}]}', "'components[0].pseudo_input' is missing"),
        (
            '{"components": [{"task": 0, "component": 0, "decoded": "", "pseudo_input": "PHN2Zz4="}]}',
            "picture 0 is not",
        ),
    ],
)
def test_a_damaged_list_of_components_is_left_out_with_a_note(tmp_path: Path, content: str, problem: str) -> None:
    run = make_run(tmp_path / "run", tasks=1, epochs=1)
    (run / "components.json").write_text(content)
    page = unescape(write_report([run]).read_text(encoding="utf-8"))
    assert f"components.json is damaged ({problem}" in page
    assert "Learned components" not in page


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"event": "components", "task": 0, "sizes": 3}, "'sizes' has shape"),
        ({"event": "components", "task": 0, "sizes": [1], "divergence": [[1.0]]}, r"'divergence' has shape \(1, 1\)"),
        ({"event": "components", "task": -1, "kept": [1] * 5}, "'task' must be a whole number"),
        ({"event": "components", "task": 0, "kept": [1]}, r"'kept' has shape \(1,\), expected \(5,\)"),
        ({"event": "prune", "task": 0, "dropped": ["x"] * 5}, "'dropped' is not a list of numbers"),
        ({"event": "note", "text": "hm"}, "'task' is missing"),
    ],
)
def test_wrong_events_about_components_are_named(tmp_path: Path, event: dict[str, Any], message: str) -> None:
    run = make_run(tmp_path / "run", tasks=1, epochs=1)
    log(run, event)
    with pytest.raises(InputError, match=rf"metrics\.jsonl, line \d+: {message}"):
        write_report([run])
