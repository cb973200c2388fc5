"""Read IDX and NPZ files; refuse damaged ones with an error that names the file."""

import gzip
import hashlib
import math
import struct
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from boovae.data.arrays import Labelled, as_images, as_labels, check_pixels
from boovae.errors import InputError
from boovae.files import memory_share

# Deflate compresses at most 1032 bytes into one: a file that claims more is damaged or a decompression bomb.
MAX_INFLATION = 1032


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


def _open_unpacked(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path)) if gzipped else path.open("rb")


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
