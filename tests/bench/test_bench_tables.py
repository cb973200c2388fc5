"""Numbers beside the paper's: tables, differences by seed, findings, figures and the page, from made-up runs."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
import statistics
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from bench_parts import made_up, paper_cell, request
from boovae.bench.cells import Cell, plan
from boovae.bench.figures import curves, sample_pictures
from boovae.bench.paper_tables import Entry, differences, findings, table
from boovae.bench.published import PAPER_METHODS, Printed, numbers
from boovae.bench.request import Request
from boovae.bench.results import Measured, Spread, paired, spread
from boovae.bench.studies import write
from boovae.bench.sweeps import COMPONENTS, CORESET_SIZE
from boovae.boosting.fit import FitSettings
from boovae.errors import InputError
from boovae.methods.coreset import CoresetSettings
from boovae.report.pictures import save_grid


def even(seen: int) -> list[float]:
    return [1 / seen] * seen


def on_mnist(folder: Path, study: str = "paper") -> Request:
    return request(folder, study=study, datasets=("mnist",), given={"replicas": 2})


@pytest.fixture
def measured() -> Measured:
    """On MNIST, `boo` one nat better than the paper's and `ewc` one worse; `joint` has perfect samples."""
    printed = numbers("nll")
    found = Measured("mnist")
    for method, shift in (("ewc", 1.0), ("boo", -1.0)):

        def nll(seen: int, seed: int, method: str = method, shift: float = shift) -> float:
            return printed["mnist", method, max(seen, 2)].mean + shift + 0.1 * seed

        cell = paper_cell("mnist", method)
        found.add(cell, made_up(cell, nll, even))
    for cell in plan(["mnist"], ["joint"], {"replicas": 2}, 10):
        found.add(cell, made_up(cell, lambda seen, seed: 80.0 + seen, even))
    return found


def test_the_papers_tables_are_whole() -> None:
    assert len(numbers("nll")) == 243
    assert len(numbers("diversity")) == 189
    assert numbers("nll")["mnist", "boo", 10].mean == pytest.approx(124.5, abs=5)
    assert {method for _, method, _ in numbers("nll")} == set(PAPER_METHODS)
    assert numbers("frechet") == {}


@pytest.mark.parametrize(
    ("ours", "paper", "decimals", "better"),
    [(95.96, 96.1, 1, "ours"), (96.14, 96.1, 1, "same"), (96.16, 96.1, 1, "paper"), (0.004, 0.0, 2, "same")],
)
def test_the_lower_mean_is_better_at_the_decimals_the_paper_prints(
    ours: float, paper: float, decimals: int, better: str
) -> None:
    assert Entry(Spread(ours, 0.1, 5), Printed(paper, 0.9, ""), decimals).better == better


def test_a_table_has_the_papers_layout_with_both_numbers(measured: Measured) -> None:
    found = table(measured, "nll")
    assert [seen for seen, _ in found.rows] == list(range(2, 11))
    text = found.markdown()
    assert "| tasks | ewc | boo | joint |" in text
    theirs = numbers("nll")["mnist", "boo", 2]
    assert f"**{theirs.mean - 0.95:.1f} (0.1)** / {theirs.text} | 82.0 (0.0) |" in text
    assert not re.search(r"\| 3 \|.* 8\d\.0 \(0\.0\) \|", text), "joint was not trained for three tasks"
    records = {(record[1], record[2]): record for record in found.records()}
    assert (records["boo", 10][-1], records["ewc", 10][-1], records["joint", 10][-1]) == ("ours", "paper", "")


def test_findings_count_cells_against_the_paper(measured: Measured) -> None:
    found = findings([measured], ("nll", "diversity"))
    assert found["boo: NLL at or better than the paper's"] == "9 of 9 cells"
    assert found["ewc: NLL at or better than the paper's"] == "0 of 9 cells"
    assert found["boo: Diversity at or better than the paper's"] == "9 of 9 cells"


def test_a_diversity_near_the_joint_models_counts_and_a_far_one_does_not() -> None:
    for tilt, reached in ((0.08, "3 of 3 cells"), (0.2, "0 of 3 cells")):
        found = Measured("mnist")
        cell = Cell("boo", paper_cell("mnist", "boo", tasks=4).settings)

        def tilted(seen: int, tilt: float = tilt) -> list[float]:
            share = even(seen)
            return [share[0] + tilt, *share[1:-1], share[-1] - tilt] if seen > 1 else share

        found.add(cell, made_up(cell, lambda seen, seed: 1.0, tilted))
        for seen in (2, 3, 4):  # the joint model draws unevenly, too
            joint = Cell("joint", paper_cell("mnist", "joint", tasks=1, classes_per_task=seen).settings)
            found.add(joint, made_up(joint, lambda seen, seed: 1.0, lambda seen: tilted(seen, 0.08)))
        assert findings([found], ("diversity",))["boo: Diversity at or better than the paper's"] == reached


def test_our_default_is_held_against_every_number_of_the_paper() -> None:
    found = Measured("mnist")
    cell = paper_cell("mnist", "boo+distill")
    found.add(cell, made_up(cell, lambda seen, seed: 100.0, even))
    printed = {key: value.mean for key, value in numbers("nll").items() if key[0] == "mnist"}
    single = [value for (_, method, _), value in printed.items() if not method.startswith("multihead")]
    expected = f"{sum(value > 100 for value in single)} of 63 cells"
    assert findings([found], ("nll",))["boo+distill: NLL better than each of the paper's with one network"] == expected


def test_spread_is_the_sample_deviation() -> None:
    values = [3.0, 4.5, 7.25]
    found = spread(values)
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.std == pytest.approx(statistics.stdev(values))
    assert math.isnan(spread([1.0]).std)


def test_one_seed_has_no_deviation_and_what_is_not_finite_is_left_out() -> None:
    assert spread([2.0]).record == ("2", "", 1)
    assert spread([1.0, 2.0, math.inf, math.nan]) == spread([1.0, 2.0])


def test_paired_differences_agree_with_scipys_bootstrap() -> None:
    random = np.random.default_rng(1)
    theirs = dict(enumerate(random.normal(100, 5, 12)))
    ours = {seed: value - 2 + random.normal(0, 0.5) for seed, value in theirs.items()}
    found = paired(ours, {**theirs, 99: 0.0})
    assert found is not None
    gaps = np.array([ours[seed] - theirs[seed] for seed in ours])
    truth = stats.bootstrap((gaps,), np.mean, method="percentile", n_resamples=9999, rng=random).confidence_interval
    assert found.mean == pytest.approx(gaps.mean())
    assert (found.low, found.high) == pytest.approx((truth.low, truth.high), abs=0.05)
    assert found.seeds == 12
    assert paired(ours, {99: 0.0}) is None
    assert paired(ours, {0: 100.0}) is None  # of one seed an interval has no width, and would always look clear


def test_differences_are_taken_seed_by_seed(measured: Measured) -> None:
    rows = {(row[1], row[3], row[4]): row for row in differences([measured], ("nll",))}
    ewc, boo = (numbers("nll")["mnist", method, 10].mean for method in ("ewc", "boo"))
    assert float(str(rows["nll", "boo", "ewc"][5])) == pytest.approx(boo - ewc - 2, rel=1e-3)
    assert rows["nll", "boo", "joint"][-1] == 2


def test_terms_of_the_classes_add_up_to_the_divergence_from_uniform() -> None:
    shares = [0.5, 0.3, 0.2]
    cell = paper_cell("mnist", "boo", tasks=3)
    found = Measured("mnist")
    found.add(cell, made_up(cell, lambda seen, seed: 1.0, lambda seen: shares[:seen]))
    terms = [found.seeds("boo", 3, "diversity_term", place)[0] for place in range(3)]
    assert sum(terms) == pytest.approx(stats.entropy([1 / 3] * 3, shares))
    assert terms[0] < 0 < terms[2]


def test_tasks_of_pairs_have_rows_of_their_own_and_none_of_the_papers_numbers() -> None:
    cell = paper_cell("mnist", "boo", classes_per_task=2, tasks=2)
    found = Measured("mnist")
    found.add(cell, made_up(cell, lambda seen, seed: 90.0 + seen, even))
    assert [(seen, row[0].paper) for seen, row in table(found, "nll").rows] == [(2, None)]
    assert found.seeds("boo", 2, "nll", 1) == {0: 92.0, 1: 92.0}
    assert [found.seeds("boo", 2, "diversity_term", place)[0] for place in range(4)] == pytest.approx([0.0] * 4)
    assert findings([found], ["nll"]) == {}


def test_the_bench_writes_every_number_table_figure_and_page(measured: Measured, tmp_path: Path) -> None:
    asked = on_mnist(tmp_path)
    for cell, summary in measured.cells:
        run, tasks = asked.out / cell.name, len(summary["tasks"])
        for task in range(tasks):
            save_grid(run / "samples" / f"task_{task:02d}.png", np.random.default_rng(task).random((64, 64)), (8, 8))
        summary["samples"] = sample_pictures(run, tasks)
        summary["components"] = {"one": summary["samples"][:1]} if cell.label == "boo" else {}
    write(asked, [measured], missing=["mnist vcl"])
    text = (asked.results / "mnist.csv").read_text()
    for line in ("# command: boovae bench", "# commit: abc", "# device: none", "# seeds: 0 1"):
        assert line in text
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    pooled = [row for row in rows if row["metric"] == "nll" and not row["task"]]
    assert len(pooled) == 2 * (10 + 10 + 3)
    assert {row["tasks_seen"] for row in pooled if row["method"] == "joint"} == {"2", "5", "10"}
    page = (asked.results / "report.html").read_text()
    for words in (
        "Samples of each method",
        "Learned components",
        "Diversity on MNIST",
        "9 of 9 cells",
        "mnist vcl",
        "data:image/png;base64,",
        "<svg",
    ):
        assert words in page
    assert "<span>90.0 (0.0)</span>" in page  # joint: there is no number of the paper to be better than
    ids = re.findall(r'<(?:clipPath|path|defs) id="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "two charts of a page may not share ids"
    for name in ("mnist_curves.svg", "mnist_nll_per_task.svg", "mnist_diversity_per_task.svg"):
        drawing = ElementTree.parse(asked.results / name).getroot()
        assert "ewc" in "".join(drawing.itertext())
    assert (asked.results / "mnist_samples.png").stat().st_size > 1000
    wanted = ["", "-nll", "-diversity", "-charts", "-nll-per-task", "-diversity-per-task", "-samples", "-components"]
    assert links(page) == ["findings", *(f"mnist{end}" for end in wanted), "differences"]
    assert page.index('alt="boo, 3 tasks seen"') < page.index("<summary><h3>Learned components</h3>")


def links(page: str) -> list[str]:
    """Return where the links of a page lead, each to a place that is there once."""
    found = re.findall(r'href="#([^"]*[a-z])"', page[: page.index("</nav>")])
    assert all(page.count(f' id="{place}"') == 1 for place in found)
    return found


def test_what_is_measured_and_what_the_paper_prints_have_the_same_axes(measured: Measured) -> None:
    def ticks(drawing: str) -> list[tuple[str, ...]]:
        return re.findall(r'<text[^>]*\b(?:x|transform)="([^"]*)"[^>]*>([\d.]+)</text>', drawing)

    for metric in ("nll", "diversity"):
        ours, theirs = map(str, curves(measured, metric))
        assert ticks(ours), "no tick was found"
        assert ticks(ours) == ticks(theirs)


@pytest.mark.parametrize(("dataset", "title"), [("fashion_mnist", "Fashion-MNIST"), ("notmnist", "notMNIST")])
def test_a_dataset_has_one_title_everywhere(dataset: str, title: str, tmp_path: Path) -> None:
    asked = on_mnist(tmp_path)
    found = Measured(dataset)
    cell = paper_cell(dataset, "boo")
    found.add(cell, made_up(cell, lambda seen, seed: 250.0, even))
    write(asked, [found], [])
    assert f"## NLL on {title}" in (asked.results / "nll.md").read_text()
    page = (asked.results / "report.html").read_text()
    for words in (f">{title}</h2>", f"NLL on {title}</h3>", f"NLL on {title}, in the paper"):
        assert words in page


def test_the_study_of_coresets_says_how_many_images_are_needed(tmp_path: Path) -> None:
    asked = on_mnist(tmp_path, "coreset-size")
    found = Measured("mnist")
    for cell in CORESET_SIZE.plan(asked):
        size = cell.settings.of(CoresetSettings).coreset_images if cell.settings.method == "coreset" else 150
        found.add(cell, made_up(cell, lambda seen, seed, size=size: 100 - size / 100, even))  # type: ignore[misc]
    assert len(found.cells) == 6
    answers = write(asked, [found], [])
    assert answers["mnist: coreset below boo in NLL"] == "from 200 images per task"
    assert answers["mnist: coreset below boo in Diversity"] == "at no size tried"
    rows = list(csv.DictReader((asked.results / "coreset-size.csv").open()))
    assert [row["at"] for row in rows if row["metric"] == "nll"] == ["15", "50", "100", "200", "500", ""]
    assert ElementTree.parse(asked.results / "mnist.svg").getroot() is not None
    page = (asked.results / "report.html").read_text()
    assert "Size of the coreset" in page
    assert "MNIST: coreset below boo in NLL" in page
    assert '<th scope="row">coreset</th><td>200</td><td>98.0 (0.0)</td>' in page
    assert links(page) == ["findings", "mnist", "mnist-numbers", "mnist-charts"]


def test_a_size_that_is_enough_by_chance_is_not_said_to_be_where_it_begins(tmp_path: Path) -> None:
    asked = on_mnist(tmp_path, "coreset-size")
    cells = CORESET_SIZE.plan(asked)
    found, alone = Measured("mnist"), Measured("mnist")
    for cell in cells:
        size = cell.settings.of(CoresetSettings).coreset_images
        nll = {15: 80.0, 500: 80.0}.get(size, 95.0) if cell.settings.method == "coreset" else 90
        found.add(cell, made_up(cell, lambda seen, seed, nll=nll: nll, even))  # type: ignore[misc]
    alone.add(*found.cells[-1])  # the coresets are not finished
    assert write(asked, [found], [])["mnist: coreset below boo in NLL"] == "only with 15, 500 images per task"
    assert write(asked, [alone], []) == {}
    alone.add(*found.cells[1])
    some = write(asked, [alone], [])["mnist: coreset below boo in NLL"]
    assert some == "at no size tried (of 50, the finished ones)"


def test_the_study_of_components_tries_them_with_and_without_pruning(tmp_path: Path) -> None:
    asked = on_mnist(tmp_path, "components")
    cells = COMPONENTS.plan(asked)
    assert {(cell.settings.model.components, cell.settings.of(FitSettings).boo_prune) for cell in cells} == {
        (count, prune) for count in (5, 15, 40, 80) for prune in (0.0, 1e-3)
    }
    found = Measured("mnist")
    for cell in cells:
        distance = abs(cell.settings.model.components - 40)
        found.add(cell, made_up(cell, lambda seen, seed, distance=distance: 90.0 + distance, even))  # type: ignore[misc]
    answers = write(asked, [found], [])
    assert answers["mnist: boo, best NLL"] == "with 40 components per task"
    rows = list(csv.DictReader((asked.results / "components.csv").open()))
    assert {row["metric"] for row in rows} == {"nll", "diversity", "kept", "seconds"}
    assert {row["mean"] for row in rows if row["metric"] == "kept"} == {"14.5"}


def test_the_study_of_components_takes_variants(tmp_path: Path) -> None:
    asked = dataclasses.replace(on_mnist(tmp_path, "components"), methods=("boo", "flat=boo:latent_dim=2,net=mlp:20"))
    found = Measured("mnist")
    for cell in COMPONENTS.plan(asked):
        wanted = (2, "mlp:20") if cell.label.startswith("flat ") else (40, "mlp:300")
        assert (cell.settings.model.latent_dim, cell.settings.model.net) == wanted
        found.add(cell, made_up(cell, lambda seen, seed: 90.0, even))
    assert len({cell.name for cell, _ in found.cells}) == 16
    write(asked, [found], [])
    rows = list(csv.DictReader((asked.results / "components.csv").open()))
    lines = {"boo", "boo without pruning", "flat", "flat without pruning"}
    assert {row["line"] for row in rows} == lines
    with pytest.raises(InputError, match="this study varies components itself"):
        COMPONENTS.plan(dataclasses.replace(asked, methods=("wide=boo:components=40",)))
