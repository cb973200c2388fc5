"""Samples as a picture: a grid of images, or a strip of colours for features that are not images."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from boovae.errors import InputError
from boovae.files import write_file

if TYPE_CHECKING:
    from PIL.Image import Image

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

SEPARATOR = 112  # a grey that shows beside black digits and beside white clothes
STRIP_WIDTH = 256  # pixels a heat-strip has at least, so that two features are still visible
# Five stops of a perceptually even ramp (dark blue to yellow), readable without seeing red from green.
RAMP = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=np.float64)


def grid(
    images: npt.ArrayLike,
    shape: Sequence[int],
    columns: int | None = None,
    scale: int = 2,
    pixel_range: tuple[float, float] = (0.0, 1.0),
) -> Image:
    """Lay `images` (n, D) out as one picture with thin separators.

    `shape` is `(h, w)` or `(1, h, w)` for grey, `(3, h, w)` for colour, `(f,)` for features that are not
    images: those become one strip of colours per row. Values are clipped to `pixel_range`; a value that is
    not a number is drawn in the grey of the separators.

    >>> grid(np.zeros((6, 16)), shape=(4, 4), columns=3, scale=1).size
    (16, 11)
    """
    from PIL import Image as Picture

    flat = _checked(images, shape, columns, scale, pixel_range)
    low, high = pixel_range
    unit = (np.clip(flat, low, high) - low) / (high - low)
    if len(shape) == 1:
        tiles = _strips(unit, scale)
        columns = columns or 1
    else:
        tiles = _tiles(unit, shape, scale)
        columns = columns or math.ceil(math.sqrt(len(tiles)))
    sheet = _sheet(tiles, min(columns, len(tiles)))
    return Picture.fromarray(sheet[:, :, 0] if sheet.shape[2] == 1 else sheet)


def save_grid(path: Path, images: npt.ArrayLike, shape: Sequence[int], **options: Any) -> None:
    """Write `grid(images, shape, **options)` to `path` as PNG; interrupted, it leaves the old file whole."""
    buffer = io.BytesIO()
    grid(images, shape, **options).save(buffer, format="PNG")
    write_file(Path(path), buffer.getvalue())


def _checked(
    images: npt.ArrayLike,
    shape: Sequence[int],
    columns: int | None,
    scale: int,
    pixel_range: tuple[float, float],
) -> Floats:
    """Return the images as floats (n, D) after checking every argument against the others."""
    flat = np.asarray(images, dtype=np.float64)
    if len(shape) not in (1, 2, 3) or min(shape) < 1 or (len(shape) == 3 and shape[0] not in (1, 3)):
        raise InputError(f"shape {tuple(shape)} is not a picture: give (h, w), (1, h, w), (3, h, w) or (features,)")
    if flat.ndim != 2 or len(flat) == 0 or flat.shape[1] != math.prod(shape):
        raise InputError(
            f"images has shape {flat.shape}: give (n, {math.prod(shape)}) with n > 0 for shape {tuple(shape)}"
        )
    if scale < 1 or (columns is not None and columns < 1):
        raise InputError(f"scale {scale} and columns {columns} must be at least 1")
    if not pixel_range[0] < pixel_range[1]:
        raise InputError(f"pixel_range {pixel_range} is empty: give (lowest, highest)")
    return flat


def _tiles(unit: Floats, shape: Sequence[int], scale: int) -> Bytes:
    """Turn values in [0, 1] into enlarged tiles (n, h, w, channels)."""
    channels, height, width = (1, *shape) if len(shape) == 2 else shape
    pixels = _to_bytes(unit * 255).reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
    return pixels.repeat(scale, axis=1).repeat(scale, axis=2)


def _strips(unit: Floats, scale: int) -> Bytes:
    """Turn values in [0, 1] into one coloured strip each (n, h, w, 3)."""
    stops = np.linspace(0.0, 1.0, len(RAMP))
    colours = np.stack([np.interp(unit, stops, RAMP[:, c]) for c in range(3)], axis=-1)
    cell = max(scale, STRIP_WIDTH // unit.shape[1])
    return _to_bytes(colours)[:, None].repeat(4 * scale, axis=1).repeat(cell, axis=2)


def _to_bytes(values: Floats) -> Bytes:
    """Round to bytes; what is not a number becomes the separators' grey."""
    return np.where(np.isnan(values), SEPARATOR, np.rint(values)).astype(np.uint8)


def _sheet(tiles: Bytes, columns: int) -> Bytes:
    """Put tiles (n, h, w, c) on one sheet, a pixel of separator around each."""
    count, height, width, channels = tiles.shape
    rows = math.ceil(count / columns)
    sheet = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), SEPARATOR, dtype=np.uint8)
    for index, tile in enumerate(tiles):
        top, left = (index // columns) * (height + 1) + 1, (index % columns) * (width + 1) + 1
        sheet[top : top + height, left : left + width] = tile
    return sheet
