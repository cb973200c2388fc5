"""The judge of samples: a small classifier trained once per dataset on all of its classes.

Diversity counts the classes of samples and the Fréchet distance compares features of samples; both come from
this network. It is trained on the whole dataset, whatever the continual run has seen, and cached by
content: the same data, architecture and seed never train twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from boovae.data.download import cache_folder
from boovae.errors import InputError, RunError
from boovae.metrics.cache import digest, read_tensors, write_tensors
from boovae.metrics.classifier_training import accuracy, fit

if TYPE_CHECKING:
    from boovae.data.tasks import Split, Stream

log = logging.getLogger(__name__)

VERSION = 1
"""Part of the cache key; raise it when the architecture or the training changes."""

UNCLASSIFIED = -1
"""The label of an image that is not a number anywhere (a sample of a diverged model)."""

_CHUNK_VALUES = 2**20  # input values per forward pass: bounds memory, independent of the number of images
_CPU_CHUNK_VALUES = 2**17  # the same on a CPU: what a pass makes stays in its cache, which is twice as fast
_SMALLEST_SIDE = 8  # smaller images are treated as flat features
_POLL_SECONDS, _POLLS_PER_LINE = 0.2, 50  # while another process trains the same classifier


class Classifier(nn.Module):
    """A convolutional network for images `(h, w)` or `(c, h, w)`, an MLP for flat features `(D,)`.

    Images are always flat, `(..., D)`; leading axes (replicas, images) are kept. Everything but `forward`
    runs without gradients, in chunks, and answers on the classifier's device.

    >>> net = Classifier((28, 28), classes=(3, 5, 8))
    >>> images = torch.rand(2, 7, 784)
    >>> net.logits(images).shape, net.features(images).shape
    (torch.Size([2, 7, 3]), torch.Size([2, 7, 128]))
    >>> bool((net.classify_features(net.features(images), classes=[5]) == 5).all())
    True
    """

    classes: tuple[int, ...]
    """The labels the columns of `logits` stand for, in increasing order."""
    accuracy: float
    """Share of the dataset's test images it names correctly among all classes (`nan` before training)."""
    centre: Tensor
    scale: Tensor

    def __init__(self, shape: Sequence[int], classes: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.classes = tuple(sorted(set(classes)))
        self.accuracy = math.nan
        if len(self.shape) not in (1, 2, 3) or min(self.shape) < 1:
            raise InputError(f"shape {self.shape}: use (h, w), (c, h, w) or (features,)")
        if not self.classes:
            raise InputError("classes is empty: a classifier needs at least one class")
        image = self.is_image
        self.body = _convolutional(self.image_shape) if image else _perceptron(math.prod(self.shape))
        self.head = nn.Linear(128, len(self.classes))
        # Pixels share one scale; columns of a table do not.
        self.register_buffer("centre", torch.zeros(1 if image else math.prod(self.shape)))
        self.register_buffer("scale", torch.ones(1 if image else math.prod(self.shape)))

    @property
    def is_image(self) -> bool:
        """Whether it sees a picture, in which places near each other belong together."""
        return len(self.shape) > 1 and min(self.shape[-2:]) >= _SMALLEST_SIDE

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape as `(c, h, w)`; flat features are one row."""
        c, h, w = (1, 1, *self.shape)[-3:]
        return c, h, w

    @property
    def digest(self) -> str:
        """The sha256 of all weights: two classifiers with the same digest give the same answers."""
        return digest(self.state_dict())

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `(n, C)` of images `(n, D)`, with gradients."""
        out: Tensor = self.head(self._embed(images))
        return out

    def _embed(self, images: Tensor) -> Tensor:
        x = (images - self.centre) / self.scale
        if self.is_image:
            # Twice as fast as the default layout for these convolutions, on both kinds of device.
            x = x.view(-1, *self.image_shape).contiguous(memory_format=torch.channels_last)
        out: Tensor = self.body(x)
        return out

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits `(..., C)` of images `(..., D)`; column i belongs to `classes[i]`."""
        return self._in_chunks(self.forward, images)

    def features(self, images: Tensor) -> Tensor:
        """Return the penultimate layer `(..., 128)` of images `(..., D)`."""
        return self._in_chunks(self._embed, images)

    @torch.no_grad()
    def classify_features(self, features: Tensor, classes: Sequence[int]) -> Tensor:
        """Return the likeliest label `(...)` among `classes` for `features` `(..., 128)` of images.

        An image whose logits are not finite gets `UNCLASSIFIED`.
        """
        unknown = sorted(set(classes) - set(self.classes))
        if unknown or not classes:
            known = ", ".join(map(str, self.classes))
            raise InputError(f"classes {list(classes)}: name at least one of the classifier's classes ({known})")
        columns = [self.classes.index(label) for label in classes]
        logits = self.head(features)[..., columns]
        labels = torch.tensor(list(classes), device=logits.device)[logits.argmax(-1)]
        return labels.where(logits.isfinite().all(-1), UNCLASSIFIED)

    @torch.no_grad()
    def _in_chunks(self, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        size = math.prod(self.shape)
        if images.ndim < 1 or images.shape[-1] != size:
            raise InputError(
                f"images have shape {tuple(images.shape)}: the last axis must be {size}, flat {self.shape}"
            )
        was_training = self.training
        self.eval()
        most = _CPU_CHUNK_VALUES if self.centre.device.type == "cpu" else _CHUNK_VALUES
        chunks = images.reshape(-1, size).tensor_split(1 + images.numel() // most)
        out = torch.cat([function(chunk.to(self.centre)) for chunk in chunks])
        self.train(was_training)
        return out.view(*images.shape[:-1], out.shape[-1])


def _convolutional(shape: tuple[int, int, int]) -> nn.Sequential:
    """Images `(n, c, h, w)` to features `(n, 128)`: halve (once or more) to 8 pixels, then one layer."""
    channels, *sides = shape
    halvings = max(1, math.ceil(math.log2(max(sides) / 8)))
    # The first layer already halves large images: at full resolution it would cost more than all others.
    layers = [(channels, 32, 5, 1 if halvings == 1 else 2)]
    layers += [(32 if i == 0 else 64, 64, 3, 2) for i in range(max(1, halvings - 1))]
    layers += [(64, 64, 3, 1)]
    stack: list[nn.Module] = []
    for inputs, outputs, kernel, stride in layers:
        stack += [
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
        sides = [(side - 1) // stride + 1 for side in sides]
    stack += [nn.Flatten(), nn.Linear(64 * math.prod(sides), 128), nn.ReLU()]
    return nn.Sequential(*stack)


def _perceptron(size: int) -> nn.Sequential:
    """Flat inputs `(n, D)` to features `(n, 128)`."""
    return nn.Sequential(
        *(nn.Linear(size, 256), nn.LayerNorm(256), nn.ReLU()),
        *(nn.Linear(256, 128), nn.LayerNorm(128), nn.ReLU()),
    )


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
