"""Read IDX files, NPZ files and folders of pictures; refuse damaged ones with an error that names the file."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import math
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from boovae.data.arrays import Labelled, as_images, as_labels, check_pixels
from boovae.errors import InputError
from boovae.files import memory_share

# Deflate compresses at most 1032 bytes into one: a file that claims more is damaged or a decompression bomb.
MAX_INFLATION = 1032
PICTURE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"))
# An explicit list, because some of Pillow's other formats start external programs.
PICTURE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")


def read_idx(path: str | Path, sha256: str | None = None) -> NDArray[np.uint8]:
    """Return the content of an IDX file, gzipped or not; ``sha256`` is that of the uncompressed file.

    No more is decompressed than the header promises, so a small file cannot fill the memory.
    """
    path = Path(path)
    try:
        with _open_unpacked(path) as file:
            header, shape = _read_idx_header(file, path)
            size = math.prod(shape)
            if size > path.stat().st_size * MAX_INFLATION:
                raise InputError(f"{path}: too short for its header, which promises {size} bytes; get a fresh copy")
            _check_memory(size, str(path))
            body = file.read(size + 1)
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise InputError(f"{path}: cannot be read ({error}); get a fresh copy") from error
    if sha256 is not None:
        found = hashlib.sha256(header)
        found.update(body)
        if found.hexdigest() != sha256:
            raise InputError(
                f"{path}: wrong checksum, expected SHA-256 {sha256} of the unpacked file, "
                f"found {found.hexdigest()}; delete it and get a fresh copy"
            )
    if len(body) != size:
        amount = "more" if len(body) > size else f"only {len(body)}"
        raise InputError(f"{path}: the header promises {size} bytes, there are {amount}; get a fresh copy")
    return np.frombuffer(body, np.uint8).reshape(shape)


def write_idx(path: str | Path, array: NDArray[np.uint8]) -> None:
    """Write uint8 as an IDX file, gzipped if the name ends in ``.gz``."""
    path = Path(path)
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content = header + np.ascontiguousarray(array, np.uint8).tobytes()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def _check_memory(size: int, where: str) -> None:
    """Refuse content that would fill the memory when unpacked."""
    if size > memory_share():
        raise InputError(
            f"{where}: unpacks to {size:,} bytes, more than half of this machine's memory; "
            "use fewer images, or do not trust this file"
        )


@contextlib.contextmanager
def _open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if gzipped:
            with gzip.GzipFile(fileobj=raw) as file:
                yield cast(IO[bytes], file)
        else:
            yield raw


def _read_idx_header(file: IO[bytes], path: Path) -> tuple[bytes, tuple[int, ...]]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or not 1 <= magic[3] <= 4:
        raise InputError(f"{path}: not an IDX file (it begins with {magic.hex() or 'nothing'}); get a fresh copy")
    if magic[2] != 8:
        raise InputError(f"{path}: IDX type 0x{magic[2]:02x}, only unsigned bytes (0x08) are read")
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise InputError(f"{path}: ends inside the IDX header; get a fresh copy")
    return magic + sizes, struct.unpack(f">{magic[3]}I", sizes)


def read_npz(path: str | Path) -> Labelled:
    """Return the arrays ``images`` (or ``x``) and ``labels`` (or ``y``) of an NPZ file.

    ``split`` (0, 1 or 2 for train, valid and test) and ``class_names`` are optional. Images without labels are one
    class, named after the file. Pixels are uint8 or floats in [0, 1]. Nothing is unpickled.
    """
    path = Path(path)
    check_path("npz", path)
    arrays, unknown = _load_npz(path)
    keys = ", ".join(sorted([*arrays, *unknown])) or "none"
    image_key, label_key = (a if a in arrays else b for a, b in (("images", "x"), ("labels", "y")))
    if image_key not in arrays:
        raise InputError(f"{path}: no array 'images' or 'x', found {keys}; save it under that name")
    if label_key not in arrays and unknown:  # one of them may be the labels
        raise InputError(
            f"{path}: no array 'labels' or 'y', found {keys}; save it under that name, or the images alone as one class"
        )
    where = f"{path} '{image_key}'"
    images = check_pixels(as_images(arrays[image_key], where), (0.0, 1.0), where)
    labels = as_labels(arrays.get(label_key, np.zeros(len(images), int)), len(images), f"{path} '{label_key}'")
    split = None
    if "split" in arrays:
        split = as_labels(arrays["split"], len(images), f"{path} 'split'")
        if split.max() > 2:
            raise InputError(f"{path} 'split': 0, 1, 2 are train, valid, test; found {split.max()}")
    unnamed = np.arange(labels.max() + 1) if label_key in arrays else np.array([path.stem])
    names = arrays.get("class_names", unnamed).ravel()
    if len(names) <= labels.max():
        raise InputError(f"{path} 'class_names': {len(names)} names, but a label is {labels.max()}")
    texts = tuple(map(str, names))
    if len(set(texts)) < len(texts):
        twice = Counter(texts).most_common(1)[0][0]
        raise InputError(f"{path} 'class_names': '{twice}' names two classes; give each its own name")
    return Labelled(images, labels, split, texts)


def check_path(form: str, path: Path) -> None:
    """Refuse the path of ``npz:PATH`` or ``folder:PATH`` that does not exist; nothing is read."""
    if not (path.is_file() if form == "npz" else path.is_dir()):
        raise InputError(f"{form}:{path}: no such {'file' if form == 'npz' else 'folder'}; check the path")


def _load_npz(path: Path) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the known arrays, and the names of the others."""
    wanted = ("images", "x", "labels", "y", "split", "class_names")
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.file_size > max(1, member.compress_size) * MAX_INFLATION:
                    raise InputError(f"{path}: '{member.filename}' claims an impossible size; do not trust this file")
            _check_memory(sum(member.file_size for member in archive.infolist()), str(path))
        with np.load(path, allow_pickle=False) as archive:
            unknown = [key for key in archive.files if key not in wanted]
            return {key: archive[key] for key in wanted if key in archive.files}, unknown
    except InputError:
        raise
    except Exception as error:  # damaged archives fail in too many ways to list
        raise InputError(
            f"{path}: not a readable NPZ file of plain arrays ({type(error).__name__}: {error}); "
            "write it with numpy.savez"
        ) from error


def read_folder(path: str | Path) -> Labelled:
    """Return the pictures of a folder with one sub-folder per class, in sorted order.

    A folder that holds pictures itself is one class. Hidden files and files that are not pictures are skipped. The
    pictures are returned in grey if all of them are grey, else in RGB; transparency is dropped.
    """
    path = Path(path)
    folders, loose = _visible(path)
    if folders and loose:
        raise InputError(f"folder:{path}: pictures next to sub-folders ({loose[0].name}); put them into one")
    files = [(file, label) for label, folder in enumerate(folders or [path]) for file in _class_files(folder)]
    images: list[NDArray[np.uint8]] = []
    for file, _ in files:
        picture = read_picture(file, str(file))
        if images and picture.shape[:2] != images[0].shape[:2]:
            raise InputError(
                f"{file}: {_size(picture)} pixels, but {files[0][0]} has {_size(images[0])}; resize to one size"
            )
        images.append(picture)
    if any(picture.ndim == 3 for picture in images):
        images = [p if p.ndim == 3 else np.repeat(p[..., None], 3, 2) for p in images]
    labels = np.array([label for _, label in files], np.int64)
    names = tuple(folder.name for folder in folders) or (path.resolve().name,)
    return Labelled(as_images(np.stack(images), str(path)), labels, None, names)


def _class_files(folder: Path) -> list[Path]:
    """Return the pictures of one class."""
    inner, files = _visible(folder)
    if inner:
        raise InputError(f"{folder}: has sub-folders ({inner[0].name}); pictures of a class lie in one folder")
    if not files:
        raise InputError(f"{folder}: no pictures; the known endings are {' '.join(sorted(PICTURE_SUFFIXES))}")
    return files


def _visible(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the sub-folders and the pictures of a folder, each sorted by name."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
        folders = [entry for entry in entries if entry.is_dir()]
    except OSError as error:
        raise InputError(f"folder:{folder}: cannot be read ({error.strerror}); check the path") from error
    pictures = [entry for entry in entries if entry.suffix.lower() in PICTURE_SUFFIXES and entry not in folders]
    return folders, pictures


def _size(picture: NDArray[Any]) -> str:
    return f"{picture.shape[1]} x {picture.shape[0]}"


def read_picture(
    source: Path | IO[bytes], name: str, *, most_pixels: int | None = None, upright: bool = False
) -> NDArray[np.uint8]:
    """Return a picture in grey ``(h, w)`` or colour ``(h, w, 3)``; errors use ``name``.

    A picture of more than ``most_pixels`` is refused before it is decoded. ``upright`` rotates a photograph by its EXIF
    orientation.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if isinstance(source, Path) and source.exists() and not source.is_file():
        raise InputError(f"{name}: not an ordinary file; remove it")  # a pipe may block forever
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(source, formats=PICTURE_FORMATS) as picture:
                mode, (width, height) = picture.mode, picture.size
                small = most_pixels is None or width * height <= most_pixels
                if small and not mode.startswith(("I", "F")):
                    grey = mode in ("1", "L", "LA", "La")
                    turned = ImageOps.exif_transpose(picture) if upright else picture
                    return np.asarray(turned.convert("L" if grey else "RGB"), np.uint8)
    except UnidentifiedImageError as error:
        raise InputError(f"{name}: cannot be read as a picture of a known kind; repair or remove it") from error
    except Exception as error:  # damaged pictures fail in too many ways to list
        raise InputError(f"{name}: cannot be read as a picture ({error}); repair or remove it") from error
    if not small:
        raise InputError(f"{name}: {width} x {height} pixels, more than {most_pixels:,}; make it smaller")
    raise InputError(f"{name}: more than 8 bits per pixel (mode {mode}); convert it to 8 bits")
