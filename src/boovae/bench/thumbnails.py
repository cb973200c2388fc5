"""What the record of a finished cell shows: some samples after each task, and what its components decode to.

Whatever the dataset, only what a decoder has made is kept: never a real image, nor a pseudo-input, which may start at
one and stay near it.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boovae.report.pictures import png

if TYPE_CHECKING:
    from PIL.Image import Image

#: Rows and columns of a run's grid of samples that are kept, and how many it has.
SAMPLES, GRID = 4, 8
#: Pixels from which a picture is halved.
LARGE = 200
#: Components of a task that are kept, the heaviest: those that stand for many images.
LEARNED = 10


@dataclass(frozen=True)
class Sheet:
    """Pictures in rows, as PNG in base64, each row with its label; an empty text where there is none."""

    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


def sample_pictures(run: Path, tasks: int) -> list[str]:
    """Return some samples after each task, as PNG in base64."""
    from PIL import Image

    paths = [run / "samples" / f"task_{task:02d}.png" for task in range(tasks)]
    return [_text(png(_few(Image.open(path)))) for path in paths if path.is_file()]


def component_pictures(run: Path) -> dict[str, list[str]]:
    """Return what the decoder makes of each task's heaviest components, as PNG in base64, by the name of the task."""
    path = run / "components.json"
    found: dict[str, list[dict[str, Any]]] = {}
    for component in json.loads(path.read_text(encoding="utf-8"))["components"] if path.is_file() else ():
        found.setdefault(component["name"] or str(component["task"]), []).append(component)
    for components in found.values():
        components.sort(key=lambda component: component["weight"] or 0.0, reverse=True)
    return {name: [one["decoded"] for one in components[:LEARNED]] for name, components in found.items()}


def opened(picture: str) -> Image:
    """Return a picture of a record."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(picture)))


def _few(picture: Image) -> Image:
    """Return the upper left of a grid of samples, smaller if it is large."""
    box = (0, 0, picture.width * SAMPLES // GRID, picture.height * SAMPLES // GRID)
    few = (picture if picture.mode == "L" else picture.convert("RGB")).crop(box)
    return few.reduce(2) if few.width > LARGE else few


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
