"""Comparison of samples with the tasks' real images on the features of a network.

A task's test images are kept as features, its training images as moments, computed once. For large networks they are
also cached on disk, by the content of the images and of the network.
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from boovae.data import Task
from boovae.data.download import cache_folder
from boovae.metrics.cache import read_cached, write_cached
from boovae.metrics.classifier import Classifier
from boovae.metrics.evaluation import Distances
from boovae.metrics.features import Features
from boovae.metrics.fidelity import kernel_distance, precision_recall
from boovae.metrics.frechet import Moments, combined, frechet_distances, moments
from boovae.metrics.partial_results import PartialResult
from boovae.metrics.schema import rounded


class Real(NamedTuple):
    """Statistics of a task's images on the features of a network."""

    test: Tensor  # features of the test images, (n, F)
    train: Moments  # of the features of the training images


class Reference:
    """Compares samples with the images of tasks on the features of one network."""

    def __init__(self, network: Features) -> None:
        self.network = network
        self._known: dict[Task, Real] = {}

    def features(self, samples: Tensor) -> Tensor:
        """Return what `scores` compares: the features (R, N, F) of samples (R, N, D)."""
        return torch.stack([self.network.features(own) for own in samples])

    def scores(self, samples: Tensor, tasks: Sequence[Task], partial: PartialResult | None = None) -> Distances:
        """Return how near features (R, N, F) of samples are to those of the tasks' images.

        KID, precision and recall use equal numbers of samples and test images. With a single image all are NaN. They
        take long on a CPU: given the `partial` result of an interrupted computation on the same samples, only the
        rest is computed.
        """
        real = [self.real(task) for task in tasks]
        test = torch.cat([part.test for part in real])
        about = len(test), samples.shape[1], self.network.digest
        if min(len(test), sum(part.train.n for part in real), samples.shape[1]) < 2:
            unknown = np.full(len(samples), np.nan)
            return Distances(unknown, unknown, unknown, unknown, unknown, *about)
        # Eigenvalues of large float64 matrices are faster and more reliable on a CPU.
        against = (moments(test), combined([part.train for part in real]))
        frechet, frechet_train = frechet_distances(against, _on_cpu(moments(samples)))
        count = min(len(test), samples.shape[1])
        some = test[torch.arange(count) * len(test) // count].to(samples.device)  # of every task
        partial = partial or PartialResult()
        plan = {"network": self.network.digest, "images": len(test), "samples": samples.shape[1]}
        found = partial.begin(plan, torch.zeros(3, len(samples), dtype=torch.float64, device=samples.device))
        for replica, shares in partial.rest([*itertools.product(range(len(samples)), (False, True))]):
            row = samples[replica, :count]
            if shares:
                found[1:, replica] = torch.stack(precision_recall(some, row))
            else:
                found[0, replica] = kernel_distance(some, row)
        kid, precision, recall = map(rounded, found)
        return Distances(rounded(frechet), rounded(frechet_train), kid, precision, recall, *about)

    def real(self, task: Task) -> Real:
        """Return the statistics of a task's images: from memory, from the cache, or computed now."""
        if task not in self._known:
            self._known[task] = self._cached(task)
        return self._known[task]

    def _cached(self, task: Task) -> Real:
        if isinstance(self.network, Classifier):  # as fast as reading a file
            return self._computed(task)
        key = self._key(task)
        path = cache_folder() / "features" / f"{key}.safetensors"
        found = read_cached(path, key, _restored, "the cached features {path} are damaged and are computed again")
        if found is None:
            found = self._computed(task)
            tensors = {"test": found.test, "mean": found.train.mean, "covariance": found.train.covariance}
            loss = "features of real images are not cached and will be computed again next time"
            write_cached(path, key, {**tensors, "n": torch.tensor(found.train.n)}, loss)
        return found

    def _computed(self, task: Task) -> Real:
        """Return the statistics on the CPU, like those from the cache: they are combined over tasks."""
        test = self.network.features(task.test.images).cpu()
        return Real(test, _on_cpu(moments(self.network.features(task.train.images), least=1)))

    def _key(self, task: Task) -> str:
        content = hashlib.sha256(f"2 {self.network.digest}".encode())  # version of the file's format
        for images in (task.test.images, task.train.images):
            content.update(str(tuple(images.shape)).encode())
            content.update(images.contiguous().numpy().data)
        return content.hexdigest()[:32]


def _restored(tensors: dict[str, Tensor], about: dict[str, Any]) -> Real:
    return Real(tensors["test"], Moments(tensors["mean"], tensors["covariance"], int(tensors["n"])))


def _on_cpu(m: Moments) -> Moments:
    return Moments(m.mean.cpu(), m.covariance.cpu(), m.n)
