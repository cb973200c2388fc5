"""What every experiment leaves behind: a table of all numbers and a figure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boovae.errors import InputError
from boovae.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Pixels per inch of a figure.
RESOLUTION = 100


def prepared(folder: Path, argument: str = "out") -> Path:
    """Return the folder, made if it was not there; refuse one that cannot be written before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"cannot write to {folder} ({{{argument}}}): {error.strerror}; choose another folder"
        ) from error
    return folder


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], head: Mapping[str, Any]) -> Path:
    """Write rows that all have the same columns as CSV; lines that start with # say how they were made."""
    text = io.StringIO()
    text.writelines(f"# {name}: {value}\n" for name, value in head.items())
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    write_file(path, text.getvalue().encode())
    return path


def _plain(value: Any) -> Any:
    """Return a number as a table shows it: six digits, nothing where it is not finite."""
    if not isinstance(value, float):
        return value
    return f"{value:.6g}" if math.isfinite(value) else ""


def save_figure(path: Path, figure: Figure) -> Path:
    """Write a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=RESOLUTION, metadata={"Software": None})
    write_file(path, buffer.getvalue())
    return path
