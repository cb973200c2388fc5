"""Writing of tables as CSV and figures as PNG into a folder."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boovae.errors import InputError
from boovae.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Pixels per inch of a figure.
RESOLUTION = 100


def prepared(folder: Path, argument: str = "out") -> Path:
    """Create the folder if necessary and return it; refuse one that is not writable before any work is done."""
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


def write_rows(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]], head: Mapping[str, Any] | None = None
) -> Path:
    """Write rows as CSV, after lines of `head` that start with # and record how they were made."""
    text = io.StringIO()
    text.writelines(f"# {name}: {value}\n" for name, value in (head or {}).items())
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())
    return path


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], head: Mapping[str, Any]) -> Path:
    """Write rows with the same columns as CSV, numbers with six digits."""
    return write_rows(path, list(rows[0]), ([_plain(value) for value in row.values()] for row in rows), head)


def _plain(value: Any) -> Any:
    """Round a float to six digits; leave the cell empty if it is not finite."""
    if not isinstance(value, float):
        return value
    return f"{value:.6g}" if math.isfinite(value) else ""


def save_figure(path: Path, figure: Figure) -> Path:
    """Write a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=RESOLUTION, metadata={"Software": None})
    write_file(path, buffer.getvalue())
    return path
