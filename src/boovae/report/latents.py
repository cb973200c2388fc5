"""The map of a run's latent space as its folder has it, checked: test images by task, and the prior's components."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from boovae.errors import InputError
from boovae.report.log import Event, Floats, read_bytes

Part = TypeVar("Part")


@dataclass(frozen=True)
class Codes:
    """Places of some test images of one task, n x 2."""

    task: int
    points: Floats


@dataclass(frozen=True)
class Place:
    """A component of the prior; `task` is None where the prior is not divided among tasks."""

    task: int | None
    mass: float
    at: Floats  # 2
    deviation: Floats  # 2


@dataclass(frozen=True)
class LatentMap:
    """The plane in which the first replica's codes spread most."""

    explained: Floats  # 2: the axes' shares of the variance
    separate: bool  # every task has a latent space of its own
    codes: list[Codes]
    components: list[Place]


def read_latents(path: Path, notes: list[str]) -> LatentMap | None:
    """Return the map; there is none before the first evaluation, and a damaged file leaves a note."""
    if not path.is_file():
        return None
    try:
        event = Event(path.name, json.loads(read_bytes(path)))
        codes, components = _each(event, "codes", _codes), _each(event, "components", _place)
        return LatentMap(event.array("explained", 2), event.value("separate") is True, codes, components)
    except (InputError, ValueError, RecursionError) as error:
        problem = str(error).partition(";")[0]  # the remedies are for the logs
        notes.append(f"{path.name} is damaged ({problem}); the latent map is left out.")
        return None


def _each(event: Event, key: str, read: Callable[[Event], Part]) -> list[Part]:
    entries: Any = event.value(key)
    if not isinstance(entries, list):
        raise ValueError(f"it has no list of {key}")
    return [read(Event(f"{key} {index}", entry)) for index, entry in enumerate(entries)]


def _codes(event: Event) -> Codes:
    return Codes(event.task(), event.array("points", len(event.texts("points")), 2))


def _place(event: Event) -> Place:
    task = None if event.value("task") is None else event.task()
    return Place(task, event.number("mass"), event.array("at", 2), event.array("deviation", 2))
