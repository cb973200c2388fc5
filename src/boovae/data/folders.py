"""Folders of pictures: listed in natural order, checked by their headers, decoded upright and at one size."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boovae.config.settings import Resize
from boovae.data.arrays import Labelled, as_images
from boovae.errors import InputError
from boovae.files import memory_share

if TYPE_CHECKING:
    from PIL import Image

PICTURE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"))
# An explicit list, because some of Pillow's other formats start external programs.
PICTURE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
GREY_MODES = ("1", "L", "LA")
#: Sides that `resize=auto` chooses: a network trains in minutes on 64 pixels, and 4 or fewer show nothing.
LARGEST_SIDE, SMALLEST_SIDE = 64, 8
#: Bytes per number of a picture: itself as a byte and as a float; the weights of `mlp:128` in training (value,
#: gradient and Adam's two moments of 128 floats in the encoder and as many in the decoder).
DATA_BYTES, NETWORK_BYTES = 5, 4 * 4 * 2 * 128
#: The EXIF tag that says how to rotate a photograph; from 5 on its sides are exchanged.
ORIENTATION, SIDEWAYS = 0x0112, 5

Size = tuple[int, int]  # height, width


class Header(NamedTuple):
    """What a file says about its picture before it is decoded; the size is that of the upright picture."""

    file: Path
    size: Size
    colour: bool


def read_folder(path: str | Path, resize: Resize = None, *, natural: bool = True) -> Labelled:
    """Return the pictures of a folder with one sub-folder per class, in natural order: `month_2` before `month_10`.

    A folder that holds pictures itself is one class. Hidden files and files that are not pictures are skipped. The
    pictures are returned in grey if all of them are grey, else in RGB. ``resize`` is the height and width to bring them
    to, or "auto"; without it they must have one size. Without ``natural`` names are sorted as plain text.
    """
    path = Path(path)
    folders, loose = _visible(path, natural)
    if folders and loose:
        raise InputError(f"folder:{path}: pictures next to sub-folders ({loose[0].name}); put them into one")
    files = [(file, label) for label, folder in enumerate(folders or [path]) for file in _class_files(folder, natural)]
    headers = [_read_header(file) for file, _ in files]
    size, note = _common_size(headers, resize)
    colour = any(header.colour for header in headers)
    _check_feasible(headers, size, colour)
    images = np.empty((len(files), *size, 3) if colour else (len(files), *size), np.uint8)
    for image, (file, _) in zip(images, files, strict=True):
        picture = read_picture(file, str(file), None if resize is None else size)
        if picture.shape[:2] != size:  # rotated by EXIF data behind its pixels
            raise _two_sizes(headers[0], Header(file, picture.shape[:2], colour))
        image[...] = picture[..., None] if colour and picture.ndim == 2 else picture
    labels = np.array([label for _, label in files], np.int64)
    names = tuple(folder.name for folder in folders) or (path.resolve().name,)
    return Labelled(as_images(images, str(path)), labels, None, names, note=note)


# --- files ----------------------------------------------------------------------------------------------------------


def _class_files(folder: Path, natural: bool) -> list[Path]:
    """Return the pictures of one class."""
    inner, files = _visible(folder, natural)
    if inner:
        raise InputError(f"{folder}: has sub-folders ({inner[0].name}); pictures of a class lie in one folder")
    if not files:
        raise InputError(f"{folder}: no pictures; the known endings are {' '.join(sorted(PICTURE_SUFFIXES))}")
    return files


def _visible(folder: Path, natural: bool) -> tuple[list[Path], list[Path]]:
    """Return the sub-folders and the pictures of a folder, each sorted by name."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
        if natural:
            entries.sort(key=_natural)
        folders = [entry for entry in entries if entry.is_dir()]
    except OSError as error:
        raise InputError(f"folder:{folder}: cannot be read ({error.strerror}); check the path") from error
    return folders, [entry for entry in entries if entry.suffix.lower() in PICTURE_SUFFIXES and entry not in folders]


def _natural(path: Path) -> list[str | int]:
    """Return a key that sorts the numbers within names by value."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]


# --- sizes ----------------------------------------------------------------------------------------------------------


def _common_size(headers: Sequence[Header], resize: Resize) -> tuple[Size, str]:
    """Return the size for all pictures and, if it was chosen here, how."""
    first = headers[0]
    if resize is None:
        other = next((header for header in headers if header.size != first.size), None)
        if other is not None:
            raise _two_sizes(first, other)
        return first.size, ""
    if resize != "auto":
        return resize, ""
    heights, widths = zip(*(header.size for header in headers), strict=True)
    median = int(np.median(heights)), int(np.median(widths))
    scale = min(1.0, LARGEST_SIDE / max(median))
    height, width = (max(SMALLEST_SIDE, round(side * scale)) for side in median)
    bounds = "" if (height, width) == median else f", scaled to sides of {SMALLEST_SIDE} to {LARGEST_SIDE} pixels"
    return (height, width), (
        f"pictures are resized to {height} x {width} (height x width): "
        f"the median of {len(headers)} is {median[0]} x {median[1]}{bounds}"
    )


def _two_sizes(first: Header, other: Header) -> InputError:
    return InputError(
        f"{other.file}: {_pixels(other.size)}, but {first.file} has {_pixels(first.size)}; resize to one size, "
        "or train with {resize=auto}, or with {resize} and a height and width"
    )


def _pixels(size: Size) -> str:
    return f"{size[1]} x {size[0]} pixels"


def _check_feasible(headers: Sequence[Header], size: Size, colour: bool) -> None:
    """Refuse pictures on which even a small network does not fit into memory, before they are decoded."""
    numbers = math.prod(size) * (3 if colour else 1)
    data, network = numbers * DATA_BYTES * len(headers), numbers * NETWORK_BYTES
    if data + network > memory_share():
        raise InputError(
            f"{headers[0].file}: pictures of {_pixels(size)} are too large: {len(headers)} of them take "
            f"{data / 1e9:,.1f} GB of memory and even a small network (mlp:128) {network / 1e9:,.1f} GB, together more "
            "than half of this machine's; train with {resize=auto}, or with {resize} and a smaller height and width"
        )


# --- pictures -------------------------------------------------------------------------------------------------------


def read_picture(
    source: Path | IO[bytes], name: str, size: Size | None = None, *, most_pixels: int | None = None
) -> NDArray[np.uint8]:
    """Return a picture in grey ``(h, w)`` or colour ``(h, w, 3)``, rotated by its EXIF data; errors use ``name``.

    With ``size`` it is scaled to cover that height and width, and what protrudes is cropped on both sides alike. A
    picture of more than ``most_pixels`` is refused before it is decoded.
    """
    from PIL import ImageOps

    with _opened(source, name) as picture:
        width, height = picture.size
        if most_pixels is not None and width * height > most_pixels:
            raise InputError(f"{name}: {width} x {height} pixels, more than {most_pixels:,}; make it smaller")
        if size is not None:  # a JPEG is decoded at an eighth of its size or more, which is much faster
            longest = 2 * max(size)
            picture.draft(None, (longest, longest))
        plain = _plain(ImageOps.exif_transpose(picture), picture.format, name)
        return np.asarray(plain if size is None else ImageOps.fit(plain, size[::-1]), np.uint8)


def _read_header(file: Path) -> Header:
    with _opened(file, str(file)) as picture:
        # Pillow decodes a whole PNG to look for EXIF data behind its pixels.
        known = picture.format != "PNG" or "exif" in picture.info
        sideways = known and picture.getexif().get(ORIENTATION, 1) >= SIDEWAYS
        if sideways and picture.format == "TIFF":  # Pillow rotates these itself, by now or when it decodes them
            picture.load()
            sideways = False
        grey = picture.mode in GREY_MODES or _has_16_bits(picture.mode, picture.format)
        return Header(file, picture.size if sideways else picture.size[::-1], not grey)


def _plain(picture: Image.Image, kind: str | None, name: str) -> Image.Image:
    """Return a picture in mode L or RGB: 16 bits are scaled to 8, what is transparent becomes white."""
    from PIL import Image

    if _has_16_bits(picture.mode, kind):
        return Image.fromarray(np.rint(np.asarray(picture) / 257).astype(np.uint8))
    if picture.mode.startswith(("I", "F")):
        raise InputError(f"{name}: more than 16 bits per pixel (mode {picture.mode}); convert it to 8 or 16 bits")
    grey = picture.mode in GREY_MODES
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return picture.convert("L" if grey else "RGB")


def _has_16_bits(mode: str, kind: str | None) -> bool:
    """Whether a picture is grey with values to 65,535, for which Pillow has several modes."""
    return mode.startswith("I;16") or (mode == "I" and kind in ("PNG", "PPM"))


@contextmanager
def _opened(source: Path | IO[bytes], name: str) -> Iterator[Any]:
    """Open a picture; however a damaged one fails, an error names it."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, Path) and source.exists() and not source.is_file():
        raise InputError(f"{name}: not an ordinary file; remove it")  # a pipe may block forever
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # Pillow scrambles a rotated TIFF that it opens itself.
            opened = source.open("rb") if isinstance(source, Path) else nullcontext(source)
            with opened as file, Image.open(file, formats=PICTURE_FORMATS) as picture:
                yield picture
    except InputError:
        raise
    except UnidentifiedImageError as error:
        raise InputError(f"{name}: cannot be read as a picture of a known kind; repair or remove it") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise InputError(f"{name}: too large to be unpacked ({error}); make it smaller or remove it") from error
    except Exception as error:  # damaged pictures fail in too many ways to list
        raise InputError(f"{name}: cannot be read as a picture ({error}); repair or remove it") from error
