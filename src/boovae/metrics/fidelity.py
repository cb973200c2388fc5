"""Distances between samples and real images beyond Fréchet's: KID, precision and recall, on any features.

Kernel distance (KID): Binkowski et al., "Demystifying MMD GANs", 2018. Precision and recall: Kynkäänniemi et al.,
"Improved precision and recall metric for assessing generative models", 2019. Like the Fréchet distance these numbers
depend on the network the features come from.
"""

import torch
from torch import Tensor

from boovae.errors import InputError

#: The radius around a point is the distance to its third nearest neighbour in the same set.
NEIGHBOURS = 3
#: Rows of a distance matrix to hold in memory at once.
ROWS = 2048


def kernel_distance(real: Tensor, samples: Tensor) -> Tensor:
    """Return the unbiased squared MMD between features (n, F) and (m, F) under the kernel (x.y / F + 1)³, float64.

    Its mean is 0 if both have the same distribution; it can be negative.

    >>> kernel_distance(torch.eye(2), torch.eye(2)).item()  # k is 3.375 on the diagonal and 1 elsewhere
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


def precision_recall(real: Tensor, samples: Tensor, neighbours: int = NEIGHBOURS) -> tuple[Tensor, Tensor]:
    """Return precision and recall, each (), for features (n, F) and (m, F); n and m should be similar.

    Precision is the share of samples that lie among the real images, recall that of real images among the samples.
    A point lies among others if it is inside the ball around any of them; the radius of a ball is the distance from
    its centre to the `neighbours`-th nearest neighbour in the same set.

    >>> real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> precision_recall(real, torch.tensor([[0.1], [0.2], [0.3], [50.0]]), neighbours=1)[0].item()
    0.75
    """
    _check(real, samples)
    finite = real.isfinite().all() & samples.isfinite().all()
    real, samples = real.double().nan_to_num(), samples.double().nan_to_num()
    precision, recall = _share_inside(samples, real, neighbours), _share_inside(real, samples, neighbours)
    return precision.where(finite, torch.nan), recall.where(finite, torch.nan)


def _share_inside(points: Tensor, others: Tensor, neighbours: int) -> Tensor:
    """Return the share of points (n, F) inside a ball around any of the others (m, F)."""
    rank = min(neighbours, len(others) - 1) + 1  # the nearest neighbour is the point itself
    radius = torch.cat([torch.cdist(part, others).kthvalue(rank, dim=1).values for part in others.split(ROWS)])
    inside = [(torch.cdist(part, others) <= radius).any(1) for part in points.split(ROWS)]
    return torch.cat(inside).double().mean()


def _check(real: Tensor, samples: Tensor) -> None:
    for name, shape in (("real", tuple(real.shape)), ("samples", tuple(samples.shape))):
        if len(shape) != 2 or shape[0] < 2 or shape[1] != real.shape[-1]:
            raise InputError(f"{name} has features of shape {shape}: give (n, F), n at least 2, of the same network")
