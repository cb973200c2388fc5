"""KID, precision and recall against their definitions, written as loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import polynomial_kernel
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from boovae.errors import InputError
from boovae.metrics import fidelity
from boovae.metrics.fidelity import kernel_distance, precision_recall


def points(n: int, seed: int, shift: float = 0.0, size: int = 6) -> Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed)) + shift


@pytest.mark.parametrize(("n", "m"), [(40, 40), (30, 55)])
def test_kernel_distance_is_the_unbiased_estimate(n: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "ROWS", 16)  # in parts
    x, y = points(n, 0), points(m, 1, shift=0.5)
    xx, yy, xy = (polynomial_kernel(a, b, degree=3, coef0=1) for a, b in ((x, x), (y, y), (x, y)))
    wanted = (xx.sum() - np.trace(xx)) / (n * (n - 1)) + (yy.sum() - np.trace(yy)) / (m * (m - 1)) - 2 * xy.mean()
    assert kernel_distance(x, y).item() == pytest.approx(wanted, rel=1e-5)


def test_kernel_distance_of_equal_distributions_is_zero_on_average() -> None:
    same = [kernel_distance(points(60, 2 * seed), points(60, 2 * seed + 1)).item() for seed in range(200)]
    assert abs(np.mean(same)) < 4 * np.std(same) / np.sqrt(len(same))
    assert min(same) < 0 < max(same)
    assert kernel_distance(points(60, 0), points(60, 1, shift=1.0)).item() > 10 * np.std(same)


def inside(points: Tensor, others: Tensor, k: int) -> float:
    radius = NearestNeighbors(n_neighbors=k + 1).fit(others).kneighbors(others)[0][:, -1]
    distance = np.linalg.norm(points.numpy()[:, None] - others.numpy()[None], axis=-1)
    return float((distance <= radius).any(1).mean())


@pytest.mark.parametrize("k", [1, 3, 5])
def test_precision_and_recall_follow_their_definition(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "ROWS", 16)
    real, samples = points(50, 3), points(50, 4, shift=0.8)
    precision, recall = precision_recall(real, samples, neighbours=k)
    assert precision.item() == pytest.approx(inside(samples, real, k))
    assert recall.item() == pytest.approx(inside(real, samples, k))
    assert 0 < precision.item() < 1


def test_few_modes_are_precise_and_recall_little() -> None:
    real = torch.cat([points(100, 5), points(100, 6, shift=20.0)])
    precision, recall = precision_recall(real, points(200, 7))
    assert precision.item() > 0.6
    assert recall.item() < 0.55
    assert [share.item() for share in precision_recall(real, real)] == [1, 1]


def test_a_diverged_replica_is_nan() -> None:
    broken = points(20, 1)
    broken[3, 2] = torch.nan
    assert all(share.isnan() for share in precision_recall(points(20, 0), broken))
    assert kernel_distance(points(20, 0), broken).isnan()


def test_unusable_features_are_named() -> None:
    with pytest.raises(InputError, match=r"samples has features of shape \(1, 6\)"):
        kernel_distance(points(9, 0), points(1, 1))
    with pytest.raises(InputError, match="same network"):
        precision_recall(points(9, 0), points(9, 1, size=5))
