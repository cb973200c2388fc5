"""The real side of a comparison on features: what the tasks' images look like to a network, computed once.

A task's test images are kept as features, its training images as moments. Where the network is large they are also kept
on the disk, by the content of the images and of the network.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from boovae.data.download import cache_folder
from boovae.errors import RunError
from boovae.files import write_file
from boovae.metrics.features import ClassifierFeatures, Features
from boovae.metrics.fidelity import kernel_distance, precision_recall
from boovae.metrics.frechet import Moments, frechet_distances, joined, moments
from boovae.metrics.partial_results import PartialResult

if TYPE_CHECKING:
    from boovae.data import Task

log = logging.getLogger(__name__)


class Real(NamedTuple):
    """A task's images to a network."""

    test: Tensor
    """Features of the test images, `(n, F)`."""
    train: Moments
    """Of the training images."""


class Scores(NamedTuple):
    """Samples of every replica against real images, each `(R,)`, float64."""

    frechet: Tensor
    frechet_train: Tensor
    """Against the training images, which are many more."""
    kid: Tensor
    precision: Tensor
    recall: Tensor


class Reference:
    """Compares samples with the images of tasks on the features of one network."""

    def __init__(self, network: Features) -> None:
        self.network = network
        self._known: dict[int, tuple[Task, Real]] = {}

    def features(self, samples: Tensor) -> Tensor:
        """Return what `scores` compares: the features (R, N, F) of samples (R, N, D)."""
        return torch.stack([self.network.features(own) for own in samples])

    def scores(
        self,
        samples: Tensor,
        tasks: Sequence[Task],
        partial: PartialResult | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Scores:
        """Return how near features (R, N, F) of samples are to those of the tasks' images.

        KID, precision and recall take as many samples as there are test images, or the other way round. One image alone
        has no spread to compare: all are NaN. They take long on a CPU: with `partial` sums of the same
        samples, broken off before, only what is missing is computed.
        """
        real = [self.real(task) for task in tasks]
        test = torch.cat([part.test for part in real])
        if min(len(test), sum(part.train.n for part in real), samples.shape[1]) < 2:
            return Scores(*torch.full((len(Scores._fields), len(samples)), torch.nan, dtype=torch.float64))
        # Eigenvalues of large matrices in float64 are quicker and safer on a CPU.
        against = (moments(test), joined([part.train for part in real]))
        frechet, frechet_train = frechet_distances(against, _on_cpu(moments(samples)))
        count = min(len(test), samples.shape[1])
        some = _spread(test, count).to(samples.device)
        partial = PartialResult() if partial is None else partial
        plan = {"network": self.network.digest, "images": len(test), "samples": samples.shape[1]}
        found = partial.begin(plan, torch.zeros(3, len(samples), dtype=torch.float64, device=samples.device))
        for replica, shares in partial.rest([*itertools.product(range(len(samples)), (False, True))], progress):
            row = samples[replica, :count]
            if shares:
                found[1:, replica] = torch.stack(precision_recall(some, row))
            else:
                found[0, replica] = kernel_distance(some, row)
        return Scores(frechet, frechet_train, *found)

    def real(self, task: Task) -> Real:
        """Return what the network makes of a task's images: known, cached, or computed now."""
        known = self._known.get(id(task))
        if known is None or known[0] is not task:
            self._known[id(task)] = known = (task, self._cached(task))
        return known[1]

    def _cached(self, task: Task) -> Real:
        if isinstance(self.network, ClassifierFeatures):  # as quick as reading
            return self._computed(task)
        path = cache_folder() / "features" / f"{self._key(task)}.safetensors"
        found = _read(path)
        if found is None:
            found = self._computed(task)
            _write(path, found)
        return found

    def _computed(self, task: Task) -> Real:
        """Return both on the CPU, as from the cache: tasks of either kind are put together."""
        test = self.network.features(task.test.images).cpu()
        return Real(test, _on_cpu(moments(self.network.features(task.train.images), least=1)))

    def _key(self, task: Task) -> str:
        content = hashlib.sha256(self.network.digest.encode())
        for images in (task.test.images, task.train.images):
            content.update(str(tuple(images.shape)).encode())
            content.update(images.contiguous().numpy().data)
        return content.hexdigest()[:32]


def _on_cpu(m: Moments) -> Moments:
    return Moments(m.mean.cpu(), m.covariance.cpu(), m.n)


def _spread(features: Tensor, count: int) -> Tensor:
    """Return `count` of the rows, evenly spread, so that every task has its share."""
    rows = torch.arange(count, device=features.device) * len(features) // count
    return features[rows]


def _write(path: Path, real: Real) -> None:
    tensors = {"test": real.test.cpu().contiguous(), "mean": real.train.mean.cpu().contiguous()}
    tensors |= {"covariance": real.train.covariance.cpu().contiguous(), "n": torch.tensor(real.train.n)}
    try:
        write_file(path, save(tensors))
    except RunError as error:
        log.warning("features of real images are not cached and will be computed again next time: %s", error)


def _read(path: Path) -> Real | None:
    if not path.is_file():
        return None
    try:
        tensors: dict[str, Any] = load_file(path)
        return Real(tensors["test"], Moments(tensors["mean"], tensors["covariance"], int(tensors["n"])))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        log.warning("the cached features %s are damaged and are computed again: %s", path, error)
        return None
