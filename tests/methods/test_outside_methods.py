"""A method in a file of its own: every command knows it once `BOOVAE_METHODS` names the file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from bench_parts import GIVEN
from boovae.config.section import AtLeastOne, NotNegative, Section
from boovae.errors import InputError
from boovae.methods import METHODS, Method, make_method, register
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
    assert f"{copy}, which defines 'anchor', as another file does; rename one" in ended.stderr


def test_a_changed_file_makes_its_cells_run_again(anchor: Path) -> None:
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


SHORT = ["--tasks", "2", "--epochs", "2", "--limit", "20", "--samples", "10", "--device", "cpu"]


def losses(run: Path) -> list[dict[str, list[float]]]:
    """Return the training losses of a run, epoch by epoch."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event["train"] for event in events if event["event"] == "epoch"]


def test_its_settings_are_flags(anchor: Path, tmp_path: Path) -> None:
    run = [*SHORT, "--generated", "20", "--method", "boo+anchor", "--metric", "nll", "--quiet"]

    def learned(flags: str) -> list[dict[str, list[float]]]:
        out = tmp_path / flags.replace(" ", "_")
        ended = boovae("train", *run, *flags.split(), "--out", str(out), methods=anchor)
        assert ended.returncode == 0, ended.stderr
        return losses(out)

    usual = learned("--anchor-pull=100 --anchor-norm squares --anchor-after 1")
    for flags in ("--anchor-pull 1e4", "--anchor-norm sizes", "--anchor-after 2"):
        other = learned(flags)
        assert usual[:2] == other[:2]  # the first task has nothing to hold to
        assert usual[-1] != other[-1]


def test_its_settings_have_their_place_in_the_help(anchor: Path) -> None:
    said = boovae("train", "--method", "anchor", "--help", methods=anchor).stdout
    for text in ("--anchor-pull FLOAT", "--anchor-norm {squares,sizes}", "--anchor-after INT"):
        assert text in said
    assert "How the decoder's first layer is held." in said
    assert "Weight of the penalty. (default: 100.0)" in said
    assert "--anchor-pull" in boovae("train", "--help-all", methods=anchor).stdout
    assert "--anchor-pull" not in boovae("train", "--method", "boo", "--help", methods=anchor).stdout


def test_it_is_tuned(anchor: Path, tmp_path: Path) -> None:
    ended = boovae("tune", "anchor", *SHORT, "--seeds-each", "1", "--json", methods=anchor)
    assert [trial["value"] for trial in json.loads(ended.stdout)] == pytest.approx([1.0, 10.0, 100.0, 1e3, 1e4])
    recipe = tmp_path / "recipe.toml"
    words = ["--setting", "anchor_pull", "--values", "3", "30", "--seeds-each", "1", "--recipe", str(recipe)]
    ended = boovae("tune", "boo+anchor", *SHORT, *words, methods=anchor)
    assert ended.returncode == 0, ended.stderr
    assert "anchor_pull = 3" in recipe.read_text()
    ended = boovae("tune", "anchor", *SHORT, "--setting", "anchor_after", methods=anchor)
    assert ended.returncode == 2
    assert "method anchor has no such strength; it has anchor_pull" in ended.stderr


def printed(program: str, anchor: Path) -> list[str]:
    """Return the lines that a program prints which knows the method."""
    environment = {**os.environ, "BOOVAE_METHODS": str(anchor)}
    return subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).splitlines()


def test_its_settings_come_from_flags_files_and_variants(anchor: Path, tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text(
        'method = "anchor"\nanchor_pull = 3\n[method_settings]\nanchor_norm = "sizes"\nanchor_after = 2\n'
    )
    said = printed(
        f"""
from pathlib import Path
from boovae.cli.main import parsed
from boovae.methods import resolve
from boovae.bench.cells import plan
file = Path({str(config)!r})
print(resolve({{}}, file).own)
print(resolve({{"anchor_pull": 7}}, file).own)
print(parsed("train", ["--config", str(file), "--anchor-pull", "7"])[1] == resolve({{"anchor_pull": 7}}, file))
print(resolve({{"method": "boo"}}, file).own == resolve({{"method": "boo"}}).own)
methods = ["boo", "anchor", "same=anchor:anchor_pull=100", "strong=anchor:anchor_pull=1000,anchor_norm=sizes"]
boo, usual, same, strong = plan(["digits"], methods, {{"anchor_after": 2}}, 2)
print(usual.settings.own, strong.settings.own)
print(usual.name == same.name, usual.name != strong.name, [name for name, _ in boo.settings.own if "anchor" in name])
""",
        anchor,
    )
    file = "('anchor_after', 2), ('anchor_norm', 'sizes'), ('anchor_pull'"
    assert said[0] == f"({file}, 3.0))"
    assert said[1] == f"({file}, 7.0))"
    assert said[2:4] == ["True", "True"]
    assert said[4] == f"(('anchor_after', 2),) ({file}, 1000.0))"
    assert said[5] == "True True []"


def test_a_file_that_postpones_its_annotations_is_read(anchor: Path) -> None:
    anchor.write_text(f"from __future__ import annotations\n{anchor.read_text()}")
    program = "from boovae.methods import resolve; print(resolve({'method': 'anchor', 'anchor_after': 3}).own)"
    assert printed(program, anchor) == ["(('anchor_after', 3),)"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("moved.square()", "moved.square() / 2", "was started with another version of the file that defines anchor"),
        ("= 100.0", "= 200.0", "--anchor-pull 100.0 there, the default here"),
    ],
)
def test_a_run_is_not_continued_with_another_version_of_the_file(
    before: str, after: str, said: str, anchor: Path, tmp_path: Path
) -> None:
    words = ["train", "--method", "anchor", "--tasks", "1", "--epochs", "1", "--limit", "20", "--samples", "5"]
    words += ["--generated", "20", "--device", "cpu", "--quiet", "--out", str(tmp_path / "run")]
    assert boovae(*words, methods=anchor).returncode == 0
    assert boovae(*words, methods=anchor).returncode == 0  # it is finished
    anchor.write_text(anchor.read_text().replace(before, after))
    ended = boovae(*words, methods=anchor)
    assert ended.returncode == 2
    assert said in ended.stderr


REFUSED = {
    "--method anchor --anchor-pul 3": "--anchor-pull FLOAT",  # perhaps you meant
    "--method boo --anchor-pull 3": "--anchor-pull is a setting of method 'anchor', and 'boo' does not read it",
    "--method anchor --anchor-pull inf": "--anchor-pull is inf; it must be finite",
    "--method anchor --anchor-pull=-1": "--anchor-pull is -1.0; it must be a number of at least 0",
    "--method anchor --anchor-after 0": "--anchor-after is 0; it must be a whole number of at least 1",
    "--method anchor --anchor-after 1.5": "--anchor-after",
    "--method anchor --anchor-norm squars": "invalid choice 'squars' for argument '--anchor-norm'",
    "--method anchor --strengths anchor_pull=3": "each setting of a method has its own flag",
    "--method anchor --config own.toml": "unknown value for --anchor-norm 'squars': did you mean 'squares'?",
}
ALL_REFUSED = """
import contextlib, io, json, sys
from boovae.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main(["train", *words.split(), "--out", "run"])
        except SystemExit as stop:
            print(json.dumps([stop.code, errors.getvalue()]))
"""


def test_a_setting_that_it_cannot_have_is_refused_before_training(anchor: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('anchor_norm = "squars"\n')
    words = [sys.executable, "-c", ALL_REFUSED, json.dumps(list(REFUSED))]
    environment = {**os.environ, "BOOVAE_METHODS": str(anchor)}
    said = subprocess.check_output(words, cwd=tmp_path, env=environment, text=True).splitlines()
    for complaint, (code, errors) in zip(REFUSED.values(), map(json.loads, said), strict=True):
        assert code == 2
        assert complaint in errors
    assert not (tmp_path / "run").exists()


def section(annotation: Any, name: str = "own_pull", default: Any = 1.0) -> Any:
    return make_dataclass("OwnSettings", [(name, annotation, field(default=default))], bases=(Section,), frozen=True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sections": (section(float, "ewc_strength"),)}, "OwnSettings has 'ewc_strength', a setting of ewc; choose"),
        ({"sections": (section(int, "epochs", 1),)}, "OwnSettings has 'epochs', a setting of boovae; choose another"),
        ({"sections": (dict,)}, "use frozen dataclasses derived from Section"),
        ({"sections": ("own_pull",)}, "use frozen dataclasses derived from Section"),
        ({"sections": (section(NotNegative, default=-1.0),)}, "own_pull is -1.0; it must be a number of at least 0"),
        ({"sections": (section(float, default="much"),)}, "own_pull is 'much'; it must be a number"),
        ({"sections": (section(float),), "search": {"own_pul": (1.0,)}}, "unknown setting in Own.search 'own_pul'"),
        ({"search": {"own_pull": (1.0,)}}, "unknown setting in Own.search 'own_pull'"),
        ({"sections": (section(NotNegative),), "search": {"own_pull": (1.0, -1.0)}}, "own_pull is -1.0; it must be"),
        ({"sections": (section(AtLeastOne, default=1),), "search": {"own_pull": (1.5,)}}, "own_pull is 1.5; it must"),
        ({"name": "a+b"}, "use letters, digits, '_' and '-'"),
        ({"name": "ewc"}, "which is built into boovae; choose another name"),
        ({"memory": lambda self: {}}, "Own.memory would be replaced; fill the dictionary self.memory"),
    ],
)
def test_a_class_that_could_not_be_used_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=re.escape(complaint)):
        register(type("Own", (Method,), {"name": "own", **changes}))
    assert "own" not in METHODS


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
