"""What a person sees while a bench works: how many cells and tasks are done, which run, how long it may take.

Everything goes to stderr: live bars on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from boovae.bench.cells import Cell
from boovae.report.numbers import duration
from boovae.runs.folder import RunFolder

#: Seconds between two plain lines.
LINE_INTERVAL = 30.0
#: Seconds between two looks into the folders of running cells.
COUNT_INTERVAL = 1.0
#: Running cells that are named.
NAMED = 8


class Board:
    """Counts in silence. The unit of work is a task: those of finished cells, and those running ones have evaluated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cells: dict[str, Cell] = {}
        self._tasks: dict[str, int] = {}  # done, by cell
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._began, self._before, self._counted = time.monotonic(), 0, 0.0

    def begin(self, cells: Sequence[Cell], waiting: Sequence[Cell]) -> None:
        """Take note of all cells and of those that are not finished."""
        self._cells = {cell.name: cell for cell in cells}
        self._finished = set(self._cells) - {cell.name for cell in waiting}
        self._tasks = {name: self._count(cell) for name, cell in self._cells.items()}
        self._began, self._before = time.monotonic(), sum(self._tasks.values())

    def show(self, running: Sequence[Cell]) -> None:
        """Show where the running cells are; others may be at work on some of the rest."""
        if time.monotonic() - self._counted >= COUNT_INTERVAL:
            self._counted = time.monotonic()
            self._tasks = {name: self._count(cell) for name, cell in self._cells.items()}

    def finished(self, cell: Cell) -> None:
        """A cell is finished."""
        self._finished.add(cell.name)
        self._tasks[cell.name] = cell.tasks
        self.note(f"{cell.title} finished: {self.counted}")

    def failed(self, cell: Cell, error: str) -> None:
        """A cell has failed; the others go on."""
        self._failed.add(cell.name)
        self.note(f"{cell.title} failed: {error}")

    def note(self, text: str) -> None:
        """Say something that stays on the screen."""

    def close(self) -> None:
        """Take the display away."""

    @property
    def counted(self) -> str:
        """How far the bench is, and how long it may still take."""
        left = "" if self.seconds_left is None else f", about {duration(self.seconds_left)} left"
        return f"{len(self._finished)} of {len(self._cells)} cells, {self.done} of {self.total} tasks{left}"

    @property
    def done(self) -> int:
        """Tasks that are behind us."""
        return sum(self._tasks.values())

    @property
    def total(self) -> int:
        """Tasks of all cells."""
        return sum(cell.tasks for cell in self._cells.values())

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at the speed so far; None before there is one."""
        done_now = self.done - self._before
        lost = sum(self._cells[name].tasks - self._tasks[name] for name in self._failed)
        left = self.total - self.done - lost
        if done_now <= 0 or left <= 0:
            return None
        return float(math.ceil((time.monotonic() - self._began) * left / done_now))

    def where(self, cell: Cell) -> str:
        """Say which task a cell is at."""
        return f"{cell.title} {self._tasks[cell.name]}/{cell.tasks}"

    def _count(self, cell: Cell) -> int:
        """Return the tasks that a cell has behind it; a run draws a picture after each."""
        if cell.name in self._finished:
            return cell.tasks
        pictures = RunFolder(self.folder / cell.name).sample_grids()
        return min(len(pictures) * cell.together, cell.tasks)


class LineBoard(Board):
    """A plain line for everything that happens, and one every half minute."""

    _last = 0.0

    def show(self, running: Sequence[Cell]) -> None:
        """Say where the running cells are, if the last line is old enough."""
        super().show(running)
        if time.monotonic() - self._last >= LINE_INTERVAL:
            more = f" and {len(running) - NAMED} more" if len(running) > NAMED else ""
            named = f"running: {', '.join(map(self.where, running[:NAMED]))}{more}"
            self.note(f"{self.counted}; {named if running else 'waiting for other processes'}")

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)
        self._last = time.monotonic()


class LiveBoard(Board):
    """A bar for the whole matrix and one for each running cell."""

    def __init__(self, folder: Path) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__(folder)
        title = TextColumn("{task.description}", markup=False)
        columns = title, BarColumn(bar_width=24), TextColumn("{task.fields[text]}")
        self._bars = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self._bars.start()
        self._whole = self._bars.add_task("bench", text="")
        self._rows = [self._bars.add_task("", text="", visible=False) for _ in range(NAMED)]

    def show(self, running: Sequence[Cell]) -> None:
        """Move the bars on."""
        super().show(running)
        self._bars.update(self._whole, completed=self.done, total=self.total, text=self.counted)
        for index, row in enumerate(self._rows):
            if index >= len(running):
                self._bars.update(row, visible=False)
                continue
            cell = running[index]
            done = self._tasks[cell.name]
            text = f"{done} of {cell.tasks} tasks"
            self._bars.update(row, visible=True, description=cell.title, completed=done, total=cell.tasks, text=text)

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()


def make_board(folder: Path, *, quiet: bool) -> Board:
    """Return the board that fits where stderr goes."""
    if quiet:
        return Board(folder)
    return LiveBoard(folder) if sys.stderr.isatty() else LineBoard(folder)
