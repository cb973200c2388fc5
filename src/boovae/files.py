"""Write files atomically, read files from untrusted sources, and lock folders."""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from boovae.errors import InputError, RunError

#: Upper limit for settings and records in JSON or TOML, which are far smaller.
TEXT_BYTES = 64 << 20


def memory_share() -> int:
    """Return half of this machine's memory in bytes, the limit for content that is read into it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes, or raise OSError.

    Only regular files are read: reading a pipe could block forever, and a device never ends.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not an ordinary file", str(path))
        content = file.read(most + 1) if about.st_size <= most else None
    if content is None or len(content) > most:
        raise OSError(errno.EFBIG, f"larger than the limit of {most:,} bytes", str(path))
    return content


def write_file(path: Path, content: bytes) -> None:
    """Write `content` to a temporary file beside `path`, sync it to disk, rename it, and sync the folder."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        make_folder(path.parent)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunError(f"cannot write {path}: {error.strerror or error}; the previous content is intact") from error


@contextlib.contextmanager
def appending(path: Path, *, begin: bool = False) -> Iterator[IO[bytes]]:
    """Open a log for appending and sync it afterwards; a missing log is an error unless it may `begin` here."""
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if begin else 0), 0o666), "r+b") as file:
            file.seek(0, os.SEEK_END)
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; the last checkpoint is intact, and the same command "
            "continues from it"
        ) from error


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync each of them into its parent."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        _sync_folder(made.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that a killed `write_file` left in a folder; nobody else may be writing there."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def hold_folder(folder: Path) -> int:
    """Lock a folder until the descriptor is closed or this process ends; a crash leaves no lock behind."""
    try:
        descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}; choose another folder ({{out}})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        problem = f"cannot be locked: {error.strerror}; choose a folder on another file system ({{out}})"
        if isinstance(error, BlockingIOError):
            problem = "is in use by another process: wait for it or choose another {out}"
        raise InputError(f"{folder} {problem}") from error
    return descriptor


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
