"""Pictures, tables and a self-contained page from records of runs, which `runs` reads from their folders.

Plotly, matplotlib, Pillow and Jinja are imported only when they are needed, so a training machine can do without them.
"""

from boovae.report.matrices import write_csv
from boovae.report.page import write_report
from boovae.report.pictures import grid, save_grid
from boovae.report.run_record import RunRecord

__all__ = ["RunRecord", "grid", "save_grid", "write_csv", "write_report"]
