"""How near samples are to real images beyond the Fréchet distance: KID, precision and recall, on any features.

Kernel distance (KID): Binkowski et al., "Demystifying MMD GANs", 2018. Precision and recall: Kynkäänniemi et al.,
"Improved precision and recall metric for assessing generative models", 2019. Like the Fréchet distance these numbers
depend on the network the features come from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from boovae.errors import InputError

#: Whose distance is the radius around a point: the third nearest of its own kind.
NEIGHBOURS = 3
#: Rows of a matrix of distances that are held at once.
ROWS = 2048


class PrecisionRecall(NamedTuple):
    """Shares of samples that lie among the real images, and of real images that lie among the samples; each ()."""

    precision: Tensor
    recall: Tensor


def kernel_distance(real: Tensor, samples: Tensor) -> Tensor:
    """Return the unbiased squared MMD between features (n, F) and (m, F) under the kernel (x.y / F + 1)³, float64.

    It is 0 on average where both are of the same distribution, and can be negative.

    >>> kernel_distance(torch.eye(2), torch.eye(2)).item()  # k is 3.375 on the diagonal and 1 beside it
    -2.375
    """
    _check(real, samples)
    real, samples = real.double(), samples.double()

    def total(one: Tensor, other: Tensor) -> Tensor:
        sums = [(part @ other.mT / part.shape[1] + 1).pow(3).sum() for part in one.split(ROWS)]
        return torch.stack(sums).sum()

    def within(x: Tensor) -> Tensor:
        diagonal = (x.square().sum(1) / x.shape[1] + 1).pow(3).sum()
        return (total(x, x) - diagonal) / (len(x) * (len(x) - 1))

    return within(real) + within(samples) - 2 * total(real, samples) / (len(real) * len(samples))


def precision_recall(real: Tensor, samples: Tensor, neighbours: int = NEIGHBOURS) -> PrecisionRecall:
    """Return both for features (n, F) and (m, F); the numbers of images should be alike.

    A point lies among others if it is inside one of their balls, each as wide as the distance to the `neighbours`-th
    nearest of its own kind.

    >>> real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> precision_recall(real, torch.tensor([[0.1], [0.2], [0.3], [50.0]]), neighbours=1).precision.item()
    0.75
    """
    _check(real, samples)
    finite = real.isfinite().all() & samples.isfinite().all()
    real, samples = real.double().nan_to_num(), samples.double().nan_to_num()
    precision, recall = _share_inside(samples, real, neighbours), _share_inside(real, samples, neighbours)
    return PrecisionRecall(*(share.where(finite, torch.nan) for share in (precision, recall)))


def _share_inside(points: Tensor, others: Tensor, neighbours: int) -> Tensor:
    """Return the share of points (n, F) inside a ball around one of the others (m, F)."""
    rank = min(neighbours, len(others) - 1) + 1  # the nearest of all is the point itself
    radius = torch.cat([torch.cdist(part, others).kthvalue(rank, dim=1).values for part in others.split(ROWS)])
    inside = [(torch.cdist(part, others) <= radius).any(1) for part in points.split(ROWS)]
    return torch.cat(inside).double().mean()


def _check(real: Tensor, samples: Tensor) -> None:
    for name, features in (("real", real), ("samples", samples)):
        if features.ndim != 2 or len(features) < 2 or features.shape[1] != real.shape[-1]:
            raise InputError(
                f"{name} has features of shape {tuple(features.shape)}: give (n, F), n at least 2, of the same network"
            )
