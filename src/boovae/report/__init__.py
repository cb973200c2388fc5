"""From records of runs to pictures, tables and one self-contained page. Opens no run folder: `runs` reads them.

Importing this package costs nothing but numpy: plotly, matplotlib, Pillow and Jinja are imported when they are first
needed, so that a training machine can do without them.
"""

from __future__ import annotations

from boovae.report.matrices import write_csv
from boovae.report.page import write_report
from boovae.report.pictures import grid, save_grid
from boovae.report.record import RunRecord

__all__ = ["RunRecord", "grid", "save_grid", "write_csv", "write_report"]
