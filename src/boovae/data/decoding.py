"""Decode many JPEG pictures on several cores. Threads suffice: Pillow releases the global lock while it decodes."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from boovae.errors import InputError

#: Number of pictures between two reports of a thread, and most threads: more of them wait for the interpreter.
REPORT, THREADS = 200, 4


class View(NamedTuple):
    """The part of a picture to keep: resize it from `size` (w, h) to `resized`, then crop its centre to `side`."""

    size: tuple[int, int]
    resized: tuple[int, int]
    side: int

    def box(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return the crop in pixels of a picture of `size`: left, top, right, bottom."""
        # A half is rounded to an even number, as torchvision's CenterCrop does.
        left, top = (round((resized - self.side) / 2) for resized in self.resized)
        scale_x, scale_y = size[0] / self.resized[0], size[1] / self.resized[1]
        return left * scale_x, top * scale_y, (left + self.side) * scale_x, (top + self.side) * scale_y


def decode_pictures(
    files: Sequence[str],
    folder: Path,
    out: Path,
    view: View,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the pictures `folder / files[i]` as uint8 (n, 3, side, side) to the NumPy file `out`.

    `progress` receives the number of newly finished pictures. An error names the picture.
    """
    pixels = np.lib.format.open_memmap(out, "w+", np.uint8, (len(files), 3, view.side, view.side))

    def decode(rows: range) -> int:
        for row in rows:
            pixels[row] = decode_picture(folder / files[row], view).transpose(2, 0, 1)
        return len(rows)

    rows = range(len(files))
    parts = [rows[start : start + REPORT] for start in rows[::REPORT]]
    with ThreadPoolExecutor(workers or min(os.cpu_count() or 1, THREADS)) as pool:
        for done in pool.map(decode, parts):
            if progress is not None:
                progress(done)
    pixels.flush()


def decode_picture(file: Path, view: View) -> NDArray[np.uint8]:
    """Return one picture as (side, side, 3); an error says what is wrong with it.

    Decoding a JPEG at half its size or less halves the time, so it is decoded at the smallest size that is at least
    `view.resized`. The centre is then cropped and resized in one pass.
    """
    from PIL import Image

    try:
        with Image.open(file, formats=("JPEG",)) as picture:
            size = picture.size
            if size == view.size:
                picture.draft("RGB", view.resized)
                small = picture if picture.mode == "RGB" else picture.convert("RGB")  # a copy costs time
                pixels = small.resize((view.side, view.side), Image.Resampling.BILINEAR, view.box(small.size))
                return np.asarray(pixels, np.uint8)
    except FileNotFoundError:
        raise InputError(f"{file}: no such picture") from None
    except Exception as error:  # damaged pictures fail in too many ways to list
        raise InputError(f"{file}: cannot be read as a JPEG picture ({error}); get a fresh copy") from error
    wanted, found = (" x ".join(map(str, pair)) for pair in (view.size, size))
    raise InputError(f"{file}: {found} pixels instead of {wanted}; use the aligned and cropped pictures")
