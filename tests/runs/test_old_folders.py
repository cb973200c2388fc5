"""Run folders of earlier versions open in this one: `0.1.0`, and `0.1.0-sections`, whose settings are in tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from boovae import BooVAE
from boovae.cli.main import main
from boovae.config import Settings
from boovae.runs.reading import read_record
from boovae.runs.run import Run
from run_folders import events

FOLDERS = sorted(path.name for path in (Path(__file__).parent / "old_folders").iterdir())


@pytest.fixture(params=FOLDERS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of an old run folder."""
    return Path(shutil.copytree(Path(__file__).parent / "old_folders" / request.param, tmp_path / "run"))


def test_its_settings_are_those_it_was_made_with(old: Path) -> None:
    with Run.open(old) as run:
        settings: Settings = run.settings
    assert (settings.method, settings.data.limit, settings.model.net) == ("boo+distill", 12, "mlp:8")
    assert dict(settings.own)["boo_steps"] == 2


def test_its_numbers_are_read_as_they_were_written(old: Path) -> None:
    record = read_record(old)
    assert record.finished
    assert record.notes == []
    assert (len(record.samples), len(record.components), record.config["epochs"]) == (2, 4, "2")
    assert record.latents is not None
    last, written = record.evaluations[-1], events(old, "evaluation")[-1]
    assert last.nll is not None
    assert last.nll.per_task.tolist() == written["nll"]["per_task"]
    assert last.frechet is not None
    assert last.frechet.sets["classifier"].frechet.tolist() == written["frechet"]["pooled"]


def test_it_is_reported_measured_and_sampled(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(old), "--csv", str(old / "run.csv")])
    assert "Where it stands" in (old / "report.html").read_text(encoding="utf-8")
    assert "2,nll,,0,45.107802" in (old / "run.csv").read_text()
    capsys.readouterr()
    main(["eval", str(old), "--metric", "nll", "--json", "--quiet", "--device", "cpu"])
    found = json.loads(capsys.readouterr().out)
    assert found["nll"]["pooled"] == pytest.approx(events(old, "evaluation")[-1]["nll"]["pooled"], rel=1e-4)
    main(["sample", str(old), "--n", "3", "--out", str(old / "samples.npy"), "--device", "cpu"])
    assert np.load(old / "samples.npy").shape == (3, 8, 8)


def test_it_learns_one_more_task(old: Path) -> None:
    before = (old / "metrics.jsonl").read_bytes()
    main(["extend", str(old), "--metric", "nll", "--quiet", "--device", "cpu"])
    assert (old / "metrics.jsonl").read_bytes().startswith(before)
    assert [event["seen"] for event in events(old, "evaluation")] == [1, 2, 3]
    assert read_record(old).finished


def test_it_is_loaded_as_an_estimator(old: Path) -> None:
    model = BooVAE.load(old, device="cpu")
    assert model.n_tasks_ == 2
    assert model.sample(4).shape == (4, 8, 8)
