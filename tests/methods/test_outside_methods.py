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
from boovae.methods import Method, make_method, register
from conftest import tiny

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-method.md"


@pytest.fixture
def anchor(tmp_path: Path) -> Path:
    """The method of the page, as a reader would save it."""
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    path = tmp_path / "anchor.py"
    path.write_text(f"from boovae.runs.train import train  # a file may import what it likes\n{match.group(1)}")
    return path


def boovae(*words: str, methods: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BOOVAE_METHODS": str(methods)}
    return subprocess.run(
        [sys.executable, "-m", "boovae", *words], env=environment, capture_output=True, text=True, check=False
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


def test_two_files_with_one_method_are_refused(anchor: Path) -> None:
    copy = anchor.with_name("copy.py")
    copy.write_text(anchor.read_text())
    ended = boovae("methods", methods=Path(f"{anchor}{os.pathsep}{copy}"))
    assert ended.returncode == 2
    assert f"{copy}, which has a method 'anchor' as another file does; rename one" in ended.stderr


def test_a_changed_file_asks_for_its_cells_anew(anchor: Path) -> None:
    program = "from boovae.bench.cells import plan\n"
    program += "print(*(cell.name for cell in plan(['digits'], ['boo', 'boo+anchor'], {}, 2)))"

    def names() -> list[str]:
        environment = {**os.environ, "BOOVAE_METHODS": str(anchor)}
        return subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).split()

    before = names()
    assert names() == before
    anchor.write_text(anchor.read_text().replace("100.0", "200.0"))
    after = names()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_its_strengths_are_set_tuned_and_compared_like_settings(anchor: Path, tmp_path: Path) -> None:
    short = ["--tasks", "2", "--epochs", "2", "--limit", "20", "--samples", "10", "--device", "cpu"]
    run = [*short, "--generated", "20", "--method", "boo+anchor", "--quiet"]
    losses = []
    for strength in ("anchor_pull=0", "anchor_pull=1e4"):
        out = tmp_path / strength
        ended = boovae("train", *run, "--strengths", strength, "--out", str(out), methods=anchor)
        assert ended.returncode == 0, ended.stderr
        events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses.append([event["train"] for event in events if event["event"] == "epoch"])
    assert losses[0][0] == losses[1][0]  # the first task has nothing to hold to
    assert losses[0][-1] != losses[1][-1]
    ended = boovae("tune", "anchor", *short, "--seeds-each", "1", "--json", methods=anchor)
    assert [trial["value"] for trial in json.loads(ended.stdout)] == pytest.approx([1.0, 10.0, 100.0, 1e3, 1e4])
    program = "from boovae.config import resolve; from boovae.bench.cells import plan\n"
    program += "usual, strong = plan(['digits'], ['anchor', 'strong=anchor:anchor_pull=1000'], {}, 2)\n"
    program += "print(usual.settings.strengths, *strong.settings.strengths, usual.name != strong.name)\n"
    program += "print(resolve({'method': 'anchor', 'anchor_pull': 3}) == "
    program += "resolve({'method': 'anchor', 'strengths': ['anchor_pull=3.0']}))"
    environment = {**os.environ, "BOOVAE_METHODS": str(anchor)}
    said = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert said == "() anchor_pull=1000.0 True\nTrue\n"


def test_a_flag_replaces_the_strength_it_names_and_a_bench_gives_each_method_its_own(
    anchor: Path, tmp_path: Path
) -> None:
    two = anchor.read_text().replace('{"anchor_pull": 100.0}', '{"anchor_pull": 100.0, "anchor_more": 0.0}')
    anchor.write_text(two)
    config = tmp_path / "own.toml"
    config.write_text('method = "anchor"\nanchor_pull = 3\nanchor_more = 2\n')
    program = f"""
from pathlib import Path
from boovae.cli.main import parsed
from boovae.methods import resolve
from boovae.bench.cells import plan
from boovae.runs.tune import _what
file = Path({str(config)!r})
print(*resolve({{"strengths": ["anchor_pull=7"]}}, file).strengths)
print(*parsed("train", ["--config", str(file), "--strengths", "anchor_pull=7"]).strengths)
boo, own, same = plan(["digits"], ["boo", "anchor", "same=anchor:anchor_pull=100"], {{"anchor_more": 5}}, 2)
print(boo.settings.strengths, *own.settings.strengths, own.name == same.name)
print(*_what(resolve({{"method": "anchor"}}), "anchor_more", None)[1])
"""
    environment = {**os.environ, "BOOVAE_METHODS": str(anchor)}
    said = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).splitlines()
    assert said[:2] == ["anchor_more=2.0 anchor_pull=7.0"] * 2
    assert said[2] == "() anchor_more=5.0 True"
    assert said[3] == "0.01 0.1 1.0 10.0 100.0"  # of a strength that is 0 there are no multiples


def test_a_run_is_not_continued_with_another_version_of_the_file(anchor: Path, tmp_path: Path) -> None:
    words = ["train", "--method", "anchor", "--tasks", "1", "--epochs", "1", "--limit", "20", "--samples", "5"]
    words += ["--generated", "20", "--device", "cpu", "--quiet", "--out", str(tmp_path / "run")]
    assert boovae(*words, methods=anchor).returncode == 0
    assert boovae(*words, methods=anchor).returncode == 0  # it is finished
    anchor.write_text(anchor.read_text().replace("100.0", "200.0"))
    ended = boovae(*words, methods=anchor)
    assert ended.returncode == 2
    assert "was begun with another version of the file that has anchor" in ended.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--method", "anchor", "--strengths", "anchor_pul=3"], "did you mean 'anchor_pull'"),
        (["--method", "boo", "--strengths", "anchor_pull=3"], "unknown strength of boo (--strengths) 'anchor_pull'"),
        (["--method", "anchor", "--strengths", "anchor_pull"], "it must be NAME=NUMBER"),
        (["--method", "anchor", "--strengths", "anchor_pull=inf"], "a finite one"),
        (["--method", "anchor", "--strengths", "anchor_pull=1", "anchor_pull=2"], "anchor_pull twice"),
    ],
)
def test_a_strength_that_is_none_is_refused_before_training(
    words: list[str], complaint: str, anchor: Path, tmp_path: Path
) -> None:
    ended = boovae("train", *words, "--out", str(tmp_path / "run"), methods=anchor)
    assert ended.returncode == 2
    assert complaint in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("strengths", "complaint"),
    [
        ({"ewc_strength": 1.0}, "'ewc_strength', a setting of boovae"),
        ({"a pull": 1.0}, "'a pull', no name that Python could give"),
        ({"pull": "much"}, "pull is 'much'; it must be a number"),
    ],
)
def test_strengths_that_could_not_be_told_from_settings_are_refused(
    strengths: dict[str, float], complaint: str
) -> None:
    with pytest.raises(InputError, match=re.escape(complaint)):
        register(type("Own", (Method,), {"name": "own", "strengths": strengths}))


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
