"""Tables as CSV and figures as PNG, for whoever writes them to a folder."""

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


def write_rows(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]], head: Mapping[str, Any] | None = None
) -> Path:
    """Write rows as CSV; the lines of `head`, which start with #, say how they were made."""
    text = io.StringIO()
    text.writelines(f"# {name}: {value}\n" for name, value in (head or {}).items())
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())
    return path


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], head: Mapping[str, Any]) -> Path:
    """Write rows that all have the same columns as CSV, numbers with six digits."""
    return write_rows(path, list(rows[0]), ([_plain(value) for value in row.values()] for row in rows), head)


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
