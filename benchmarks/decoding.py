"""How fast are faces decoded? Compare a plain Pillow loop with the decoder of boovae, which uses several threads.

    python benchmarks/decoding.py --images 8000 --workers 2

It writes a thousand synthetic pictures of CelebA's size (smooth colours with edges and grain) and about its file size
(9 kB) to a temporary folder, and decodes them repeatedly. Loop and decoder take turns for several rounds, and the
median round counts, so that a busy machine affects both alike. CPU time is measured as well, because it depends less on
other processes. The files come from the page cache, so the times exclude the disk.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from boovae.data.celeba import VIEWS, View, decode_pictures

Bytes = NDArray[np.uint8]
#: JPEG quality at which the synthetic pictures have the file size of CelebA's.
QUALITY = 90
#: Number of different pictures.
WRITTEN = 1000


class Took(NamedTuple):
    """Seconds of a round: wall time, and CPU time of all threads."""

    wall: float
    processors: float


def main() -> None:
    """Time loop and decoder and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=8000, help="pictures to decode in a round")
    parser.add_argument("--workers", type=int, default=2, help="threads of the decoder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, choices=tuple(VIEWS), default=32, help="pixels of a decoded picture")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "pictures"
        names = write_pictures(folder, min(WRITTEN, asked.images))
        files = list(itertools.islice(itertools.cycle(names), asked.images))
        measure(folder, files, VIEWS[asked.side], asked.workers, asked.rounds)


def measure(folder: Path, files: list[str], view: View, workers: int, rounds: int) -> None:
    """Let loop and decoder take turns; print their times and how much their pixels differ."""
    out, found = folder.parent / "decoded.npy", {}

    def loop() -> None:
        found["loop"] = plain_loop(folder, files, view)

    def decoder() -> None:
        decode_pictures(files, folder, out, view, lambda done: None, workers)

    ways: dict[str, Callable[[], None]] = {"plain loop": loop, f"boovae, {workers} threads": decoder}
    took: dict[str, list[Took]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            took[name].append(timed(way))
    size = sum((folder / name).stat().st_size for name in files) / len(files)
    print(f"{len(files)} pictures of {size / 1000:.1f} kB to {view.side} x {view.side}, {rounds} rounds, medians;")
    print(f"Pillow {PIL.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, load {_load()}")
    print(f"{'':24}{'pictures/s':>12}{'ms processor':>14}")
    for name, each in took.items():
        wall, busy = (statistics.median(column) / len(files) for column in zip(*each, strict=True))
        print(f"{name:24}{1 / wall:12.0f}{1e3 * busy:14.3f}")
    ratios = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(*took.values(), strict=True)]
    wall, busy = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"times faster by the clock: {wall:.2f}; by processor time on {workers} idle cores: {workers * busy:.2f}")
    apart = np.abs(np.load(out).transpose(0, 2, 3, 1).astype(np.int16) - found["loop"])
    print(f"pixels apart, of 255: {apart.mean():.2f} on average, {np.percentile(apart, 99):.0f} for one in a hundred,")
    print(f"{apart.max()} at most; mean pixel of a picture: {_mean_shift(np.load(out), found['loop']):.2f} at most")


def plain_loop(folder: Path, files: list[str], view: View) -> Bytes:
    """Return the pictures (n, side, side, 3), decoded the straightforward way."""
    left, top = (round((resized - view.side) / 2) for resized in view.resized)
    box = (left, top, left + view.side, top + view.side)
    found = np.empty((len(files), view.side, view.side, 3), np.uint8)
    for row, name in enumerate(files):
        with Image.open(folder / name) as picture:
            small = picture.convert("RGB").resize(view.resized, Image.Resampling.BILINEAR)
            found[row] = np.asarray(small.crop(box))
    return found


def write_pictures(folder: Path, count: int) -> list[str]:
    """Write synthetic pictures: smooth colours, an oval with an edge, and grain."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    width, height = size = VIEWS[32].size
    y, x = np.mgrid[:height, :width]
    files = [f"{number:06}.jpg" for number in range(1, count + 1)]
    for name in files:
        smooth = Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
        pixels = np.asarray(smooth, np.float64)
        centre, reach = rng.uniform(0.4, 0.6, 2), rng.uniform(0.25, 0.4, 2)
        inside = np.hypot((x / width - centre[0]) / reach[0], (y / height - centre[1]) / reach[1]) < 1
        pixels = np.where(inside[..., None], 0.3 * pixels + 0.7 * rng.integers(60, 230, 3), pixels)
        grain = pixels + rng.normal(0, 6, pixels.shape)
        picture = Image.fromarray(grain.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.6))
        picture.save(folder / name, quality=QUALITY)
    return files


def timed(way: Callable[[], None]) -> Took:
    """Return the times of a round."""
    wall, busy = time.perf_counter(), time.process_time()
    way()
    return Took(time.perf_counter() - wall, time.process_time() - busy)


def _mean_shift(ours: Bytes, theirs: Bytes) -> float:
    """Return the largest difference in mean pixel between pictures (n, 3, s, s) and (n, s, s, 3)."""
    return float(np.abs(ours.mean((1, 2, 3)) - theirs.mean((1, 2, 3))).max())


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
