"""Writing a file so that it is whole or not there, whatever happens."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from boovae.errors import RunError


def write_file(path: Path, content: bytes) -> None:
    """Write `content` under a temporary name beside `path`, sync it to the disk, and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunError(f"cannot write {path}: {error.strerror}; what was there before is intact") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
