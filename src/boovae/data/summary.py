"""Summarise a task for the choice of settings (`config/choose.py`): shape, size, kind of values, symmetry."""

import torch
from torch import Tensor

from boovae.config.choose import DataSummary
from boovae.data.tasks import ImageSpec

#: Images that are compared with each other, and how many of them look for their neighbours.
COMPARED, LOOKING = 2000, 500
#: Fewer images say nothing about symmetry.
LEAST_COMPARED = 50


def summarise(images: Tensor, spec: ImageSpec, *, pixels: bool = True) -> DataSummary:
    """Return the facts about training images (n, D); `pixels` says whether their values share one bounded range."""
    picture = len(spec.shape) > 1
    return DataSummary(
        spec.shape,
        len(images),
        pixels=pixels,
        augmentable=picture and spec.binarize != "threshold",
        mirrored=mirrored_share(images, spec.shape) if picture and pixels else None,
    )


def mirrored_share(images: Tensor, shape: tuple[int, ...]) -> float | None:
    """Return the share of images (n, D) that are closer to some other image mirrored than to any as it is.

    About one half if mirroring changes nothing in the distribution, 0 if it makes images unlike all others; None if
    there are too few.
    """
    count = min(len(images), COMPARED)
    if count < LEAST_COMPARED:
        return None
    chosen = images[torch.linspace(0, len(images) - 1, count).long()]
    mirrored = chosen.unflatten(1, shape).flip(-1).flatten(1)
    looking = torch.linspace(0, count - 1, min(count, LOOKING)).long()
    nearest, nearest_mirrored = (_nearest(chosen, others, looking) for others in (chosen, mirrored))
    return float((nearest_mirrored < nearest).float().mean())


def _nearest(images: Tensor, others: Tensor, looking: Tensor) -> Tensor:
    """Return the distance of each chosen image to the nearest of the others, without the one that it is itself."""
    distances = torch.cdist(images[looking], others)
    distances[torch.arange(len(looking)), looking] = torch.inf
    return distances.min(1).values
