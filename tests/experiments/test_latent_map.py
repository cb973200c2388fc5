"""The map of a plane of latents: its divergence against independent truth, and what the command leaves behind."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import distributions

from boovae.cli.main import main
from boovae.data import ImageSpec, Stream
from boovae.experiments.latent_map import aggregated, divergence_to_prior, draw, make_map, prior_log_prob
from boovae.model.distributions import DiagonalNormal
from boovae.training.trainer import Trainer
from conftest import tiny, trained

SMALL = ["--dataset", "digits", "--limit", "24", "--net", "mlp:16", "--epochs", "2", "--batch-size", "8"]


def test_the_divergence_of_one_gaussian_is_known() -> None:
    """If all images have the same posterior, q̂ is one Gaussian, and its KL to N(0, I) has a closed form."""
    trainer = Trainer(tiny(latent_dim=2, replicas=2), ImageSpec((8, 8)))
    mean, deviation = torch.tensor([1.0, -0.5]), torch.tensor([0.4, 1.2])
    posterior = DiagonalNormal(mean.expand(2, 30, 2), 2 * deviation.log().expand(2, 30, 2))
    one, other = distributions.Normal(mean, deviation), distributions.Normal(torch.zeros(2), torch.ones(2))
    truth = distributions.kl_divergence(one, other).sum().item()
    for found in divergence_to_prior(trainer, posterior, 20_000).tolist():
        assert found == pytest.approx(truth, abs=0.03)


def test_densities_add_up_to_one_on_the_map(digits: Stream) -> None:
    trainer = trained(tiny(method="boo", latent_dim=2, tasks=2), digits)
    found = make_map(trainer, digits[:2], samples=500)
    cell = (2 * found.extent / (len(found.prior) - 1)) ** 2
    assert found.aggregated.sum() * cell == pytest.approx(1, abs=0.03)
    assert found.prior.sum() * cell == pytest.approx(1, abs=0.03)
    assert found.codes.shape == (len(found.labels), 2)
    assert set(found.labels.tolist()) == {0, 1}
    assert len(draw([found]).axes) == 3 * 2  # codes, aggregated posterior, prior; one and two tasks


def test_the_aggregated_posterior_is_the_mean_of_the_posteriors() -> None:
    posterior = DiagonalNormal(*torch.randn(2, 3, 7, 2))  # three replicas, seven images
    z = torch.randn(3, 5, 2)
    scale = (0.5 * posterior.log_variance).exp().unsqueeze(1)
    each = distributions.Normal(posterior.mean.unsqueeze(1), scale).log_prob(z.unsqueeze(2)).sum(-1)
    torch.testing.assert_close(aggregated(posterior, z), each.logsumexp(2) - math.log(7))


def test_the_map_shows_each_replicas_own_prior(digits: Stream) -> None:
    trainer = trained(tiny(method="boo", latent_dim=2, tasks=1), digits)
    z = torch.randn(2, 40, 2)
    both = prior_log_prob(trainer, z)
    weights, mean, log_variance = (
        trainer.replicas.buffers[f"prior.{name}"][1, 0] for name in ("log_weights", "mean", "log_variance")
    )
    parts = distributions.Independent(distributions.Normal(mean, (0.5 * log_variance).exp()), 1)
    truth = distributions.MixtureSameFamily(distributions.Categorical(logits=weights), parts)
    torch.testing.assert_close(both[1], truth.log_prob(z[1]), rtol=1e-4, atol=1e-4)


def test_the_command_writes_table_and_figure(tmp_path: Path) -> None:
    words = ["latent-map", *SMALL, "--tasks", "2", "--replicas", "2", "--components", "3", "--boo-steps", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "boovae", *words, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "latent_map.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert len(rows) == 2 * 2 * 2  # methods, tasks seen, seeds
    assert all(math.isfinite(float(row["kl"])) for row in rows)
    assert {row["method"] for row in rows} == {"standard", "boo+distill"}
    picture = Image.open(tmp_path / "latent_map.png").convert("RGB")
    assert min(picture.size) > 300
    assert len(picture.getcolors(1 << 24)) > 100  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--latent-dim", "3"], "--latent-dim is 3; it must be 2, the dimensions of a map"),
        (["--method", "standard"], "name a method to compare with it"),
        (["--method", "multihead"], "each task has its own encoder"),
        (["--tasks", "11"], "digits has 10 tasks; use at most that many"),
    ],
)
def test_wrong_arguments_say_what_to_do(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["latent-map", "--out", str(tmp_path), *SMALL, *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_with_another_dimension_is_refused_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.toml").write_text("latent_dim = 5\n")
    with pytest.raises(SystemExit):
        main(["latent-map", "--config", str(tmp_path / "settings.toml"), "--out", str(tmp_path)])
    assert "--latent-dim is 5" in capsys.readouterr().err
