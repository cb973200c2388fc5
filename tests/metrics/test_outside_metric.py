"""A metric in a file of its own is measured, kept and shown wherever those of the package are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from boovae.runs.reading import read_record
from boovae.runs.trackers import numbers_of
from run_folders import events

MMD = '''
import torch

from boovae.metrics import Metric, register


@register
class MMD(Metric):
    """Squared maximum mean discrepancy between samples and test images, with a Gaussian kernel."""

    name = "mmd"
    title = "MMD"
    needs = frozenset({"images"})

    def measure(self, context):
        images = torch.cat([task.test.images for task in context.present]).to(context.samples)

        def kernel(a, b):
            return (-torch.cdist(a, b).square() / images.shape[1]).exp().mean()

        own = kernel(images, images)
        return {"mmd": torch.stack([own + kernel(x, x) - 2 * kernel(x, images) for x in context.samples])}
'''
#: A run that takes a moment.
TINY = [
    "--dataset",
    "digits",
    "--limit",
    "12",
    "--tasks",
    "2",
    "--epochs",
    "2",
    "--net",
    "mlp:8",
    "--latent-dim",
    "2",
    "--components",
    "2",
    "--samples",
    "4",
    "--generated",
    "20",
    "--replicas",
    "2",
    "--boo-steps",
    "2",
    "--distill-latents",
    "4",
    "--device",
    "cpu",
]


def boovae(*words: str, file: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "BOOVAE_METHODS"}
    environment |= {"PYTHONPATH": ":".join(sys.path)} | ({"BOOVAE_METHODS": str(file)} if file else {})
    command = [sys.executable, "-m", "boovae", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metric") / "mmd.py"
    path.write_text(MMD)
    return path


@pytest.fixture(scope="module")
def ended(file: Path) -> subprocess.CompletedProcess[str]:
    words = ["train", *TINY, "--metric", "nll", "mmd", "--out", str(file.parent / "run")]
    return boovae(*words, file=file)


@pytest.fixture
def run(file: Path, ended: subprocess.CompletedProcess[str]) -> Path:
    assert ended.returncode == 0, ended.stderr
    return file.parent / "run"


def test_it_is_in_the_log_of_every_task(run: Path) -> None:
    found = [event["others"]["mmd"]["mmd"] for event in events(run, "evaluation")]
    assert [len(values) for values in found] == [2, 2]
    assert all(0 < value < 2 for values in found for value in values)
    assert read_record(run).evaluations[-1].others["mmd"]["mmd"].tolist() == found[-1]


def test_it_has_a_column_on_the_terminal(run: Path, ended: subprocess.CompletedProcess[str]) -> None:
    head, *rows = ended.stdout.splitlines()
    assert "MMD" in head
    assert "±" in rows[0][head.index("MMD") :]


def test_trackers_get_it(run: Path) -> None:
    event = events(run, "evaluation")[-1]
    found = numbers_of(event, 0, [0, 1])
    assert found is not None
    assert [found.values[f"mmd/seed_{seed}"] for seed in (0, 1)] == event["others"]["mmd"]["mmd"]


@pytest.mark.parametrize("known", [True, False])
def test_report_and_csv_show_it_even_where_its_file_is_gone(run: Path, file: Path, known: bool, tmp_path: Path) -> None:
    table, page = tmp_path / "run.csv", tmp_path / "run.html"
    done = boovae("report", str(run), "--csv", str(table), "--out", str(page), file=file if known else None)
    assert done.returncode == 0, done.stderr
    (value, _) = events(run, "evaluation")[-1]["others"]["mmd"]["mmd"]
    assert f"2,mmd,,0,{value}" in table.read_text()
    assert f"<figcaption>{'MMD' if known else 'mmd'}</figcaption>" in page.read_text(encoding="utf-8")


def test_eval_measures_it_again(run: Path, file: Path) -> None:
    done = boovae("eval", str(run), "--metric", "mmd", "--json", "--quiet", "--device", "cpu", file=file)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["others"] == events(run, "evaluation")[-1]["others"]


def test_a_name_that_nobody_has_is_refused_with_the_nearest(file: Path, tmp_path: Path) -> None:
    done = boovae("train", *TINY, "--metric", "mmdd", "--out", str(tmp_path / "run"), file=file)
    assert done.returncode == 2
    assert "unknown metric 'mmdd': did you mean 'mmd'?" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('name = "mmd"', 'name = "nll"'), "'nll', the name of a built-in metric"),
        (('name = "mmd"', 'name = "m m"'), "use letters, digits"),
        (("for x in context.samples])", "for x in context.samples[:1]])"), "it must have a number for each of 2 repl"),
    ],
)
def test_what_could_not_be_kept_is_refused(change: tuple[str, str], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(MMD.replace(*change))
    done = boovae("train", *TINY, "--metric", "mmd", "--quiet", "--out", str(tmp_path / "run"), file=path)
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr
