"""Tasks, and streams of tasks."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from boovae.config.section import WholeNumber, checked
from boovae.data.arrays import (
    SPLITS,
    TEST,
    TRAIN,
    VALID,
    Held,
    IntArray,
    Labelled,
    as_images,
    as_labels,
    check_pixels,
    random_split,
    to_float,
)
from boovae.errors import InputError, unknown_name

BINARIZE = ("none", "dynamic", "threshold")

TaskData = ArrayLike | Tensor | tuple[ArrayLike | Tensor, ArrayLike | Tensor]


class Split(NamedTuple):
    """Images of a task, flattened to ``(n, D)`` float32, and their labels ``(n,)`` int64."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Task:
    """The data of one task; ``classes`` are the labels that occur in it."""

    name: str
    train: Split
    valid: Split
    test: Split
    classes: tuple[int, ...]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(getattr(self, split).images)} {split}" for split in SPLITS)
        return f"Task({self.name!r}: {sizes})"


@dataclass(frozen=True)
class ImageSpec:
    """The format of images: shape of one, range of the pixels, and how they are binarised."""

    shape: tuple[int, ...]
    pixel_range: tuple[float, float] = (0.0, 1.0)
    binarize: str = "none"

    @property
    def pixels(self) -> int:
        """The number of pixels of an image, or of features of a row."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Stream(Sequence[Task]):
    """A sliceable sequence of tasks and what they have in common.

    Parameters
    ----------
    name : name of the dataset.
    shape : shape of one image: ``(28, 28)``, ``(3, 32, 32)`` with the colours first, or ``(features,)``.
    class_names : names of all classes of the dataset; a label is an index into them.
    pixel_range : lowest and highest value of a pixel.
    binarize : "none"; "threshold": all pixels are 0 or 1; "dynamic": those of valid and test are 0 or 1, while
        train keeps its grey values, from which the trainer draws in every epoch.
    split_record : how the data was split, with the seed, the sizes and the digest, as plain values for JSON.
    tasks : the tasks, in order.

    >>> stream = Stream.from_tasks([np.zeros((10, 4)), np.ones((10, 4))])
    >>> stream[:1]
    Stream('arrays': 1 of 2 tasks)
    >>> stream[1].train.images.shape
    torch.Size([8, 4])
    """

    name: str
    shape: tuple[int, ...]
    class_names: tuple[str, ...]
    pixel_range: tuple[float, float]
    binarize: str
    split_record: dict[str, Any]
    tasks: tuple[Task, ...]
    unsliced: Stream | None = None

    @property
    def spec(self) -> ImageSpec:
        """The format of its images."""
        return ImageSpec(self.shape, self.pixel_range, self.binarize)

    @property
    def full(self) -> Stream:
        """The stream before slicing."""
        return self if self.unsliced is None else self.unsliced

    @property
    def digest(self) -> str:
        """SHA-256 of all images, labels and splits; slices, class order and grouping do not change it."""
        return str(self.split_record["digest"])

    def __len__(self) -> int:
        return len(self.tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> Stream: ...

    def __getitem__(self, index: int | slice) -> Task | Stream:
        if isinstance(index, slice):
            return replace(self, tasks=self.tasks[index], unsliced=self.full)
        return self.tasks[index]

    def __repr__(self) -> str:
        return f"Stream({self.name!r}: {len(self)} of {len(self.full)} tasks)"

    def followed_by(self, other: Stream) -> Stream:
        """Return these tasks followed by those of another stream; classes of the same name are one class.

        >>> letters = Stream.from_tasks([np.zeros((10, 4)), np.ones((10, 4))], names=["a", "b"])
        >>> more = Stream.from_tasks([np.ones((10, 4)), np.zeros((10, 4))], names=["b", "c"])
        >>> [task.classes for task in letters.followed_by(more)]
        [(0,), (1,), (1,), (2,)]
        """
        if other.full is self.full:
            return replace(self, tasks=(*self.tasks, *other.tasks), unsliced=self.full)
        names = (*self.class_names, *(name for name in other.class_names if name not in self.class_names))
        label_of = torch.tensor([names.index(name) for name in other.class_names])
        tasks = (*self.tasks, *(_relabelled(task, label_of) for task in other.tasks))
        content = [self.digest, other.digest, names, [task.classes for task in tasks]]
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        record = {"parts": [self.split_record, other.split_record], "digest": digest}
        return replace(self, class_names=names, split_record=record, tasks=tasks, unsliced=None)

    @classmethod
    def from_tasks(
        cls,
        tasks: Sequence[TaskData],
        *,
        test: Sequence[TaskData] | Held = None,
        valid: Sequence[TaskData] | Held = None,
        names: Sequence[str] | None = None,
        class_names: Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        pixel_range: tuple[float, float] = (0.0, 1.0),
        seed: int = 0,
        binarize: str = "none",
        name: str = "arrays",
    ) -> Stream:
        """Return a stream of arrays or tensors, one entry per task: images or ``(images, labels)``.

        Images are ``(n, features)``, ``(n, h, w)`` or ``(n, h, w, c)``; uint8 is mapped from 0..255 onto
        ``pixel_range``, floats must lie in it. Without labels the class is the index of the task. ``test``
        and ``valid`` are sequences like ``tasks``, or a share or number of images drawn from each task
        with ``seed`` (by default a tenth is test, then a tenth of the rest valid).
        """
        count = _count_tasks(tasks, "tasks")
        task_names = tuple(map(str, range(count))) if names is None else tuple(map(str, names))
        if len(task_names) != count or len(set(task_names)) != count:
            raise InputError(f"names: {count} tasks need {count} different names, found {list(task_names)}")
        pixel_range = _checked_range(pixel_range)
        held = {VALID: valid, TEST: test}
        shares = {SPLITS[code]: part if isinstance(part, float | int | None) else 0 for code, part in held.items()}
        given = {code: part for code, part in held.items() if not isinstance(part, float | int | None)}
        for code, part in given.items():
            if _count_tasks(part, SPLITS[code]) != count:
                raise InputError(f"{SPLITS[code]}: {len(part)} entries for {count} tasks; pass one per task")
        data, task_of, labelled = _joined({TRAIN: tasks, **given}, shape, pixel_range)
        assert data.split is not None
        seed = checked("seed", seed, WholeNumber)
        for index, task_name in enumerate(task_names):
            own = np.flatnonzero((task_of == index) & (data.split == TRAIN))
            data.split[own] = random_split(len(own), (seed, index), f"tasks[{index}] ('{task_name}')", **shares)
        default_names = map(str, range(int(data.labels.max()) + 1)) if labelled else task_names
        how = "arrays: " + ", ".join(f"{key} {_describe(value)}" for key, value in shares.items())
        return build_stream(
            data._replace(class_names=tuple(default_names if class_names is None else class_names), how=how),
            task_of,
            task_names,
            name=name,
            pixel_range=pixel_range,
            binarize=binarize,
            seed=seed,
        )


def build_stream(
    data: Labelled,
    task_of: IntArray,
    task_names: Sequence[str],
    *,
    name: str,
    pixel_range: tuple[float, float] = (0.0, 1.0),
    binarize: str = "none",
    seed: int = 0,
    extra: dict[str, Any] | None = None,
) -> Stream:
    """Return a stream of checked images that have a split; ``task_of`` holds the task of each (-1: none)."""
    _check_binarize(binarize, pixel_range)
    seed = checked("seed", seed, WholeNumber)
    if int(data.labels.max()) >= len(data.class_names):
        raise InputError(f"class_names: {len(data.class_names)} names, but a label is {int(data.labels.max())}")
    assert data.split is not None
    used = task_of >= 0
    if not used.all():
        task_of = task_of[used]
        data = data._replace(images=data.images[used], labels=data.labels[used], split=data.split[used])
    tasks = []
    for index, task_name in enumerate(task_names):
        parts: dict[str, Split] = {}
        for code, split_name in enumerate(SPLITS):
            rows = np.flatnonzero((task_of == index) & (data.split == code))
            if not len(rows):
                raise InputError(
                    f"task '{task_name}' has no {split_name} image; "
                    "each task needs at least 1 image in train, valid and test"
                )
            pixels = to_float(data.images[rows], pixel_range).flatten(1)
            pixels = binarized(pixels, binarize, code, (seed, index))
            parts[split_name] = Split(pixels, torch.from_numpy(data.labels[rows]))
        classes = tuple(int(label) for label in np.unique(data.labels[task_of == index]))
        tasks.append(Task(task_name, **parts, classes=classes))
    record = {"dataset": name, "seed": seed, "how": data.how, "binarize": binarize, **(extra or {})}
    record |= _sizes_record(tasks)
    record["digest"] = _digest(data, pixel_range, binarize, seed)
    return Stream(name, data.images.shape[1:], data.class_names, pixel_range, binarize, record, tuple(tasks))


def _sizes_record(tasks: Sequence[Task]) -> dict[str, Any]:
    """Return the numbers of images, in total and per task, for the record of a split."""
    per_task = [
        {"name": task.name, "classes": list(task.classes)}
        | {split: len(getattr(task, split).labels) for split in SPLITS}
        for task in tasks
    ]
    return {"sizes": {split: sum(task[split] for task in per_task) for split in SPLITS}, "tasks": per_task}


def recut(stream: Stream, borders: Sequence[int]) -> Stream:
    """Return the stream with its sequence of training images cut at `borders` (positions in that sequence).

    Validation and test images are cut in proportion: a border after a third of a task's training images also falls
    after a third of its validation images.

    >>> stream = Stream.from_tasks([np.zeros((100, 4)), np.ones((100, 4))])
    >>> [len(task.train.images) for task in recut(stream, [40])], [task.classes for task in recut(stream, [40])]
    ([40, 122], [(0,), (0, 1)])
    """
    total = sum(len(task.train.images) for task in stream)
    ends = [0, *borders, total]
    if any(later <= earlier for earlier, later in itertools.pairwise(ends)):
        raise InputError(
            f"{{borders}} is {list(borders)}; they must increase and lie between 1 and {total - 1}: "
            f"there are {total} training images"
        )
    tasks = []
    for number, pieces in enumerate(zip(*(_pieces(stream, name, ends) for name in SPLITS), strict=True), start=1):
        parts = dict(zip(SPLITS, pieces, strict=True))
        for name, part in parts.items():
            if not len(part.images):
                raise InputError(f"{{borders}}: task {number} would have no {name} image; remove a border")
        labels = torch.cat([part.labels for part in pieces])
        tasks.append(Task(str(number), **parts, classes=tuple(labels.unique().tolist())))
    record = {**stream.split_record, "borders": list(borders), **_sizes_record(tasks)}
    return replace(stream, tasks=tuple(tasks), split_record=record, unsliced=None)


def _pieces(stream: Stream, name: str, ends: Sequence[int]) -> list[Split]:
    """Return the images of one split, cut in proportion to the training images."""
    splits = [getattr(task, name) for task in stream]
    images, labels = map(torch.cat, zip(*splits, strict=True))
    counts, own = [len(task.train.images) for task in stream], [len(split.images) for split in splits]
    before, own_before = (list(itertools.accumulate(sizes, initial=0)) for sizes in (counts, own))
    places = []
    for end in ends:
        task = min(bisect(before, end), len(counts)) - 1
        places.append(own_before[task] + round((end - before[task]) / counts[task] * own[task]))
    return [Split(images[a:b], labels[a:b]) for a, b in itertools.pairwise(places)]


def _count_tasks(tasks: Sequence[TaskData], where: str) -> int:
    if isinstance(tasks, (np.ndarray, Tensor, str, bytes)) or not isinstance(tasks, Sequence):
        raise InputError(f"{where}: pass a list with one entry per task, found {type(tasks).__name__}")
    if not len(tasks):
        raise InputError(f"{where}: no tasks; pass at least one")
    return len(tasks)


def _joined(
    given: Mapping[int, Sequence[TaskData]], shape: Sequence[int] | None, pixel_range: tuple[float, float]
) -> tuple[Labelled, IntArray, bool]:
    """Return the images of all tasks and splits, the task of each, and whether they came with labels."""
    parts: list[NDArray[Any]] = []
    columns: list[IntArray] = []  # (3, n) each: label, split, task
    labelled: set[bool] = set()
    for code, index, task in ((code, *entry) for code, tasks in given.items() for entry in enumerate(tasks)):
        where = f"{'tasks' if code == TRAIN else SPLITS[code]}[{index}]"
        if isinstance(task, tuple) and len(task) != 2:
            raise InputError(f"{where}: a tuple is (images, labels), found {len(task)} entries")
        array, labels = task if isinstance(task, tuple) else (task, None)
        images = check_pixels(as_images(array, where, shape), pixel_range, where)
        labelled.add(labels is not None)
        if len(labelled) > 1:
            raise InputError(f"{where}: pass labels for all tasks and splits or for none")
        if parts and images.shape[1:] != parts[0].shape[1:]:
            raise InputError(
                f"{where}: images of shape {images.shape[1:]}, but those before have {parts[0].shape[1:]}; "
                "all tasks must agree"
            )
        parts.append(images)
        label = np.full(len(images), index) if labels is None else as_labels(labels, len(images), f"{where} labels")
        columns.append(np.stack([label, np.full(len(images), code), np.full(len(images), index)]))
    if len({images.dtype for images in parts}) > 1:  # bytes and floats: convert both to one scale
        parts = [to_float(images, pixel_range).numpy() for images in parts]
    label, split, task_of = np.concatenate(columns, 1)
    return Labelled(np.concatenate(parts), label, split, ()), task_of, labelled == {True}


def _checked_range(pixel_range: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = map(float, pixel_range)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"pixel_range={pixel_range!r}: pass (lowest, highest), both finite")
    return low, high


def _describe(share: Held) -> str:
    if share is None:
        return "a random tenth"
    return f"random {share}" if share else "as given"


def _check_binarize(binarize: str, pixel_range: tuple[float, float]) -> None:
    if binarize not in BINARIZE:
        raise unknown_name("binarize", str(binarize), BINARIZE)
    if binarize != "none" and pixel_range != (0.0, 1.0):
        raise InputError(f"binarize='{binarize}' needs pixel_range (0, 1), found {pixel_range}; use 'none'")


def binarized(pixels: Tensor, binarize: str, code: int, seed: tuple[int, int]) -> Tensor:
    """Binarise grey values in [0, 1] as the images of a split (`code`) are; "none" leaves them as they are."""
    if binarize == "threshold":
        return (pixels > 0.5).float()
    if binarize == "dynamic" and code != TRAIN:
        # Scores must be comparable between epochs and methods, so these are drawn once.
        noise = np.random.default_rng([*seed, code]).random(pixels.shape, np.float32)
        return (torch.from_numpy(noise) < pixels).float()
    return pixels


def _relabelled(task: Task, label_of: Tensor) -> Task:
    train, valid, test = (Split(part.images, label_of[part.labels]) for part in (task.train, task.valid, task.test))
    return Task(task.name, train, valid, test, tuple(sorted({int(label_of[label]) for label in task.classes})))


def _digest(data: Labelled, pixel_range: tuple[float, float], binarize: str, seed: int) -> str:
    drawn = seed if binarize == "dynamic" else None  # the seed then determines pixels, not only the split
    head = [list(data.images.shape), data.images.dtype.str, list(pixel_range), binarize, drawn]
    sha256 = hashlib.sha256(json.dumps(head).encode())
    for array in (data.images, data.labels, data.split):
        sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()
