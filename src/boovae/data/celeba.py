"""Faces by the colour of their hair: CelebA (Liu, Luo, Wang and Tang, 2015) from its official files.

A picture is used if exactly one of the four hair colours is marked and none of hat, bald head and receding hairline.
It is resized to a width of 45 pixels and cropped to the central 32 x 32 (90 and 64 for the larger size). All pictures
are decoded once, on several cores, into one array in the cache; later that array is mapped into memory. A prepared
NumPy file `celeba_32.npz` (`celeba_64.npz`) may replace the official files.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.progress import MofNCompleteColumn

from boovae.data.arrays import IntArray, Labelled
from boovae.data.download import cache_folder, progress_bar, search_folders
from boovae.data.readers import read_npz
from boovae.errors import InputError

FOLDER = "celeba"
HOW = "official partition"
HAIR = ("Black_Hair", "Blond_Hair", "Brown_Hair", "Gray_Hair")
CLASS_NAMES = tuple(name.removesuffix("_Hair").lower() for name in HAIR)
NONE_OF = ("Wearing_Hat", "Bald", "Receding_Hairline")


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


#: The size of every aligned picture, and the views that are cut from it.
SIZE = (178, 218)
VIEWS = {32: View(SIZE, (45, 55), 32), 64: View(SIZE, (90, 110), 64)}
#: Number of pictures between two reports of a thread, and of threads: more of them would wait for the interpreter.
REPORT, THREADS = 200, min(os.cpu_count() or 1, 4)
#: Part of the cache's key; increase it when decoding gives other pixels.
VERSION = 1

#: The official files, and where they lie in a folder: together, or as they are downloaded.
ATTRIBUTES = ("list_attr_celeba.txt", "Anno/list_attr_celeba.txt")
PARTITION = ("list_eval_partition.txt", "Eval/list_eval_partition.txt")
PICTURES = ("img_align_celeba", "Img/img_align_celeba")


def find_celeba(side: int, data_dir: str | Path | None = None) -> Path | None:
    """Return the NumPy file of prepared pictures, else the folder that holds any of the official files, or None."""
    folders = [folder / FOLDER for folder in search_folders(data_dir)]
    prepared = [path for folder in folders if (path := folder / f"celeba_{side}.npz").is_file()]
    names = (*ATTRIBUTES, *PARTITION, *PICTURES)
    official = [folder for folder in folders if any((folder / name).exists() for name in names)]
    return next(iter(prepared + official), None)


def read_celeba(side: int, data_dir: str | Path | None = None) -> Labelled:
    """Return the pictures (n, 3, side, side), their classes and the official split."""
    found = find_celeba(side, data_dir)
    if found is None:
        place = search_folders(data_dir)[0] / FOLDER
        raise InputError(
            f"dataset 'celeba' is not on this disk, and its terms do not allow a download without asking.\n"
            f"Get it from its authors and put {ATTRIBUTES[0]}, {PARTITION[0]} and {PICTURES[0]}/ into {place},\n"
            f"or a prepared celeba_{side}.npz (docs/celeba.md); or name the folder with celeba/ in it ({{data_dir}})."
        )
    if found.is_file():
        return _checked(read_npz(found), side, found)
    attributes, partition, pictures = (_present(found, names) for names in (ATTRIBUTES, PARTITION, PICTURES))
    files, labels, split = select(attributes, partition)
    return Labelled(_decoded(pictures, files, side), labels, split, CLASS_NAMES, HOW)


def _checked(data: Labelled, side: int, path: Path) -> Labelled:
    if data.images.shape[1:] != (3, side, side) or data.split is None:
        raise InputError(
            f"{path}: pictures of shape {data.images.shape[1:]} {'without' if data.split is None else 'with'} a split; "
            f"it must hold images (n, {side}, {side}, 3), labels and split"
        )
    return data._replace(class_names=CLASS_NAMES if data.class_names[0] == "0" else data.class_names, how=HOW)


def _present(folder: Path, names: Sequence[str]) -> Path:
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        raise InputError(f"{folder / names[0]}: not there; CelebA needs it, get it from the source of the other files")
    return found


# --- which pictures -------------------------------------------------------------------------------------------------


def select(attributes: Path, partition: Path) -> tuple[list[str], IntArray, IntArray]:
    """Return file, class and split code of the pictures with one hair colour, in the order of the attribute file."""
    names, files, marks = read_attributes(attributes)
    unknown = [name for name in (*HAIR, *NONE_OF) if name not in names]
    if unknown:
        raise InputError(f"{attributes}: no attribute '{unknown[0]}' among its {len(names)}; get a fresh copy")
    hair, others = (marks[:, [names.index(name) for name in group]] for group in (HAIR, NONE_OF))
    rows = np.flatnonzero((hair.sum(1) == 1) & ~others.any(1))
    if not len(rows):
        raise InputError(f"{attributes}: no picture has exactly one hair colour; is the file complete?")
    split_of = read_partition(partition)
    chosen = [files[row] for row in rows]
    missing = next((file for file in chosen if file not in split_of), None)
    if missing is not None:
        raise InputError(f"{partition}: no row for {missing} of {attributes.name}; get a fresh copy")
    return chosen, hair[rows].argmax(1), np.array([split_of[file] for file in chosen], np.int64)


def read_attributes(path: Path) -> tuple[list[str], list[str], NDArray[np.bool_]]:
    """Return the attributes' names, the files' names and the marks (files, attributes) of the official list."""
    lines = _lines(path)
    try:
        count, names = int(lines[0]), lines[1].split()
    except (IndexError, ValueError):
        raise InputError(f"{path}: the first line must be a number of rows, the second the attributes") from None
    rows = [line.split() for line in lines[2:] if line.strip()]
    if len(rows) != count:
        raise InputError(f"{path}: the first line promises {count} rows, there are {len(rows)}; get a fresh copy")
    for number, row in enumerate(rows, start=3):
        if len(row) != 1 + len(names):
            raise InputError(f"{path}, line {number}: {len(row) - 1} marks, {len(names)} attributes; get a fresh copy")
        if "/" in row[0] or "\\" in row[0] or row[0].startswith("."):
            raise InputError(f"{path}: '{row[0]}' is not a plain file name; do not trust this file")
    try:
        marks = np.array([row[1:] for row in rows]).astype(np.int64)
    except ValueError as error:
        raise InputError(f"{path}: marks must be 1 or -1 ({error}); get a fresh copy") from error
    if not np.isin(marks, (-1, 0, 1)).all():
        raise InputError(f"{path}: marks must be 1 or -1, found {marks.max()}; get a fresh copy")
    return names, [row[0] for row in rows], marks == 1


def read_partition(path: Path) -> dict[str, int]:
    """Return the split code of every file in the official list."""
    found = {}
    for number, line in enumerate(_lines(path), start=1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2 or words[1] not in ("0", "1", "2"):
            raise InputError(f"{path}, line {number}: a row is a file name and 0, 1 or 2; get a fresh copy")
        found[words[0]] = int(words[1])
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); get a fresh copy") from error


# --- decoding, once -------------------------------------------------------------------------------------------------


def _decoded(folder: Path, files: Sequence[str], side: int) -> NDArray[np.uint8]:
    """Return the pictures, memory-mapped from the cache; decode them first if they are not there."""
    import filelock

    path = cache_folder() / FOLDER / f"{_key(folder, files, side)}.npy"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One process decodes; others that want the same pictures wait, then find them.
        with filelock.FileLock(path.with_suffix(".lock")):
            if not path.is_file():
                part = path.with_suffix(".part")
                try:
                    with progress_bar(MofNCompleteColumn()) as bar:
                        advance = functools.partial(bar.advance, bar.add_task("decoding faces", total=len(files)))
                        decode_pictures(files, folder, part, VIEWS[side], advance)
                    part.replace(path)
                finally:
                    part.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path}: {error}; choose another folder with BOOVAE_CACHE") from error
    images: NDArray[np.uint8] = np.load(path, mmap_mode="r", allow_pickle=False)
    return images


def _key(folder: Path, files: Sequence[str], side: int) -> str:
    """Return the cache key of the decoded pictures; it changes with the files, their sizes and their times."""
    content = hashlib.sha256(json.dumps([VERSION, side, VIEWS[side]]).encode())
    for file in files:
        try:
            state = (folder / file).stat()
        except OSError:
            absent = sum(not (folder / name).is_file() for name in files)
            raise InputError(
                f"{folder / file}: {ATTRIBUTES[0]} names it, but it is not there "
                f"({absent} of {len(files)} chosen pictures are missing); get them, or remove their rows from the list"
            ) from None
        content.update(f"{file} {state.st_size} {state.st_mtime_ns}\n".encode())
    return f"{side}-{content.hexdigest()[:32]}"


def decode_pictures(
    files: Sequence[str], folder: Path, out: Path, view: View, progress: Callable[[int], None], threads: int = THREADS
) -> None:
    """Write the pictures `folder / files[i]` as uint8 (n, 3, side, side) to the NumPy file `out`.

    `progress` receives the number of newly finished pictures. An error names the picture. Threads suffice: Pillow
    releases the global lock while it decodes.
    """
    pixels = np.lib.format.open_memmap(out, "w+", np.uint8, (len(files), 3, view.side, view.side))

    def decode(rows: range) -> int:
        for row in rows:
            pixels[row] = decode_picture(folder / files[row], view).transpose(2, 0, 1)
        return len(rows)

    rows = range(len(files))
    with ThreadPoolExecutor(threads) as pool:
        for done in pool.map(decode, [rows[start : start + REPORT] for start in rows[::REPORT]]):
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
