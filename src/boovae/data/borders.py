"""Cut the images of a stream into other tasks."""

import itertools
from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace

import torch

from boovae.data.arrays import SPLITS
from boovae.data.tasks import Split, Stream, Task, sizes_record
from boovae.errors import InputError


def recut(stream: Stream, borders: Sequence[int]) -> Stream:
    """Return the stream with its sequence of training images cut at `borders` (positions in that sequence).

    Validation and test images are cut in proportion: a border after a third of a task's training images also falls
    after a third of its validation images.

    >>> import numpy as np
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
    record = {**stream.split_record, "borders": list(borders), **sizes_record(tasks)}
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
