"""Writing a file so that it is whole or not there, whatever happens; holding a folder for one process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from boovae.errors import InputError, RunError


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


def lock_folder(folder: Path) -> int:
    """Hold the folder for this process; the lock goes with the process, however it ends."""
    try:
        descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}; choose another folder (--out)") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(f"{folder} is in use by another process: wait for it or choose another --out") from None
    return descriptor
