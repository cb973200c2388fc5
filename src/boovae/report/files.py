"""Writing a file so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import os
from pathlib import Path

from boovae.errors import InputError


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` under a temporary name beside `path`, then rename it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose a file in a folder you may write") from error
    finally:
        temporary.unlink(missing_ok=True)
