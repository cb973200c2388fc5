"""The charts of the report: figures that plotly takes, tables that say the same, the paper and the bound beside."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from boovae.bench.published import numbers
from boovae.report.charts import Line, line_plot
from boovae.report.series import Series
from boovae.report.svg import chart
from made_up_run import make_run
from run_folders import events, write_report

LATENTS: dict[str, Any] = {
    "replica": 0,
    "explained": [0.5, 0.25],
    "separate": False,
    "codes": [{"task": task, "points": [[task + 0.1 * i, 1.0 - i] for i in range(4)]} for task in range(2)],
    "components": [{"task": task, "mass": 0.5, "at": [task, 0.0], "deviation": [1.0, 2.0]} for task in range(2)],
}


def figures(page: str) -> list[Any]:
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]


def traces(page: str, name: str) -> list[dict[str, Any]]:
    return [trace for figure in figures(page) for trace in figure["data"] if trace.get("name") == name]


def test_every_figure_is_one_that_plotly_takes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, tasks=3, method=name) for name in ("boo", "joint")]
    for run in runs:
        (run / "latents.json").write_text(json.dumps(LATENTS))
    found = figures(write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8"))
    assert len(found) == 5 + 2 + 2  # curves, maps, training
    for figure in found:
        plain = re.sub(r"var\(--\w+\)", "#123456", json.dumps(figure))  # plotly checks names and values
        assert go.Figure(json.loads(plain)).data


def test_lines_are_means_and_bands_deviations(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=4)
    page = write_report([run]).read_text(encoding="utf-8")
    nll = np.array([event["nll"]["pooled"] for event in events(run, "evaluation")])
    line = traces(page, "run")[0]
    assert line["x"] == [1, 2, 3, 4]
    assert line["y"] == pytest.approx(nll.mean(1), rel=1e-5)
    assert line["customdata"] == pytest.approx(nll.std(1, ddof=1), rel=1e-4)
    area = figures(page)[0]["data"][0]
    above = nll.mean(1) + nll.std(1, ddof=1)
    assert area["y"][:4] == pytest.approx(above, rel=1e-5)
    assert area["hoverinfo"] == "skip"
    assert f"<td>{nll[-1].mean():.2f} ± {nll[-1].std(ddof=1):.2f}</td>" in page  # the table says the same
    spread = np.array([event["diversity"]["table"] for event in events(run, "evaluation")])[-1]
    assert f"<td>{spread.mean():.3f} ± {spread.std(ddof=1):.3f}</td>" in page  # small numbers are not rounded away


def test_forgetting_is_the_mean_of_the_earlier_tasks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=3)
    lost = [np.array(event["forgetting"]["own"])[:-1].mean() for event in events(run, "evaluation")[1:]]
    line = traces(write_report([run]).read_text(encoding="utf-8"), "run")[2]
    assert line["x"] == [2, 3]
    assert line["y"] == pytest.approx(lost, rel=1e-4)


def test_the_paper_stands_beside_a_run_that_it_has_numbers_for(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", method="boo+vcl")]).read_text(encoding="utf-8")
    nll, diversity = traces(page, "Boo+VCL in the paper")
    for trace, metric in ((nll, "nll"), (diversity, "diversity")):
        table = numbers(metric)
        assert trace["x"] == list(range(2, 11))
        assert trace["y"] == [table["mnist", "boo+vcl", seen].mean for seen in range(2, 11)]
        assert (trace["line"]["dash"], trace["marker"]["symbol"]) == ("dash", "circle-open")
    assert "the paper has 112.7 ± 1.1" in page
    assert "Dashed with rings: the paper" in page


def test_the_paper_is_left_out_where_the_stream_is_another(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("classes_per_task = 1", "classes_per_task = 2"))
    assert "in the paper" not in write_report([run]).read_text(encoding="utf-8")


def test_runs_are_measured_against_the_joint_bound(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "boo", tasks=4), make_run(tmp_path / "joint", tasks=4, done=3, method="joint")]
    page = write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    assert traces(page, "joint")[0]["line"]["dash"] == "dot"
    ours, bound = (np.mean(events(run, "evaluation")[2]["nll"]["pooled"]) for run in runs)
    assert ours == bound  # the same made-up numbers
    assert "NLL above the joint bound" in page
    assert "nats, after 3 tasks; the bound is" in page
    assert "this is the bound" in page


def test_the_latent_map_shows_codes_and_components(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    (run / "latents.json").write_text(json.dumps(LATENTS))
    page = write_report([run]).read_text(encoding="utf-8")
    codes = traces(page, "digit 1")[0]
    assert codes["x"] == [1.0, 1.1, 1.2, 1.3]
    components = traces(page, "components")[0]
    assert (components["x"], components["customdata"]) == ([0.0, 1.0], [50.0, 50.0])
    assert components["marker"]["color"] == ["var(--s0)", "var(--s1)"]
    assert "first direction (50 % of the variance)" in page
    row = re.search(r"digit 1</th><td>4</td><td>1.15</td><td>−0.50</td>", page)
    assert row is not None


def test_a_standard_normal_prior_is_drawn_as_a_circle(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    normal = {"task": None, "mass": 1.0, "at": [0.5, 0.0], "deviation": [1.0, 1.0]}
    (run / "latents.json").write_text(json.dumps(LATENTS | {"components": [normal]}))
    shapes = [s for figure in figures(write_report([run]).read_text()) for s in figure["layout"].get("shapes", [])]
    assert [(s["type"], s["x0"], s["x1"]) for s in shapes] == [("circle", -1.5, 2.5)]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"codes": 3}, "'codes' must be a list"),
        ({"codes": [{"task": 0, "points": [[1, 2, 3]]}]}, "'codes[0].points' has shape (1, 3), expected (1, 2)"),
        ({"components": [{"task": -1}]}, "'components[0].task' must be a whole number"),
    ],
)
def test_a_damaged_map_is_left_out_with_a_note(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    (run / "latents.json").write_text(json.dumps(LATENTS | change))
    page = unescape(write_report([run]).read_text(encoding="utf-8"))
    assert f"latents.json is damaged ({problem}" in page
    assert "Latent space</h2>" not in page


def test_numbers_that_are_not_finite_do_not_break_the_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    strange = {"task": 0, "mass": -1.0, "at": [None, 0.0], "deviation": [1.0, None]}
    codes = [{"task": 0, "points": [[None, 1.0], [2.0, 3.0]]}]
    (run / "latents.json").write_text(json.dumps(LATENTS | {"components": [strange], "codes": codes}))
    page = write_report([run]).read_text(encoding="utf-8")
    assert traces(page, "digit 0")[0]["x"] == [None, 2.0]
    assert traces(page, "components") == []


def test_names_cannot_become_tags_in_a_chart(tmp_path: Path) -> None:
    evil = '<a href="https://example.org">x</a></script>'
    run = make_run(tmp_path / "run", tasks=2, names=[evil, "b"])
    (run / "latents.json").write_text(json.dumps(LATENTS))
    page = write_report([run]).read_text(encoding="utf-8")
    names = [trace["name"] for figure in figures(page) for trace in figure["data"] if "name" in trace]
    assert "&lt;a href=&quot;https://example.org&quot;&gt;x&lt;/a&gt;&lt;/script&gt;" in names
    assert evil not in page


def test_a_gap_in_a_line_is_a_gap_in_its_band() -> None:
    x = np.arange(1.0, 6.0)
    y = np.array([1.0, 2.0, np.nan, 4.0, 5.0])
    drawn = line_plot([Line("a", Series(x, y, np.full(5, 0.5), 0))], "title", "x")
    assert drawn is not None
    area, line = drawn.figure["data"]
    assert line["y"] == [1.0, 2.0, None, 4.0, 5.0]
    assert area["x"] == [1.0, 2.0, 2.0, 1.0, None, 4.0, 5.0, 5.0, 4.0, None]
    assert drawn.table.rows[2] == ("3", [""])
    assert line_plot([Line("a", Series(x, np.full(5, np.nan), np.zeros(5), 0))], "title", "x") is None


def test_charts_for_files_are_svg_in_the_colours_of_the_page() -> None:
    x = np.arange(1.0, 4.0)
    svg = str(chart([Series(x, x, np.zeros(3), 9, marks=True)], "NLL", "tasks seen"))
    assert svg.startswith('<svg class="chart"')
    assert "var(--s1)" in svg
    assert 'aria-label="NLL over tasks seen: from 1.00 to 3.00"' in svg
    assert chart([Series(x, x * np.nan, np.zeros(3), 0)], "NLL", "tasks seen") == ""
