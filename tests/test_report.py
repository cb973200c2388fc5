"""The page about a run: what it says, what it refuses, and what it never does."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boovae.errors import InputError
from boovae.report import grid, save_grid, write_csv, write_report
from boovae.report.pictures import png

CONFIG = """\
dataset = "mnist"
method = "{method}"
replicas = 5
components = 15

[training]
epochs = 500
learning_rate = 5e-4

[model]
net = "mlp"
latent_dim = 40
"""


def make_run(
    folder: Path,
    tasks: int = 10,
    done: int | None = None,
    replicas: int = 5,
    method: str = "boo",
    names: list[str] | None = None,
    epochs: int = 16,
    forget: float = 0.7,
    accuracy: float = 0.989,
    effective: float = 180.0,
    frozen: int | None = None,
) -> Path:
    """Write a run folder as docs/run-folder.md describes it, with numbers as a real run has them."""
    done = tasks if done is None else done
    names = names or [f"digit {t}" for t in range(tasks)]
    rng = np.random.default_rng(3)
    seeds = list(range(replicas))
    events: list[dict[str, Any]] = [
        {
            "event": "run",
            "format": 1,
            "replicas": replicas,
            "seeds": seeds,
            "method": method,
            "dataset": "mnist",
        }
        | {"shape": [28, 28], "tasks": names, "split": "by class"}
    ]
    learned: list[np.ndarray[Any, Any]] = []
    for task in range(min(done + 1, tasks)):
        images = {"train": 5000, "valid": 1000, "test": 1000}
        events.append({"event": "task_start", "task": task, "name": names[task], "classes": [task], "images": images})
        events += _epoch_events(rng, task, epochs, replicas)
        if task == done:
            break  # a run stopped in the middle of a task
        if frozen is not None and task == 4:
            diverged = {"event": "divergence", "task": task, "epoch": 7, "replica": frozen}
            events += [diverged | {"retry": retry} for retry in (1, 2, "frozen")]
        per_replica = [[epochs] * replicas, [epochs - 9] * replicas, [101.5] * replicas]
        events.append(
            {"event": "task_end", "task": task}
            | dict(zip(("epochs", "best_epoch", "best_loss"), per_replica, strict=True))
        )
        learned.append(75 + 20 * rng.random() + rng.normal(0, 0.6, replicas))
        events.append(_evaluation(rng, learned, forget, accuracy, effective, frozen if task >= 4 else None))
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(method=method))
    environment = {
        "boovae": "0.1.0",
        "python": "3.11.7",
        "torch": "2.6.0",
        "device": "cpu",
        "command": "boovae train",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    times = [
        {"event": "task", "task": t, "train_seconds": 31.5 + t, "evaluate_seconds": 4.2 + t, "steps": 800}
        for t in range(done)
    ]
    (folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    for task in range(done):
        save_grid(folder / "samples" / f"task_{task:02d}.png", rng.random((36, 784)), (28, 28), scale=1)
    return folder


def _epoch_events(rng: np.random.Generator, task: int, epochs: int, replicas: int) -> list[dict[str, Any]]:
    events = []
    for epoch in range(epochs):
        kl = 25 - 8 * np.exp(-epoch / 6) + rng.normal(0, 0.2, replicas)
        reconstruction = 72 + (400 if task == 0 else 90) * np.exp(-epoch / 4) + rng.normal(0, 0.6, replicas)
        valid = {"loss": kl + reconstruction + 2, "reconstruction": reconstruction + 2, "kl": kl}
        train = {"loss": kl + reconstruction, "reconstruction": reconstruction, "kl": kl}
        active = [epoch < epochs - r for r in range(replicas)]
        events.append(
            {"event": "epoch", "task": task, "epoch": epoch}
            | {
                "train": _lists(train),
                "valid": _lists(valid),
                "learning_rate": [5e-4] * replicas,
                "active": active,
            }
        )
    return events


def _evaluation(
    rng: np.random.Generator,
    learned: list[np.ndarray[Any, Any]],
    forget: float,
    accuracy: float,
    effective: float,
    frozen: int | None,
) -> dict[str, Any]:
    seen, replicas = len(learned), len(learned[0])
    age = np.arange(seen)[::-1, None]
    lost = forget * age + rng.normal(0, 0.3, (seen, replicas)) * (age > 0)
    own = np.array(learned) + lost
    dilution = np.log(seen / np.arange(1, seen + 1))
    pooled = own + np.log(seen)
    shares = rng.dirichlet(np.full(seen, 60 / (1 + 8 * forget)), replicas)
    entropy = -(shares * np.log(np.maximum(shares, 1e-12))).sum(axis=1)
    nll = pooled.mean(axis=0)
    if frozen is not None:
        nll[frozen] = np.nan
    memory = {"pseudo_inputs": 15 * seen * 784 * 4, "component_weights": 15 * seen * 4}
    samples = np.full((seen, replicas), effective)
    return {
        "event": "evaluation",
        "task": seen - 1,
        "nll": _lists({"pooled": nll, "per_task": pooled, "own": own, "effective_samples": samples})
        | {"samples": 5000},
        "diversity": _lists(
            {
                "table": np.log(seen) - entropy,
                "uniform": entropy * 0,
                "bernoulli": entropy * 0,
                "proportions": shares,
            }
        )
        | {"classes": list(range(seen)), "samples": 10000},
        "frechet": {"pooled": (20 + rng.random(replicas)).tolist(), "features": "classifier"},
        "classifier": {"accuracy": accuracy, "digest": "5f1c"},
        "forgetting": _lists({"own": lost, "pooled": lost + dilution[:, None], "dilution": dilution}),
        "ledger": {
            "memory": memory,
            "memory_bytes": sum(memory.values()),
            "images_stored": 0,
            "parameters": 699_080,
        },
    }


def _lists(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Turn arrays into lists with null where a number is not finite."""
    return {key: np.where(np.isfinite(a), a, None).tolist() for key, a in arrays.items()}  # type: ignore[call-overload]


class _Page(HTMLParser):
    """The tags of a page and whether they nest."""

    VOID = frozenset({"meta", "img", "br", "use", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


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
    page = _Page(full_page)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed")
        for key in ("src", "href", "xlink:href", "srcset", "action"):
            value = attributes.get(key) or ""
            assert not value or value.startswith(("data:image/png;base64,", "#"))
    assert "url(http" not in full_page
    assert "@import" not in full_page
    assert "http://" not in full_page.replace("http://www.w3.org/", "")


def test_page_is_well_formed_and_every_picture_has_a_text(full_page: str) -> None:
    page = _Page(full_page)
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")
    assert all(attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg")
    assert sum(tag == "img" for tag, _ in page.tags) == 10
    assert sum(tag == "svg" for tag, _ in page.tags) == 5


def test_page_contains_the_numbers_of_the_run(full_run: Path, full_page: str) -> None:
    last = json.loads((full_run / "metrics.jsonl").read_text().splitlines()[-1])
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
    assert "<script" not in page
    assert "<b>&run" not in page
    assert "&lt;script&gt;" in page
    assert "{{ 7*7 }}" in page
    assert _Page(page).open == []


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
    assert ("<svg" in page) == (epochs > 0)


def test_run_of_one_task_and_one_replica_has_no_deviation(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", tasks=1, replicas=1)]).read_text(encoding="utf-8")
    assert "±" not in page.replace("mean ± standard deviation", "")
    assert "needs at least two tasks" in page


def test_measures_that_were_not_taken_are_left_blank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {k: v for k, v in e.items() if k in ("event", "task", "nll")} if e["event"] == "evaluation" else e
        for e in lines
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))
    page = write_report([run]).read_text(encoding="utf-8")
    assert "not measured" in page
    assert "Classes of the samples" not in page
    assert "nan" not in re.sub(r"base64,[^\"]*", "", page)


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
    page = _Page(text)
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


def test_a_run_without_components_has_no_such_panel(full_page: str) -> None:
    assert "Learned components" not in full_page


def test_the_components_of_two_runs_share_no_ids(tmp_path: Path) -> None:
    runs = [add_components(make_run(tmp_path / name, tasks=2)) for name in ("one", "two")]
    page = _Page(write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert sum(tag == "svg" for tag, _ in page.tags) == 5 + 2
    assert sum(tag == "summary" for tag, _ in page.tags) == 2 + 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[1, 2", "Expecting"),
        ("[]", "it has no list of components"),
        ('{"components": {}}', "it has no list of components"),
        ('{"components": [7]}', "component 0: 'component' must be a whole number"),
        ('{"components": [{"task": 0, "component": 0, "pseudo_input": "PHN2Zz4="}]}', "component 0: 'pseudo_input' is"),
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
        ({"event": "components", "task": 0, "sizes": 3}, "'sizes' must be a list"),
        ({"event": "components", "task": 0, "sizes": [1], "divergence": [[1.0]]}, r"'divergence' has shape \(1, 1\)"),
        ({"event": "components", "task": -1, "kept": [1] * 5}, "'task' must be a whole number"),
        ({"event": "components", "task": 0, "kept": [1]}, r"'kept' has shape \(1,\), expected \(5,\)"),
        ({"event": "prune", "task": 0, "dropped": ["x"] * 5}, "'dropped' is not a list of numbers"),
        ({"event": "note", "text": "hm"}, "'task' must be a whole number"),
    ],
)
def test_wrong_events_about_components_are_named(tmp_path: Path, event: dict[str, Any], message: str) -> None:
    run = make_run(tmp_path / "run", tasks=1, epochs=1)
    log(run, event)
    with pytest.raises(InputError, match=rf"metrics\.jsonl, line \d+: {message}"):
        write_report([run])


def test_two_runs_stand_side_by_side(full_run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "standard_mnist", tasks=6, method="standard", forget=9.0)
    page = write_report([full_run, other], tmp_path / "both.html").read_text(encoding="utf-8")
    for text in ("boo_mnist", "standard_mnist", "different numbers of tasks", "var(--s0)", "var(--s1)"):
        assert text in page
    assert page.count("<svg") == 5  # the runs share the charts
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


def test_warnings_are_in_plain_words(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", forget=4.0, accuracy=0.81, effective=3.2, frozen=1)
    page = write_report([run]).read_text(encoding="utf-8")
    assert "Replica 2 (seed 1) diverged in task “digit 4” and was frozen there" in page
    assert "right on only 81.0 % of the test images" in page
    assert "down to 3.2 of 5,000" in page
    assert "More than 20 nats were forgotten of tasks “digit 0”, “digit 1”, “digit 2”, “digit 3” " in page


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
        write_report([])
    with pytest.raises(InputError, match="nowhere is not a folder: give a run folder"):
        write_report([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty is not a run folder"):
        write_report([tmp_path / "empty"])
    run = make_run(tmp_path / "run", tasks=1, epochs=1)
    with pytest.raises(InputError, match="several runs need a file"):
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


def test_importing_the_report_needs_neither_matplotlib_nor_pillow_nor_jinja() -> None:
    script = "import sys, boovae.report; print(*{'matplotlib', 'PIL', 'jinja2', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
