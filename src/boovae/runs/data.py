"""Images of a run: its dataset, and the tasks it has learned, whose images may no longer be available."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from boovae.config import Settings
from boovae.data import DATASETS, Stream, Task, load_stream
from boovae.data.borders import recut
from boovae.errors import InputError

Event = dict[str, Any]


def load_data(
    settings: Settings, data_dir: Path | None = None, source: str | None = None, *, download: bool = True
) -> Stream:
    """Load the dataset of a run as its settings say; all classes of another `source` become one task."""
    name = settings.data.dataset if source is None else source
    if not download and name in DATASETS and not DATASETS[name].is_present(data_dir):
        raise InputError(f"{name} is not on this disk")
    stream = load_stream(
        name,
        data_dir=data_dir,
        seed=settings.data.data_seed,
        classes_per_task=settings.data.classes_per_task if source is None else None,
        class_order=settings.data.class_order if source is None else None,
        limit=settings.data.limit,
        binarize=settings.data.binarize,
        pixel_range=DATASETS[settings.data.dataset].pixel_range if settings.data.dataset in DATASETS else None,
    )
    return stream if settings.data.borders is None or source is not None else recut(stream, settings.data.borders)


@dataclass
class Past:
    """The tasks a run has begun, in parts: their names, and their images or the reason why these are missing."""

    own: Stream | str  # the whole of the run's own dataset
    own_tasks: int = 0  # how many of its tasks have begun
    parts: list[tuple[Sequence[str], Stream | str]] = field(default_factory=list)

    def add(self, names: Sequence[str], found: Stream | str) -> None:
        """Append tasks."""
        self.parts.append((names, found))

    def add_own(self, names: Sequence[str]) -> None:
        """Append the next tasks of the run's own dataset."""
        first, self.own_tasks = self.own_tasks, self.own_tasks + len(names)
        self.add(names, self.own if isinstance(self.own, str) else self.own[first : self.own_tasks])

    @property
    def missing(self) -> dict[str, str]:
        """Why images are missing, by task name."""
        return {name: found for names, found in self.parts if isinstance(found, str) for name in names}

    @property
    def stream(self) -> Stream | None:
        """All tasks as one stream; None if the images of any are missing."""
        found = [part for _, part in self.parts if isinstance(part, Stream)]
        return functools.reduce(Stream.followed_by, found) if len(found) == len(self.parts) else None

    @property
    def tasks(self) -> list[Task | None]:
        """All tasks; None where images are missing."""
        whole = self.stream
        if whole is not None:
            return list(whole)
        return [task for names, part in self.parts for task in ([None] * len(names) if isinstance(part, str) else part)]

    def explain(self) -> str:
        """Describe which images are missing and what cannot be measured without them."""
        names, reasons = ", ".join(self.missing), "; ".join(dict.fromkeys(self.missing.values()))
        return (
            f"no images of {names} ({reasons}): their NLL and the pooled NLL are null, diversity and Fréchet distance "
            "are left out"
        )


def learned_images(
    settings: Settings,
    head: Event,
    extensions: Sequence[Event],
    data_dir: Path | None = None,
    *,
    download: bool = True,
) -> Past:
    """Return the images of a run's tasks: `head` is its `run` event, `extensions` are its `extend` events.

    Images that have changed since the run was trained count as missing.
    """
    past = Past(_found(settings, head, data_dir, None, download))
    past.add_own(head["tasks"])
    for event in extensions:
        if event["source"] is None:
            past.add_own([event["name"]])
        else:
            past.add([event["name"]], _found(settings, event, data_dir, event["source"], download))
    return past


def _found(settings: Settings, event: Event, data_dir: Path | None, source: str | None, download: bool) -> Stream | str:
    """Return the images that an event refers to, or why they are missing."""
    if settings.data.dataset == "arrays" and source is None:
        return "a model of arrays does not keep its images; measure others in Python: `BooVAE.load(...).score(images)`"
    try:
        stream = load_data(settings, data_dir, source, download=download)
    except InputError as error:
        return str(error)
    return stream if stream.digest == event["split"]["digest"] else f"the images of {stream.name} have changed"
