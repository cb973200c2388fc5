"""How the judge of samples learns. A training that was broken off goes on where it was, with the very same weights."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from boovae.errors import InputError, RunError
from boovae.metrics.cache import read_tensors, write_tensors
from boovae.training.checkpoint import due
from boovae.training.state import prefixed

if TYPE_CHECKING:
    from boovae.metrics.classifier import Classifier

log = logging.getLogger(__name__)

Labelled = tuple[Tensor, Tensor]
"""Images `(n, D)` and their labels `(n,)`."""


def fit(
    classifier: Classifier,
    train: Labelled,
    valid: Labelled,
    seed: int,
    kept: Path,
    key: str,
    progress: Callable[[str], None] | None,
) -> None:
    """Train; keep the epoch with the best validation accuracy.

    Now and then all is written to the file `kept`, from which the next one with the same key goes on.
    """
    images, columns = train[0], _columns(classifier, train[1])
    batch = min(256, max(32, len(columns) // 32))
    # Small datasets need more passes.
    epochs = min(20, max(10, 300_000 // len(columns)))
    steps = max(1, len(columns) // batch)
    key = json.dumps({"key": key, "device": images.device.type, "steps": epochs * steps})
    training = _Training(classifier, epochs * steps, kept, key)
    # Convolutions may otherwise sum in another order every time; autotuning may choose other kernels.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=True):
        for epoch, batches in _epochs(images, classifier, seed, epochs, steps, training.done):
            classifier.train()
            for some, index in batches:
                training.keep()  # before a step: the epoch before it has been judged
                training.step(some, columns[index])
            score = _score(classifier, valid)
            training.judge(score)
            if progress is not None:
                progress(f"classifier: epoch {epoch} of {epochs}, validation accuracy {score[0]:.4f}")
    classifier.load_state_dict(training.best)


def accuracy(classifier: Classifier, test: Labelled) -> float:
    """Return the share of the images that it names correctly among all classes."""
    return _score(classifier, test)[0]


class _Training:
    """A classifier with all that changes while it learns."""

    def __init__(self, classifier: Classifier, steps: int, kept: Path, key: str) -> None:
        self.classifier, self.steps, self.kept, self.key = classifier, steps, kept, key
        self.optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-3, weight_decay=0.02, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=steps, pct_start=0.2)
        for weight in classifier.parameters():  # as the first step would, so that all has its place
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[weight] = {"step": torch.zeros((), device=weight.device), **moments}
        self.best = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
        self.score = torch.tensor([-1.0, -math.inf], dtype=torch.float64)
        self.done, self._saved, self._keeps = 0, time.monotonic(), True
        self._resume()

    def step(self, images: Tensor, columns: Tensor) -> None:
        """Learn from a batch."""
        loss = F.cross_entropy(self.classifier(images), columns)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.done += 1

    def judge(self, score: tuple[float, float]) -> None:
        """End an epoch; remember the weights if it is the best so far."""
        if score > tuple(self.score.tolist()):
            self.score = torch.tensor(score, dtype=torch.float64)
            self.best = {name: tensor.clone() for name, tensor in self.classifier.state_dict().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Return all places of numbers but the count of steps."""
        weights = enumerate(self.classifier.parameters())
        moments = {
            f"{i}/{name}": moment for i, weight in weights for name, moment in self.optimizer.state[weight].items()
        }
        model = prefixed("model", self.classifier.state_dict()) | prefixed("best", self.best)
        return model | prefixed("optimizer", moments) | {"score": self.score}

    def keep(self) -> None:
        """Write everything down if it is time; a cache that cannot be written only costs time."""
        if not self._keeps or not due(self._saved):
            return
        try:
            write_tensors(self.kept, self.key, {**self._tensors(), "done": torch.tensor(self.done)})
        except RunError as error:
            log.warning("the training of the classifier is not kept and will begin anew if it is broken off: %s", error)
            self._keeps = False
        self._saved = time.monotonic()

    def _resume(self) -> None:
        """Go on where an earlier process was; a damaged file is of no consequence (with a warning)."""
        if not self.kept.is_file():
            return
        mine = self._tensors()
        try:
            found, _ = read_tensors(self.kept, self.key)
            done = int(found.pop("done"))
            if _kinds(found) != _kinds(mine) or not 0 <= done < self.steps:
                raise ValueError("its content is not what it says")
        except Exception as error:  # damaged files fail in too many ways to list
            log.warning("the training of the classifier in %s is damaged and begins anew: %s", self.kept, error)
            return
        for name, tensor in mine.items():
            tensor.copy_(found[name])
        self.optimizer.step()  # has no gradients and does nothing, but the schedule wants to have seen it
        for _ in range(done):
            self.schedule.step()
        self.done = done


def _kinds(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _epochs(
    images: Tensor, classifier: Classifier, seed: int, epochs: int, steps: int, done: int = 0
) -> Iterator[tuple[int, Iterator[tuple[Tensor, Tensor]]]]:
    """Yield every epoch, counted from 1, with its batches: shifted images `(b, D)` and their indices `(b,)`.

    Every epoch has a new order. The first `done` batches are left out; the others are what they would be after them.
    """
    # Drawn on the CPU, so that every device sees the same order and shifts.
    generator = torch.Generator().manual_seed(seed)
    c, h, w = classifier.image_shape
    reach = max(1, min(h, w) // 28) if classifier.is_image else 0
    rows, columns, channels = (torch.arange(k, device=images.device) for k in (h, w, c))

    def batches(order: Tensor, moves: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        parts = zip(order.tensor_split(steps), moves.tensor_split(steps), strict=True)
        for index, move in itertools.islice(parts, first, None):
            # A clamped index repeats the border, whatever the background's value.
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
    """Return the columns `(n,)` of the logits that stand for `labels`."""
    classes = torch.tensor(classifier.classes, device=labels.device)
    columns = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    if not bool((classes[columns] == labels).all()):
        raise InputError("stream: a label is missing from the classes of its task")
    return columns


def _score(classifier: Classifier, data: Labelled) -> tuple[float, float]:
    """Return (accuracy, mean log-likelihood); the second breaks ties of the first."""
    images, labels = data
    logits = classifier.logits(images)
    columns = _columns(classifier, labels)
    right = (logits.argmax(-1) == columns).double().mean()
    return right.item(), -F.cross_entropy(logits, columns).item()
