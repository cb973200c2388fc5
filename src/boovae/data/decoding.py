"""Decode many JPEG pictures in worker processes, which run this file as a script (see `decode_pictures`).

Workers are separate processes, not forks: the parent may have threads and use a GPU. They do not import torch. A worker
reads one JSON object from its input, writes pixels directly into an array on disk, and prints the number of pictures
done, or the error of one of them.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boovae.errors import InputError, RunError

#: Number of pictures between two reports of a worker.
REPORT = 200


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
    np.lib.format.open_memmap(out, "w+", np.uint8, (len(files), 3, view.side, view.side)).flush()
    # Starting a process takes time: a few pictures are not worth a second one.
    count = workers or max(1, min(os.cpu_count() or 1, len(files) // REPORT))
    bounds = [len(files) * part // count for part in range(count + 1)]
    common = {"folder": str(folder), "out": str(out), "view": view}
    jobs = [{**common, "first": a, "files": list(files[a:b])} for a, b in itertools.pairwise(bounds)]
    stop = threading.Event()
    with ThreadPoolExecutor(count) as pool:
        parts = [pool.submit(_watch, job, stop, progress) for job in jobs]
        try:
            for part in as_completed(parts):
                part.result()
        except BaseException:  # Ctrl-C too
            stop.set()
            raise


def _watch(job: dict[str, Any], stop: threading.Event, progress: Callable[[int], None] | None) -> None:
    """Run one job in a worker process; terminate it early once `stop` is set."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command, left = [sys.executable, __file__], len(job["files"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(job))
            worker.stdin.close()
            for line in worker.stdout:
                answer = json.loads(line)
                if "error" in answer:
                    raise InputError(answer["error"])
                if stop.is_set():
                    return
                left -= answer["done"]
                if progress is not None:
                    progress(answer["done"])
        finally:
            worker.terminate()
    if left:
        raise RunError(f"the process that decodes pictures ended with {left} of them left; try again")


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


def _work(job: dict[str, Any]) -> None:
    size, resized, side = job["view"]
    view = View(tuple(size), tuple(resized), side)
    out = np.lib.format.open_memmap(job["out"], "r+")
    pending = 0
    for row, name in enumerate(job["files"], start=job["first"]):
        out[row] = decode_picture(Path(job["folder"]) / name, view).transpose(2, 0, 1)
        pending += 1
        if pending == REPORT or row == job["first"] + len(job["files"]) - 1:
            print(json.dumps({"done": pending}), flush=True)
            pending = 0
    out.flush()


if __name__ == "__main__":
    try:
        _work(json.load(sys.stdin))
    except InputError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        raise SystemExit(1) from None
