"""Settings that follow from the data: small tasks get small models and short schedules, large ones the paper's."""

from __future__ import annotations

import pytest

from boovae.config.choose import DataSummary, settings_for


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (DataSummary(150, 64, True), {"net": "mlp:128", "latent_dim": 10, "epochs": 70, "likelihood": "bernoulli"}),
        (DataSummary(6000, 784, True), {"net": "mlp:300", "latent_dim": 40, "epochs": 166, "batch_size": 250}),
        (DataSummary(10**7, 784, True), {"epochs": 40, "batch_size": 250, "boo_steps": 100}),
        (DataSummary(1000, 784, True), {"epochs": 200, "batch_size": 50, "distill_latents": 250}),
        (DataSummary(999, 784, True), {"epochs": 70, "learning_rate": 3e-3, "distill_latents": 50}),
        (DataSummary(178, 3, False), {"latent_dim": 2, "likelihood": "normal", "decoder_bounds": False}),
    ],
)
def test_the_size_and_kind_of_the_data_decide(data: DataSummary, expected: dict[str, object]) -> None:
    found = settings_for(data)
    assert {name: found[name] for name in expected} == expected
