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
from boovae.metrics.schema import Floats

if TYPE_CHECKING:
    from PIL.Image import Image

Bytes = npt.NDArray[np.uint8]

SEPARATOR = 112  # a grey visible beside black digits and white clothes
TILE = 40  # least pixels per side of an image in a gallery
GAP = 8  # pixels between the rows of a gallery
LABEL_SIZE, LABEL_LENGTH = 14, 24  # of names in a gallery: pixels, characters
STRIP_WIDTH = 256  # least width of a strip in pixels, so that two features are still visible
# Five stops of a perceptually uniform ramp (dark blue to yellow), suitable for colour-blind readers.
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
    images: those become one strip of colours per row. Values are clipped to `pixel_range`; NaN is drawn
    in the grey of the separators.

    >>> grid(np.zeros((6, 16)), shape=(4, 4), columns=3, scale=1).size
    (16, 11)
    """
    if scale < 1 or (columns is not None and columns < 1):
        raise InputError(f"scale {scale} and columns {columns} must be at least 1")
    tiles = _tiles(images, shape, scale, pixel_range)
    columns = min(columns or (1 if len(shape) == 1 else math.ceil(math.sqrt(len(tiles)))), len(tiles))
    rows = math.ceil(len(tiles) / columns)
    _, height, width, channels = tiles.shape
    cells = np.full((rows * columns, height + 1, width + 1, channels), SEPARATOR, dtype=np.uint8)
    cells[: len(tiles), 1:, 1:] = tiles
    sheet = np.concatenate([np.concatenate([*row], axis=1) for row in np.split(cells, rows)])
    return _picture(np.pad(sheet, ((0, 1), (0, 1), (0, 0)), constant_values=SEPARATOR))


def singles(images: npt.ArrayLike, shape: Sequence[int], pixel_range: tuple[float, float] = (0.0, 1.0)) -> list[Image]:
    """Return each of `images` (n, D) as a separate picture of the same size; arguments as in `grid`."""
    return [_picture(tile) for tile in _tiles(images, shape, 1, pixel_range)]


def _picture(pixels: Bytes) -> Image:
    from PIL import Image as Picture

    return Picture.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def save_grid(path: Path, images: npt.ArrayLike, shape: Sequence[int], **options: Any) -> None:
    """Write `grid(images, shape, **options)` to `path` as PNG; an interruption leaves the old file intact."""
    write_file(Path(path), png(grid(images, shape, **options)))


def gallery(
    rows: Sequence[tuple[str, npt.ArrayLike]], shape: Sequence[int], pixel_range: tuple[float, float] = (0.0, 1.0)
) -> Image:
    """Lay out named rows below each other, names at the left; a row is n pairs of images, (2, n, D).

    The first image of a pair stands above the second; features that are not images stand side by side instead.
    """
    from PIL import Image as Picture
    from PIL import ImageDraw, ImageFont

    if not rows:
        raise InputError("there is nothing to show: give at least one row of images")
    strips = [_pairs(np.asarray(images, dtype=np.float64), shape, pixel_range) for _, images in rows]
    font = ImageFont.load_default(LABEL_SIZE)
    names = [_short(name) for name, _ in rows]
    margin = 3 * GAP + math.ceil(max(font.getlength(name) for name in names))
    width = margin + max(strip.width for strip in strips) + GAP
    sheet = Picture.new("RGB", (width, GAP + sum(strip.height + GAP for strip in strips)), "white")
    draw = ImageDraw.Draw(sheet)
    top = GAP
    for name, strip in zip(names, strips, strict=True):
        sheet.paste(strip, (margin, top))
        draw.text((margin - 2 * GAP, top + strip.height / 2), name, fill="black", font=font, anchor="rm")
        top += strip.height + GAP
    return sheet


def png(picture: Image) -> bytes:
    """Return a picture as the content of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _pairs(images: Floats, shape: Sequence[int], pixel_range: tuple[float, float]) -> Image:
    """Return pairs of images (2, n, D) as two rows of tiles, or of features as two columns of strips."""
    if len(shape) == 1:
        return grid(images.swapaxes(0, 1).reshape(-1, images.shape[2]), shape, columns=2, pixel_range=pixel_range)
    return grid(images.reshape(-1, images.shape[2]), shape, images.shape[1], tile_scale(shape), pixel_range)


def tile_scale(shape: Sequence[int]) -> int:
    """Return the factor that enlarges an image to a readable size.

    >>> tile_scale((8, 8)), tile_scale((3, 64, 64))
    (5, 1)
    """
    return max(1, math.ceil(TILE / max(shape[-2:]))) if len(shape) > 1 else 2


def _short(name: str) -> str:
    """Return a name as one line that can be drawn."""
    line = " ".join(name.encode("utf-8", errors="replace").decode("utf-8").split())
    return line if len(line) <= LABEL_LENGTH else f"{line[: LABEL_LENGTH - 1]}…"


def _tiles(images: npt.ArrayLike, shape: Sequence[int], scale: int, pixel_range: tuple[float, float]) -> Bytes:
    """Check images (n, D) and turn them into enlarged tiles (n, h, w, channels), features into strips of colours."""
    flat = np.asarray(images, dtype=np.float64)
    if len(shape) not in (1, 2, 3) or min(shape) < 1 or (len(shape) == 3 and shape[0] not in (1, 3)):
        raise InputError(f"shape {tuple(shape)} is not a picture: give (h, w), (1, h, w), (3, h, w) or (features,)")
    if flat.ndim != 2 or len(flat) == 0 or flat.shape[1] != math.prod(shape):
        raise InputError(
            f"images has shape {flat.shape}: give (n, {math.prod(shape)}) with n > 0 for shape {tuple(shape)}"
        )
    low, high = pixel_range
    if not low < high:
        raise InputError(f"pixel_range {pixel_range} is empty: give (lowest, highest)")
    unit = (np.clip(flat, low, high) - low) / (high - low)
    if len(shape) == 1:
        stops = np.linspace(0.0, 1.0, len(RAMP))
        colours = np.stack([np.interp(unit, stops, RAMP[:, c]) for c in range(3)], axis=-1)
        cell = max(scale, STRIP_WIDTH // unit.shape[1])
        return _to_bytes(colours)[:, None].repeat(4 * scale, axis=1).repeat(cell, axis=2)
    channels, height, width = (1, *shape) if len(shape) == 2 else shape
    pixels = _to_bytes(unit * 255).reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
    return pixels.repeat(scale, axis=1).repeat(scale, axis=2)


def _to_bytes(values: Floats) -> Bytes:
    """Round to bytes; NaN becomes the separators' grey."""
    return np.where(np.isnan(values), SEPARATOR, np.rint(values)).astype(np.uint8)
