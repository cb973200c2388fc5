"""Training of a dataset's classifier, once per dataset on all of its classes, whatever the continual run has seen.

The trained classifier is cached by content: the same data, architecture and seed never train twice. An interrupted
training continues where it was and ends with the same weights.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor
from torch.nn import functional as F

from boovae.data.arrays import SPLITS
from boovae.data.download import cache_folder
from boovae.data.tasks import Split, Stream
from boovae.errors import InputError
from boovae.metrics.cache import read_cached, write_cached
from boovae.metrics.classifier import Classifier
from boovae.training.checkpoint import due
from boovae.training.state import prefixed

log = logging.getLogger(__name__)

VERSION = 1
"""Part of the cache key; raise it when the architecture or the training changes."""

_POLL_SECONDS, _REPORT_SECONDS = 0.2, 10.0  # while another process trains the same classifier


def trained_classifier(
    stream: Stream,
    *,
    seed: int = 0,
    device: torch.device | str,
    cache_dir: Path | str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Classifier:
    """Return the classifier of `stream`'s dataset, from the cache or trained and cached now.

    It learns all classes of `stream.full`, even if `stream` is a part of it. The global random state is not
    touched; the same seed gives the same weights on the same device. An interrupted training continues.

    Args:
        stream: the tasks; only `stream.full` counts.
        seed: of initial weights, data order and shifts.
        device: where to train and where to put the result.
        cache_dir: folder of cached classifiers; by default `classifiers` in the cache of this package.
        progress: called with a line of text after every epoch, and every 10 s while another process trains it.
    """
    full = stream.full
    key = json.dumps({"data": full.digest, "version": VERSION, "shape": list(full.shape), "seed": seed})
    folder = cache_folder() / "classifiers" if cache_dir is None else Path(cache_dir)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    unfinished = path.with_suffix(".training")
    classifier = _load(path, key)
    if classifier is None:
        with _alone(path.with_suffix(".lock"), progress) as waited:
            classifier = _load(path, key) if waited else None
            if classifier is None:
                classifier = _train(full, seed, torch.device(device), unfinished, key, progress)
                about = {"classes": list(classifier.classes), "accuracy": classifier.accuracy}
                loss = "the classifier is not cached and will be trained again next time"
                write_cached(path, key, classifier.state_dict(), loss, **about)
    _remove(unfinished)
    return classifier.to(device)


def _load(path: Path, key: str) -> Classifier | None:
    """Return the cached classifier; None if there is none or the file is damaged (with a warning)."""

    def restore(tensors: dict[str, Tensor], about: dict[str, Any]) -> Classifier:
        with torch.random.fork_rng(devices=[]):
            classifier = Classifier(json.loads(key)["shape"], about["classes"])
        classifier.load_state_dict(tensors)
        classifier.accuracy = float(about["accuracy"])
        classifier.eval().requires_grad_(False)
        return classifier

    return read_cached(path, key, restore, "the cached classifier {path} is damaged and is trained again")


@contextlib.contextmanager
def _alone(path: Path, progress: Callable[[str], None]) -> Iterator[bool]:
    """Let one process at a time train this classifier; yield whether another one had to finish first."""
    waited = False
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(path, poll_interval=_POLL_SECONDS)
            while not lock.is_locked:
                try:
                    stack.enter_context(lock.acquire(timeout=_REPORT_SECONDS if waited else 0))
                except filelock.Timeout:
                    waited = True
                    progress("classifier: waiting for another process that is training it")
            # Processes that come later find the classifier in the cache and need no lock.
            stack.callback(path.unlink, missing_ok=True)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            log.warning("the classifier may be trained more than once at the same time: %s", error)
        yield waited


def _remove(unfinished: Path) -> None:
    """Remove the file of a finished training and leftovers of killed writes; what cannot be removed does no harm."""
    for path in (unfinished, *unfinished.parent.glob(f".{unfinished.name}.*.tmp")):
        with contextlib.suppress(OSError):
            path.unlink()


def _train(
    stream: Stream, seed: int, device: torch.device, unfinished: Path, key: str, progress: Callable[[str], None]
) -> Classifier:
    """Train on all tasks together, and keep the weights of the epoch with the best validation accuracy.

    The state is written to the file `unfinished` from time to time; a later call with the same key continues from it.
    """
    train, valid, test = (_pooled([getattr(task, part) for task in stream], device) for part in SPLITS)
    images = train.images
    classifier = _untrained(stream.shape, [c for task in stream for c in task.classes], images, seed).to(device)
    columns = _columns(classifier, train.labels)
    batch = min(256, max(32, len(columns) // 32))
    # Small datasets need more passes.
    epochs = min(20, max(10, 300_000 // len(columns)))
    steps = max(1, len(columns) // batch)
    key = json.dumps({"key": key, "device": images.device.type, "steps": epochs * steps})
    training = _Training(classifier, epochs * steps, unfinished, key)
    # Otherwise convolutions may sum in a different order every time and autotuning may choose different kernels.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=True):
        for epoch, batches in _epochs(images, classifier, seed, epochs, steps, training.done):
            classifier.train()
            for some, index in batches:
                training.save()  # before a step: the previous epoch has been scored
                training.step(some, columns[index])
            score = _score(classifier, valid)
            training.end_epoch(score)
            progress(f"classifier: epoch {epoch} of {epochs}, validation accuracy {score[0]:.4f}")
    classifier.load_state_dict(training.best)
    classifier.eval().requires_grad_(False)
    classifier.accuracy = _score(classifier, test)[0]
    return classifier


def _untrained(shape: Sequence[int], classes: Sequence[int], images: Tensor, seed: int) -> Classifier:
    """Return an untrained classifier whose inputs are standardised with the training images `(n, D)`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the GPUs
        classifier = Classifier(shape, classes)
    axes = (0, 1) if classifier.centre.numel() == 1 else (0,)
    variance, centre = torch.var_mean(images, dim=axes, correction=0)
    classifier.centre.copy_(centre.expand_as(classifier.centre))
    scale = variance.sqrt()
    # Dividing a constant feature by its rounding errors would blow them up.
    classifier.scale.copy_(torch.where(scale > 1e-6, scale, 1.0).expand_as(classifier.scale))
    return classifier


def _pooled(splits: Sequence[Split], device: torch.device) -> Split:
    """Return the images and labels of all tasks together, sorted by label."""
    images, labels = torch.cat([s.images for s in splits]), torch.cat([s.labels for s in splits])
    # The dataset's digest does not depend on how classes are grouped into tasks; after sorting, neither do the weights.
    order = labels.argsort(stable=True)
    return Split(images[order].to(device, torch.float32), labels[order].to(device))


class _Training:
    """A classifier with everything that changes while it learns."""

    def __init__(self, classifier: Classifier, steps: int, unfinished: Path, key: str) -> None:
        self.classifier, self.steps, self.unfinished, self.key = classifier, steps, unfinished, key
        self.optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-3, weight_decay=0.02, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=steps, pct_start=0.2)
        for weight in classifier.parameters():  # as the first step would, so that `_resume` has tensors to fill
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[weight] = {"step": torch.zeros((), device=weight.device), **moments}
        self.best = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
        self.score = torch.tensor([-1.0, -math.inf], dtype=torch.float64)
        self.done, self._saved, self._can_save = 0, time.monotonic(), True
        self._resume()

    def step(self, images: Tensor, columns: Tensor) -> None:
        """Take a training step on one batch."""
        loss = F.cross_entropy(self.classifier(images), columns)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.done += 1

    def end_epoch(self, score: tuple[float, float]) -> None:
        """Remember the weights if they are the best so far."""
        if score > tuple(self.score.tolist()):
            self.score = torch.tensor(score, dtype=torch.float64)
            self.best = {name: tensor.clone() for name, tensor in self.classifier.state_dict().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state except the number of steps."""
        found = prefixed("model", self.classifier.state_dict()) | prefixed("best", self.best) | {"score": self.score}
        for i, weight in enumerate(self.classifier.parameters()):
            found |= prefixed(f"optimizer/{i}", self.optimizer.state[weight])
        return found

    def save(self) -> None:
        """Write the state if it is time."""
        if not self._can_save or not due(self._saved):
            return
        loss = "the training of the classifier is not saved and will start over if it is interrupted"
        tensors = self._tensors() | {"done": torch.tensor(self.done)}
        self._can_save = write_cached(self.unfinished, self.key, tensors, loss)
        self._saved = time.monotonic()

    def _resume(self) -> None:
        """Continue where an earlier process stopped; a damaged file is ignored with a warning."""
        own = self._tensors()

        def saved(tensors: dict[str, Tensor], about: dict[str, Any]) -> dict[str, Tensor]:
            if _kinds(tensors) != _kinds({**own, "done": torch.tensor(0)}) or not 0 <= tensors["done"] < self.steps:
                raise ValueError("it does not fit this training")
            return tensors

        problem = "the training of the classifier in {path} is damaged and starts over"
        found = read_cached(self.unfinished, self.key, saved, problem)
        if found is None:
            return
        for name, tensor in own.items():
            tensor.copy_(found[name])
        self.optimizer.step()  # without gradients it does nothing, but the schedule expects a step first
        self.done = int(found["done"])
        for _ in range(self.done):
            self.schedule.step()


def _kinds(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _epochs(
    images: Tensor, classifier: Classifier, seed: int, epochs: int, steps: int, done: int = 0
) -> Iterator[tuple[int, Iterator[tuple[Tensor, Tensor]]]]:
    """Yield every epoch, counted from 1, with its batches: shifted images `(b, D)` and their indices `(b,)`.

    Every epoch has a new order. The first `done` batches are skipped without changing the others.
    """
    # Drawn on the CPU, so that all devices see the same order and shifts.
    generator = torch.Generator().manual_seed(seed)
    c, h, w = classifier.image_shape
    reach = max(1, min(h, w) // 28) if classifier.is_image else 0
    rows, columns, channels = (torch.arange(k, device=images.device) for k in (h, w, c))

    def batches(order: Tensor, moves: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        parts = zip(order.tensor_split(steps), moves.tensor_split(steps), strict=True)
        for index, move in itertools.islice(parts, first, None):
            # A clamped index repeats the border, whatever value the background has.
            y = (rows + move[:, :1]).clamp(0, h - 1)[:, None, :, None]
            x = (columns + move[:, 1:]).clamp(0, w - 1)[:, None, None, :]
            pixel = (channels.view(1, -1, 1, 1) * h + y) * w + x
            yield images[index].gather(1, pixel.flatten(1)), index

    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        moves = torch.randint(-reach, reach + 1, (len(images), 2), generator=generator)
        first = max(0, done - epoch * steps)
        if first < steps:
            yield epoch + 1, batches(order.to(images.device), moves.to(images.device), first)


def _columns(classifier: Classifier, labels: Tensor) -> Tensor:
    """Return the column `(n,)` of the logits for each of `labels`."""
    classes = torch.tensor(classifier.classes, device=labels.device)
    columns = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    if not bool((classes[columns] == labels).all()):
        raise InputError("stream: a label is missing from the classes of its task")
    return columns


def _score(classifier: Classifier, data: Split) -> tuple[float, float]:
    """Return (accuracy, mean log-likelihood); the second breaks ties of the first."""
    images, labels = data
    logits = classifier.logits(images)
    columns = _columns(classifier, labels)
    right = (logits.argmax(-1) == columns).double().mean()
    return right.item(), -F.cross_entropy(logits, columns).item()
