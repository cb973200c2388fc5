"""The page about a run: what it says, what it refuses, and what it never does."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

import boovae.report.page
from boovae.errors import InputError
from made_up_run import Page, make_run
from run_folders import events, write_csv, write_report


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "boo_mnist")


@pytest.fixture(scope="module")
def full_page(full_run: Path) -> str:
    return write_report([full_run]).read_text(encoding="utf-8")


def test_one_run_is_written_into_its_folder(full_run: Path, full_page: str) -> None:
    assert full_page == (full_run / "report.html").read_text(encoding="utf-8")
    assert not list(full_run.glob(".*.tmp"))


def test_page_makes_no_request_to_anywhere(full_page: str) -> None:
    page = Page(full_page)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed")
        for key in ("src", "href", "xlink:href", "srcset", "action"):
            value = attributes.get(key) or ""
            assert not value or value.startswith(("data:image/png;base64,", "#"))
    assert "url(http" not in full_page
    assert "@import" not in full_page
    assert "http://" not in full_page.replace("http://www.w3.org/", "")


def test_browsers_run_the_two_scripts_of_the_page_and_no_other(full_page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', full_page)
    assert policy is not None
    allowed = re.findall(r"(sha256-[^']+)'", unescape(policy[1]))
    own = re.findall(r"<script>(.*?)</script>", full_page, re.DOTALL)
    packed = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', full_page)
    scripts = [own[0].encode(), gzip.decompress(base64.b64decode(packed[0]))]
    digests = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    assert allowed == [f"sha256-{digest}" for digest in digests]
    assert scripts[1].decode() == get_plotlyjs()
    assert "default-src 'none'" in unescape(policy[1])
    assert "unsafe-eval" not in policy[1]


def test_the_page_is_small_enough_to_send(full_page: str) -> None:
    assert len(full_page) < 3_000_000  # plotly alone would be five


def test_page_is_well_formed_and_every_picture_has_a_text(full_page: str) -> None:
    page = Page(full_page)
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")
    plots = [attributes for _, attributes in page.tags if str(attributes.get("class", "")).startswith("plot")]
    assert len(plots) == 7  # NLL, diversity, forgetting, distance, memory, loss, KL
    assert all(plot["aria-label"] and plot["role"] == "img" and plot["tabindex"] == "0" for plot in plots)
    assert full_page.count('<details class="numbers">') == len(plots)
    assert sum(tag == "img" for tag, _ in page.tags) == 10
    links = {str(attributes["href"])[1:] for tag, attributes in page.tags if tag == "a"}
    assert links <= set(ids)
    assert {"headline", "curves", "film", "matrices", "cost"} <= links


def test_page_contains_the_numbers_of_the_run(full_run: Path, full_page: str) -> None:
    last = events(full_run)[-1]
    nll = np.array(last["nll"]["pooled"])
    assert f"{nll.mean():.2f} ± {nll.std(ddof=1):.2f}" in full_page
    diversity = float(np.mean(last["diversity"]["table"]))
    assert f"as if {10 * np.exp(-diversity):.1f} of 10 classes" in full_page
    lost = np.mean(last["forgetting"]["own"][:-1], axis=1)
    assert f"task “digit {lost.argmax()}”" in full_page
    assert f">+{lost[0]:.1f}<" in full_page
    for row in last["nll"]["per_task"]:
        assert f">{np.mean(row):.1f}<" in full_page
    assert "98.9 %" in full_page
    assert "471.0 kB" in full_page
    assert "6 min 0 s" in full_page
    assert "latent_dim" in full_page
    assert "Before you read" not in full_page


def test_same_folder_gives_the_same_bytes(full_run: Path, full_page: str, tmp_path: Path) -> None:
    assert write_report([full_run], tmp_path / "deep" / "again.html").read_text(encoding="utf-8") == full_page


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'onload=x $\\frac$ {{ 7*7 }} \ud800"
    run = make_run(tmp_path / "<b>&run", tasks=2, names=[evil, evil], method=evil[:25])
    page = write_report([run]).read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert page.count("<script>") == 1  # ours
    assert "<b>&run" not in page
    assert "&lt;script&gt;" in page
    assert "{{ 7*7 }}" in page
    assert Page(page).open == []


def test_unfinished_run_says_so(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", done=3)]).read_text(encoding="utf-8")
    assert "This run is unfinished: the numbers are those after 3 of its 10 tasks." in page


@pytest.mark.parametrize("epochs", [0, 2])
def test_run_without_evaluation_has_a_page(tmp_path: Path, epochs: int) -> None:
    run = make_run(tmp_path / "run", done=0, epochs=epochs)
    (run / "timing.jsonl").unlink()
    page = write_report([run]).read_text(encoding="utf-8")
    assert "none of its 10 tasks has been evaluated yet" in page
    assert "There are no numbers yet" in page
    assert ('class="plot"' in page) == (epochs > 0)


def test_run_of_one_task_and_one_replica_has_no_deviation(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", tasks=1, replicas=1)]).read_text(encoding="utf-8")
    assert "±" not in page.replace("mean ± standard deviation", "")
    assert "needs at least two tasks" in page


def test_forgetting_on_few_effective_samples_is_not_claimed_nor_warned_of(tmp_path: Path) -> None:
    """The log is of before this was recorded: it is judged when it is read."""
    pages = [
        unescape(write_report([make_run(tmp_path / str(few), tasks=3, forget=40.0, effective=few)]).read_text("utf-8"))
        for few in (1.6, 180.0)
    ]
    unclear = "cannot be judged: effective samples 1.6 of 5000; longer training or more --samples help"
    assert [unclear in page for page in pages] == [True, False]
    assert ["whether earlier tasks are forgotten cannot be judged" in page for page in pages] == [True, False]
    assert ["being forgotten" in page for page in pages] == [False, True]
    for page, effective in zip(pages, ("1.6", "180.0"), strict=True):
        assert f"effective samples per image {effective} of 5,000, in the worst task" in page


def test_measures_that_were_not_taken_are_left_blank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=3)
    kept = [
        {k: v for k, v in e.items() if k in ("event", "task", "nll")} if e["event"] == "evaluation" else e
        for e in events(run)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))
    page = write_report([run]).read_text(encoding="utf-8")
    assert "not measured" in page
    assert "Classes of the samples" not in page
    body = re.sub(r'base64,[^"]*|<script>.*</script>|id="plotly">[^<]*', "", page, flags=re.DOTALL)
    assert not re.search(r"\bnan\b", body, re.IGNORECASE)


def test_two_runs_stand_side_by_side(full_run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "standard_mnist", tasks=6, method="standard", forget=9.0)
    page = write_report([full_run, other], tmp_path / "both.html").read_text(encoding="utf-8")
    for text in ("boo_mnist", "standard_mnist", "different numbers of tasks", "var(--s0)", "var(--s1)"):
        assert text in page
    assert page.count('class="plot"') == 7  # the runs share the charts
    assert page.count("data-run=") == 2  # and the legend
    assert re.search(r'class="differ"><th scope="row">method</th><td>boo</td><td>standard</td>', page)


def test_a_distance_carries_the_name_of_its_features(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for event in lines:
        if event["event"] == "evaluation":
            replicas = len(event["frechet"]["pooled"])
            numbers = {"kid": 0.0123, "precision": 0.81, "recall": 0.25, "frechet_train": 31.5}
            per_replica: dict[str, Any] = {key: [value] * replicas for key, value in numbers.items()}
            per_replica |= {"frechet": [33.3] * replicas, "images": 100, "samples": 200}
            event["seen"] = event["task"] + 1
            event["frechet"]["sets"] = dict.fromkeys(("inception", "<b>own", "efficientnet-lite0"), per_replica)
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    page = write_report([run]).read_text(encoding="utf-8")
    assert page.count("FID") > 0
    assert "Fréchet distance (efficientnet-lite0)" in page
    assert "Fréchet distance (&lt;b&gt;own)" in page
    for text in ("KID 0.0123", "precision 81.0 %", "recall 25.0 %", "training images 31.5"):
        assert text in page
    table = write_csv(run, tmp_path / "run.csv").read_text()
    for column in ("fid", "fid_train", "kid_inception", "frechet_efficientnet-lite0", "recall_efficientnet-lite0"):
        assert f",{column},," in table
    assert "fid_efficientnet" not in table
    assert "frechet_inception" not in table


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent / "run", tasks=1, epochs=1) for parent in ("monday", "tuesday")]
    page = write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    assert "monday/run" in page
    assert "tuesday/run" in page


def test_what_several_runs_have_in_common_is_said_once(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, tasks=2, epochs=1, accuracy=0.81) for name in ("one", "two")]
    page = write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    assert page.count("right on only 81.0 %") == 1
    assert "<strong>one, two:</strong> The classifier" in page
    assert "<code>--metric nll</code>" in page


def test_torn_last_line_is_left_out_with_a_note(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=3)
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-400])
    page = write_report([run]).read_text(encoding="utf-8")
    assert "The last line of metrics.jsonl is torn" in page
    assert "after 2 of its 3 tasks" in page


def test_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2, epochs=2)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2] = lines[2][:20]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 3 is not a JSON object"):
        write_report([run])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": 10**12}, "'task' must be a whole number"),
        ({"nll": {"pooled": [1.0]}}, r"'nll.pooled' has shape \(1,\), expected \(5,\)"),
        ({"nll": {"per_task": "many"}}, "'nll.per_task' is not a list of numbers"),
    ],
)
def test_wrong_shapes_name_the_line_and_the_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    run = make_run(tmp_path / "run", tasks=1, epochs=1)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | change)
    (run / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=rf"metrics\.jsonl, line {len(lines)}: {message}"):
        write_report([run])


def test_missing_things_are_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run given"):
        boovae.report.page.write_report([], tmp_path / "page.html")
    with pytest.raises(InputError, match="nowhere is not a folder: give a run folder"):
        write_report([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty is not a run folder"):
        write_report([tmp_path / "empty"])
    run = make_run(tmp_path / "run", tasks=1, epochs=1)
    with pytest.raises(InputError, match="a report about several runs needs a file"):
        write_report([run, run])
    with pytest.raises(InputError, match="is a folder: give the name of a file"):
        write_report([run], tmp_path)
    (run / "samples" / "task_01.png").write_text("<svg onload=alert(1)>")
    assert "samples/task_01.png is not a PNG picture" in write_report([run]).read_text(encoding="utf-8")
    (run / "environment.json").unlink()
    with pytest.raises(InputError, match=r"run lacks environment\.json: copy the whole run folder"):
        write_report([run])
    (run / "environment.json").write_text("{}")
    (run / "config.toml").write_text("a = ")
    with pytest.raises(InputError, match=r"config\.toml is not valid TOML"):
        write_report([run])
    (run / "config.toml").write_text("")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="has no 'run' event"):
        write_report([run])


def test_importing_the_report_needs_neither_charts_nor_pillow_nor_jinja() -> None:
    script = "import sys, boovae.report; print(*{'matplotlib', 'plotly', 'PIL', 'jinja2', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
