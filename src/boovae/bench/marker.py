"""`bench.json`, which says of which version a folder of a bench is, and what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boovae
from boovae.bench.cells import FORMAT
from boovae.errors import InputError
from boovae.files import write_file
from boovae.report.outputs import prepared

NAME = "bench.json"


def open_folder(folder: Path, argument: str, kind: str) -> None:
    """Make a folder for a bench to write to; refuse one of another version or for something else."""
    check_folder(folder, argument, kind)
    prepared(folder, argument)
    if not (folder / NAME).exists():
        write_file(folder / NAME, json.dumps(_mine(kind)).encode())


def check_folder(folder: Path, argument: str, kind: str) -> None:
    """Refuse a folder of another version or for something else; nothing is written, and it need not be there."""
    marker, mine = folder / NAME, _mine(kind)
    if not marker.exists():
        return
    try:
        found = dict(json.loads(marker.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise InputError(
            f"cannot read {marker}: {error}; remove this file alone, what lies beside it is still good"
        ) from error
    different = [
        f"{name} {found.get(name)} there, {value} here" for name, value in mine.items() if found.get(name) != value
    ]
    if different:
        raise InputError(
            f"{folder} ({{{argument}}}) was written by another version or another bench ({'; '.join(different)}): "
            "choose another folder, or remove this one"
        )


def _mine(kind: str) -> dict[str, Any]:
    return {"format": FORMAT, "boovae": boovae.__version__, "holds": kind}
