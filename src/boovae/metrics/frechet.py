"""The Fréchet distance between two sets of features, each described by a Gaussian.

Heusel et al., "GANs trained by a two time-scale update rule converge to a local Nash equilibrium", 2017. The
number depends on the network the features come from: distances are comparable only for the same network.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from boovae.errors import InputError


class Moments(NamedTuple):
    """Mean and covariance of features, in float64; the leading axes `...` are replicas."""

    mean: Tensor
    """`(..., F)`"""
    covariance: Tensor
    """`(..., F, F)`, with the divisor n − 1."""
    n: int
    """Number of feature vectors; the distance is biased upwards for small n."""


def moments(features: Tensor, least: int = 2) -> Moments:
    """Return the moments of `features` `(..., n, F)`; with `least=1`, a single vector has covariance 0.

    >>> moments(torch.tensor([[0.0], [2.0]]))
    Moments(mean=tensor([1.], dtype=torch.float64), covariance=tensor([[2.]], dtype=torch.float64), n=2)
    """
    if features.ndim < 2 or features.shape[-2] < least or features.shape[-1] < 1:
        raise InputError(f"features have shape {tuple(features.shape)}: give (..., n, F) with n at least {least}")
    features = features.detach().double()
    mean = features.mean(-2)
    centred = features - mean.unsqueeze(-2)
    n = features.shape[-2]
    return Moments(mean, centred.mT @ centred / max(n - 1, 1), n)


def combined(parts: Sequence[Moments]) -> Moments:
    """Return the moments of the union of several sets of features.

    >>> combined([moments(torch.tensor([[0.0], [2.0]])), moments(torch.tensor([[4.0]]), least=1)])
    Moments(mean=tensor([2.], dtype=torch.float64), covariance=tensor([[4.]], dtype=torch.float64), n=3)
    """
    n = sum(part.n for part in parts)
    mean = torch.stack([part.n / n * part.mean for part in parts]).sum(0)
    apart = torch.stack([(part.n / (n - 1)) ** 0.5 * (part.mean - mean) for part in parts])
    within = torch.stack([(part.n - 1) / (n - 1) * part.covariance for part in parts]).sum(0)
    return Moments(mean, within + apart.mT @ apart, n)


def frechet_distances(references: Sequence[Moments], b: Moments) -> list[Tensor]:
    """Return ‖m_a − m_b‖² + tr(S_a + S_b − 2 (S_a^½ S_b S_a^½)^½), shape `(...)`, float64, for each reference a.

    The covariance of b is factored once. Replica axes broadcast: a reference may serve many replicas. A replica whose
    moments are not finite gets `nan`.

    >>> one = Moments(torch.zeros(1).double(), torch.eye(1).double(), 100)
    >>> two = Moments(torch.ones(1).double(), 4 * torch.eye(1).double(), 100)
    >>> frechet_distances([one], two)  # 1² + (2 − 1)²
    [tensor(2., dtype=torch.float64)]
    """
    for a in references:
        _check(a, b)
    factor = _factor(b.covariance)
    return [_distance(a, b, factor) for a in references]


def _check(a: Moments, b: Moments) -> None:
    for name, m in (("a", a), ("b", b)):
        if m.mean.shape[-1] != a.mean.shape[-1] or m.covariance.shape[-2:] != (m.mean.shape[-1],) * 2:
            raise InputError(
                f"{name} has mean {tuple(m.mean.shape)} and covariance {tuple(m.covariance.shape)} against "
                f"{a.mean.shape[-1]} features of a: use the same feature network for both"
            )


def _distance(a: Moments, b: Moments, factor_b: Tensor) -> Tensor:
    """Return the distance, given a factor of the covariance of b."""
    squared = (a.mean - b.mean).double().square().sum(-1)
    # tr (S_a^½ S_b S_a^½)^½ is the sum of the singular values of L_aᵀ L_b, for any factors. This keeps
    # rounding errors of zero eigenvalues at 1e-16; taking the root of such an eigenvalue would raise them to 1e-8.
    overlap: Tensor = torch.linalg.svdvals(_factor(a.covariance).mT @ factor_b).sum(-1)
    traces = [m.covariance.double().diagonal(dim1=-2, dim2=-1).sum(-1) for m in (a, b)]
    return (squared + traces[0] + traces[1] - 2 * overlap).clamp(min=0.0).where(_finite(a) & _finite(b), torch.nan)


def _finite(m: Moments) -> Tensor:
    return m.mean.isfinite().all(-1) & m.covariance.isfinite().all(-1).all(-1)


def _factor(covariance: Tensor) -> Tensor:
    """Return L with L Lᵀ = S for positive semi-definite matrices S `(..., F, F)`."""
    # A matrix that is not finite would make the whole batch fail; the caller sets its result to nan.
    covariance = covariance.double().nan_to_num(0.0, 0.0, 0.0)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not failed.any():
        return factor
    # Singular: fewer images than features. Eigenvalues below the floor are rounding errors.
    values, vectors = torch.linalg.eigh(covariance)
    floor = values[..., -1:].abs() * values.shape[-1] * torch.finfo(torch.float64).eps
    root: Tensor = vectors * torch.where(values > floor, values, 0.0).sqrt().unsqueeze(-2)
    return root
