from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import linalg
from torch import Tensor

from boovae.errors import InputError
from boovae.metrics.frechet import Moments, frechet_distances, moments


def frechet_distance(a: Moments, b: Moments) -> torch.Tensor:
    return frechet_distances([a], b)[0]


def features(n: int, size: int, seed: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rank = size if rank is None else rank
    mixing = torch.randn(rank, size, generator=generator, dtype=torch.float64)
    return torch.randn(n, rank, generator=generator, dtype=torch.float64) @ mixing + mixing[0]


def scipy_distance(a: Moments, b: Moments) -> float:
    """The textbook form, with scipy's root of the product of the covariances."""
    root = np.asarray(linalg.sqrtm(a.covariance.numpy() @ b.covariance.numpy())).real
    gap = (a.mean - b.mean).numpy()
    return float(gap @ gap + np.trace(a.covariance.numpy() + b.covariance.numpy() - 2 * root))


@pytest.mark.parametrize("size", [1, 3, 20])
def test_agrees_with_scipy(size: int) -> None:
    a, b = moments(features(200, size, seed=1)), moments(features(300, size, seed=2))
    assert frechet_distance(a, b).item() == pytest.approx(scipy_distance(a, b), rel=1e-9)


def test_moments_agree_with_numpy() -> None:
    x = features(50, 4, seed=3)
    result = moments(x)
    np.testing.assert_allclose(result.mean, x.numpy().mean(0))
    np.testing.assert_allclose(result.covariance, np.cov(x.numpy(), rowvar=False))
    assert result.n == 50


def test_far_from_the_origin_float32_features_keep_their_covariance() -> None:
    # Summing squares instead of centring would lose all digits here.
    x = torch.tensor([[4096.0], [4097.0], [4098.0]])
    assert moments(x).covariance.item() == 1.0
    assert moments(x).covariance.dtype == torch.float64


def test_diagonal_covariances_have_a_closed_form() -> None:
    a = Moments(torch.tensor([0.0, 1.0]).double(), torch.diag(torch.tensor([1.0, 9.0])).double(), 10)
    b = Moments(torch.tensor([2.0, 1.0]).double(), torch.diag(torch.tensor([4.0, 0.0])).double(), 10)
    # ‖m‖² = 4, then (1 − 2)² + (3 − 0)².
    assert frechet_distance(a, b).item() == pytest.approx(14.0, rel=1e-12)


def test_a_shift_adds_its_square_and_the_distance_is_symmetric() -> None:
    x, y = features(100, 5, seed=4), features(100, 5, seed=5)
    shift = torch.tensor([3.0, 0.0, 4.0, 0.0, 0.0]).double()
    assert frechet_distance(moments(x), moments(x + shift)).item() == pytest.approx(25.0, rel=1e-9)
    there, back = frechet_distance(moments(x), moments(y)), frechet_distance(moments(y), moments(x))
    assert there.item() == pytest.approx(back.item(), rel=1e-10)


@pytest.mark.parametrize("rank", [1, 10, 64])
def test_identical_features_have_distance_zero_even_when_singular(rank: int) -> None:
    m = moments(features(100, 64, seed=6, rank=rank))
    scale = m.covariance.trace().item()
    assert 0.0 <= frechet_distance(m, m).item() < 1e-11 * scale


def test_singular_covariances_in_different_directions_have_no_overlap() -> None:
    u = torch.tensor([1.0, 2.0, 2.0]).double() / 3
    v = torch.tensor([2.0, 1.0, -2.0]).double() / 3  # orthogonal to u
    zero = torch.zeros(3).double()
    a, b = Moments(zero, 4 * torch.outer(u, u), 10), Moments(zero, 9 * torch.outer(v, v), 10)
    assert frechet_distance(a, b).item() == pytest.approx(13.0, rel=1e-12)


def test_fewer_images_than_features_is_fine() -> None:
    a, b = moments(features(5, 30, seed=7)), moments(features(5, 30, seed=8))
    assert frechet_distance(a, b).item() == pytest.approx(scipy_distance(a, b), rel=1e-5)


def test_replicas_are_scored_apart_against_one_reference() -> None:
    reference = moments(features(100, 4, seed=9))
    stack = torch.stack([features(60, 4, seed=s) for s in (10, 11, 12)])
    together = frechet_distance(reference, moments(stack))
    assert together.shape == (3,)
    alone = [frechet_distance(reference, moments(x)).item() for x in stack]
    assert together.tolist() == pytest.approx(alone, rel=1e-10)


def test_a_diverged_replica_is_nan_and_leaves_the_others_alone() -> None:
    stack = torch.stack([features(60, 4, seed=s) for s in (10, 11)])
    reference = moments(features(100, 4, seed=9))
    expected = frechet_distance(reference, moments(stack[1])).item()
    stack[0, 0, 0] = torch.nan
    result = frechet_distance(reference, moments(stack))
    assert result[0].isnan()
    assert result[1].item() == pytest.approx(expected, rel=1e-10)


def test_unusable_features_are_named() -> None:
    with pytest.raises(InputError, match="n at least 2"):
        moments(torch.zeros(1, 5))
    with pytest.raises(InputError, match=r"b has mean \(3,\).*same feature network"):
        frechet_distance(moments(torch.rand(9, 4)), moments(torch.rand(9, 3)))
