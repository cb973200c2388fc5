"""The classifier of a dataset, trained once on all of its classes, whatever the continual run has seen.

It is cached by content: the same data, architecture and seed never train twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from boovae.data.download import cache_folder
from boovae.errors import RunError
from boovae.metrics.cache import read_tensors, write_tensors
from boovae.metrics.classifier import Classifier
from boovae.metrics.classifier_training import accuracy, fit

if TYPE_CHECKING:
    from boovae.data.tasks import Split, Stream

log = logging.getLogger(__name__)

VERSION = 1
"""Part of the cache key; raise it when the architecture or the training changes."""

_POLL_SECONDS, _POLLS_PER_LINE = 0.2, 50  # while another process trains the same classifier


def trained_classifier(
    stream: Stream,
    *,
    seed: int = 0,
    device: torch.device | str,
    cache_dir: Path | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Classifier:
    """Return the classifier of `stream`'s dataset: from the cache, or trained now and cached.

    It learns all classes of `stream.full`, also when `stream` is a part of it. The global random state is not
    touched; the same seed gives the same weights on the same device. A training that was broken off goes on.

    Args:
        stream: the tasks; only `stream.full` counts.
        seed: of initial weights, data order and shifts.
        device: where to train, and where the answer lives.
        cache_dir: folder of cached classifiers; by default `classifiers` in the cache of this package.
        progress: called with a line of text after every epoch, and now and then while another process trains it.
    """
    full = stream.full
    key = json.dumps({"data": full.digest, "version": VERSION, "shape": list(full.shape), "seed": seed})
    folder = cache_folder() / "classifiers" if cache_dir is None else Path(cache_dir)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    kept = path.with_suffix(".training")
    classifier = _load(path, key)
    if classifier is None:
        with _alone(path.with_suffix(".lock"), progress) as waited:
            classifier = _load(path, key) if waited else None
            if classifier is None:
                classifier = _train(full, seed, torch.device(device), kept, key, progress)
                _save(classifier, path, key)
    _forget(kept)
    return classifier.to(device)


# Training


def _train(
    stream: Stream, seed: int, device: torch.device, kept: Path, key: str, progress: Callable[[str], None] | None
) -> Classifier:
    """Train on all tasks together; `kept` and `key` as in `fit`."""
    train = _pooled([task.train for task in stream], device)
    valid = _pooled([task.valid for task in stream], device)
    classifier = _fresh(stream.shape, [c for task in stream for c in task.classes], train[0], seed).to(device)
    fit(classifier, train, valid, seed, kept, key, progress)
    classifier.eval().requires_grad_(False)
    classifier.accuracy = accuracy(classifier, _pooled([task.test for task in stream], device))
    return classifier


def _fresh(shape: Sequence[int], classes: Sequence[int], images: Tensor, seed: int) -> Classifier:
    """Return an untrained classifier whose inputs are standardised with the training images `(n, D)`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs, too
        classifier = Classifier(shape, classes)
    axes = (0, 1) if classifier.centre.numel() == 1 else (0,)
    variance, centre = torch.var_mean(images, dim=axes, correction=0)
    classifier.centre.copy_(centre.expand_as(classifier.centre))
    scale = variance.sqrt()
    # A constant feature carries nothing; dividing by its rounding errors would blow them up.
    classifier.scale.copy_(torch.where(scale > 1e-6, scale, 1.0).expand_as(classifier.scale))
    return classifier


def _pooled(splits: Sequence[Split], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the images `(n, D)` and labels `(n,)` of all tasks together."""
    images, labels = torch.cat([s.images for s in splits]), torch.cat([s.labels for s in splits])
    # The digest does not depend on how classes are grouped into tasks; so sorted, neither do the weights.
    order = labels.argsort(stable=True)
    return images[order].to(device, torch.float32), labels[order].to(device)


# The cache: one file per classifier, so that weights and description can never belong to different trainings.


@contextlib.contextmanager
def _alone(path: Path, progress: Callable[[str], None] | None) -> Iterator[bool]:
    """Let one process at a time train this classifier; yields whether another one had to end first."""
    polls = 0
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            while not _held(descriptor):
                if progress is not None and polls % _POLLS_PER_LINE == 0:
                    progress("classifier: waiting for another process that is training it")
                time.sleep(_POLL_SECONDS)
                polls += 1
            # Whoever comes later finds the classifier; whoever waits here has the file open and needs no name.
            stack.callback(path.unlink, missing_ok=True)
        except OSError as error:
            log.warning("the classifier may be trained more than once at the same time: %s", error)
        yield polls > 0


def _held(descriptor: int) -> bool:
    """Lock the file, if nobody else has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _save(classifier: Classifier, path: Path, key: str) -> None:
    """Write it whole or not at all; a cache that cannot be written only costs time."""
    about = {"classes": list(classifier.classes), "accuracy": classifier.accuracy}
    try:
        write_tensors(path, key, classifier.state_dict(), **about)
    except RunError as error:
        log.warning("the classifier is not cached and will be trained again next time: %s", error)


def _forget(kept: Path) -> None:
    """Remove what was kept of a training that is over, and what killed writes left; what stays only takes room."""
    for path in (kept, *kept.parent.glob(f".{kept.name}.*.tmp")):
        with contextlib.suppress(OSError):
            path.unlink()


def _load(path: Path, key: str) -> Classifier | None:
    """Return the cached classifier, or None if there is none or the file is damaged (with a warning)."""
    if not path.is_file():
        return None
    try:
        tensors, about = read_tensors(path, key)
        with torch.random.fork_rng(devices=[]):
            classifier = Classifier(json.loads(key)["shape"], about["classes"])
        classifier.load_state_dict(tensors)
        classifier.accuracy = float(about["accuracy"])
    except Exception as error:  # damaged files fail in too many ways to list
        log.warning("the cached classifier %s is damaged and is trained again: %s", path, error)
        return None
    classifier.eval().requires_grad_(False)
    return classifier
