"""What a run folder says about its learned components, checked: their numbers and pictures, how they came about."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from boovae.errors import InputError
from boovae.report.log import PNG, Event, Floats, read_bytes


@dataclass(frozen=True)
class Component:
    """A stored component of the first replica; NaN where a number is missing."""

    task: int
    place: int
    weight: float  # inside its task
    cost: float  # nats that dropping it costs; NaN for the only one of its task
    pseudo_input: bytes  # PNG
    decoded: bytes  # PNG: what the decoder makes of it


@dataclass(frozen=True)
class Gain:
    """How near a task's mixture comes to its aggregated posterior: −E[log m] with so many components."""

    sizes: Floats  # n
    divergence: Floats  # n x [R]


@dataclass(frozen=True)
class Kept:
    """How many components were kept when a task ended, and how many were duplicates of others; [R]."""

    kept: Floats
    twins: Floats


@dataclass(frozen=True)
class Pruning:
    """How many components of a task were dropped later, [R]; `late`: after the last evaluation."""

    task: int
    dropped: Floats
    late: bool


def read_components(path: Path, notes: list[str]) -> list[Component]:
    """Return the components of the first replica; a damaged file has none and leaves a note."""
    if not path.is_file():
        return []
    try:
        listed = Event(path.name, json.loads(read_bytes(path))).value("components")
        if not isinstance(listed, list):
            raise ValueError("it has no list of components")
        return [_component(Event(f"component {index}", entry)) for index, entry in enumerate(listed)]
    except (InputError, ValueError, RecursionError) as error:
        problem = str(error).partition(";")[0]  # the remedies are for the logs
        notes.append(f"{path.name} is damaged ({problem}); the learned components are left out.")
        return []


def _component(event: Event) -> Component:
    place = event.integer("component", below=10**6)
    pictures = _picture(event, "pseudo_input"), _picture(event, "decoded")
    return Component(event.task(), place, event.number("weight"), event.number("cost"), *pictures)


def _picture(event: Event, key: str) -> bytes:
    try:
        content = base64.b64decode(str(event.value(key)), validate=True)
    except ValueError:
        content = b""
    if not content.startswith(PNG):
        raise event.error(f"'{key}' is not a PNG picture")
    return content


def gains(events: Sequence[Event], replicas: int) -> dict[int, Gain]:
    """Return the divergence over the number of components, by task; of a size measured twice the later number."""
    latest: dict[int, dict[float, Floats]] = {}
    for event in events:
        if event.value("event") == "components" and event.value("sizes") is not None:
            count = len(event.texts("sizes"))
            rows = event.array("divergence", count, replicas)
            for size, row in zip(event.array("sizes", count).tolist(), rows, strict=True):
                if math.isfinite(size):
                    latest.setdefault(event.task(), {})[size] = row
    return {
        task: Gain(np.array(sorted(found)), np.array([found[size] for size in sorted(found)]))
        for task, found in sorted(latest.items())
    }


def kept(events: Sequence[Event], replicas: int) -> dict[int, Kept]:
    """Return how many components each task kept."""
    return {
        event.task(): Kept(event.array("kept", replicas), event.array("twins", replicas))
        for event in events
        if event.value("event") == "components" and event.value("kept") is not None
    }


def prunings(events: Sequence[Event], replicas: int) -> list[Pruning]:
    """Return what was pruned after a task had ended."""
    evaluated = max((index for index, e in enumerate(events) if e.value("event") == "evaluation"), default=-1)
    return [
        Pruning(event.task(), event.array("dropped", replicas), late=-1 < evaluated < index)
        for index, event in enumerate(events)
        if event.value("event") == "prune"
    ]
