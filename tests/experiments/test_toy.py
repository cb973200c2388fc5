"""The toy problems: who runs away, who does not, and what the command leaves behind."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from boovae.cli.main import main
from boovae.experiments.options import ToyOptions
from boovae.experiments.toy import Fit, make_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def fits() -> dict[str, Fit]:
    return {
        name: Fit("gaussians", name, ToyOptions(steps=80, replicas=2), CPU) for name in ("literal", "floor", "forward")
    }


def test_both_safeguards_find_the_second_group_and_the_literal_objective_runs_away(fits: dict[str, Fit]) -> None:
    for name in ("floor", "forward"):
        assert (fits[name].divergence[1] < 0.25).all()
        sides = fits[name].mixtures[1].mean[:, :, 0].sort(1).values
        torch.testing.assert_close(sides, torch.tensor([[-2.0, 2.0]] * 2), rtol=0, atol=0.3)
    assert (fits["literal"].divergence[1] > 3).all()
    runaway = fits["literal"].mixtures[1].mean[:, 1, 0].abs()
    assert (runaway > 2.8 + 3 * 0.35).all()  # beyond the outermost Gaussian


def test_the_divergence_is_the_integral(fits: dict[str, Fit]) -> None:
    """By quadrature on a fine grid, both directions."""
    line = torch.linspace(-9, 9, 700, dtype=torch.float64)
    z = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).flatten(0, 1)
    fit, cell = fits["forward"], float(line[1] - line[0]) ** 2
    mixture = type(fit.mixtures[1])(*(part[0].double() for part in fit.mixtures[1]))
    target = type(mixture)(*(part.double() for part in make_target("gaussians")))
    log_m, log_t = mixture.log_prob(z), target.log_prob(z)
    assert (log_t.exp().sum() * cell).item() == pytest.approx(1, abs=1e-6)
    forward, reverse = (log_t.exp() * (log_t - log_m)).sum() * cell, (log_m.exp() * (log_m - log_t)).sum() * cell
    assert fit.divergence[1, 0].item() == pytest.approx(forward.item(), abs=0.02)
    assert fit.reverse[1, 0].item() == pytest.approx(reverse.item(), abs=0.02)


def test_a_seed_among_others_equals_the_same_seed_alone(fits: dict[str, Fit]) -> None:
    alone = Fit("gaussians", "forward", ToyOptions(steps=80, replicas=1, seed=1), CPU)
    torch.testing.assert_close(alone.mixtures[1].mean[0], fits["forward"].mixtures[1].mean[1], rtol=1e-4, atol=1e-4)


def test_more_components_come_nearer_to_the_ring() -> None:
    fit = Fit("ring", "forward", ToyOptions(steps=40, replicas=1, components=5), CPU)
    assert fit.divergence[4].item() < fit.divergence[1].item() < fit.divergence[0].item()
    assert fit.divergence[4].item() < 1


def test_the_command_writes_table_and_figure(tmp_path: Path) -> None:
    words = ["toy", "--out", tmp_path / "toy", "--steps", "5", "--replicas", "2", "--components", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "boovae", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "toy" / "toy.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert len(rows) == len(json.loads(done.stdout)) == 2 * 4 * 2 * 2  # targets, objectives, components, seeds
    assert any(line.startswith("# command: boovae toy") for line in lines)
    picture = Image.open(tmp_path / "toy" / "toy.png").convert("L")
    assert min(picture.size) > 300
    low, high = picture.getextrema()
    assert low < 50 < 200 < high  # type: ignore[operator]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--components", "1"], "--components is 1; it must be a whole number of at least 2"),
        (["--steps", "0"], "--steps is 0"),
        (["--target", "ring", "ring"], "--target is ring ring; name each once"),
        (["--objective", "box", "floor", "box"], "--objective is box floor box; name each once"),
        (["--replicas", "0"], "--replicas is 0; it must be a whole number of at least 1"),
        (["--device", "toaster"], "--device toaster is unknown"),
    ],
)
def test_wrong_arguments_say_what_to_do(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["toy", "--out", str(tmp_path), *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
