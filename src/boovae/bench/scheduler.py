"""Run all cells of a bench: skip finished ones, repeat lost ones, report failed ones at the end.

Progress goes to stderr: live bars on a terminal, plain lines elsewhere.
"""

import math
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from boovae.bench.cells import Cell
from boovae.bench.executors import Executor, Handle
from boovae.bench.results import read_summary
from boovae.bench.worker import NO_ROOM, Job, lock_of
from boovae.errors import RunError
from boovae.report.numbers import duration
from boovae.runs.folder import RunFolder

#: Seconds between polls of the running cells.
LOOK = 0.2
#: Seconds before a cell that another process holds is tried again.
BUSY = 2.0
#: How often a cell may lose its worker without making progress.
LIVES = 3
#: Seconds between plain lines.
LINE_INTERVAL = 30.0
#: Seconds between counts of the tasks that the running cells have finished.
COUNT_INTERVAL = 1.0
#: How many running cells are named.
NAMED = 8


# --- progress on stderr ---------------------------------------------------------------------------------------------


class Board:
    """Counts tasks, those of finished cells and those that running cells have evaluated, and shows how many there are.

    On a terminal there is a bar for the whole matrix and one for each running cell; elsewhere, a plain line for each
    event and one every half minute; nothing if `quiet`.
    """

    def __init__(self, folder: Path, *, quiet: bool = False) -> None:
        self.folder, self.quiet = folder, quiet
        self._cells: dict[str, Cell] = {}
        self._tasks: dict[str, int] = {}  # done, by cell
        self._finished, self._failed = set[str](), set[str]()
        self._began, self._before, self._counted, self._said = time.monotonic(), 0, 0.0, 0.0
        title, text = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[text]}")
        columns = title, BarColumn(bar_width=24), text, TimeElapsedColumn()
        live = sys.stderr.isatty() and not quiet
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=not live)
        self._bars.start()
        self._whole = self._bars.add_task("bench", text="")
        self._rows = [self._bars.add_task("", text="", visible=False) for _ in range(NAMED)]

    def begin(self, cells: Sequence[Cell], waiting: Iterable[Cell]) -> None:
        """Start counting: all cells, and those of them that are not finished."""
        self._cells = {cell.name: cell for cell in cells}
        self._finished = set(self._cells) - {cell.name for cell in waiting}
        self._count()
        self._began, self._before = time.monotonic(), self.done

    def show(self, running: Sequence[Cell]) -> None:
        """Show the progress of the running cells; other processes may run some of the rest."""
        if time.monotonic() - self._counted >= COUNT_INTERVAL:
            self._count()
        self._bars.update(self._whole, completed=self.done, total=self.total, text=self.counted)
        for row in self._rows[len(running) :]:
            self._bars.update(row, visible=False)
        for row, cell in zip(self._rows, running, strict=False):
            done, total = self._tasks[cell.name], cell.tasks
            text = f"{done} of {total} tasks"
            self._bars.update(row, visible=True, description=cell.title, completed=done, total=total, text=text)
        if self._bars.disable and time.monotonic() - self._said >= LINE_INTERVAL:
            named = ", ".join(f"{cell.title} {self._tasks[cell.name]}/{cell.tasks}" for cell in running[:NAMED])
            more = f" and {len(running) - NAMED} more" if len(running) > NAMED else ""
            self.note(f"{self.counted}; {f'running: {named}{more}' if running else 'waiting for other processes'}")

    def finished(self, cell: Cell) -> None:
        """Count a cell as finished."""
        self._finished.add(cell.name)
        self._tasks[cell.name] = cell.tasks
        self.note(f"{cell.title} finished: {self.counted}")

    def failed(self, cell: Cell, error: str) -> None:
        """Count a cell as failed; the others continue."""
        self._failed.add(cell.name)
        self.note(f"{cell.title} failed: {error}")

    def note(self, text: str) -> None:
        """Print a line that stays on the screen, above the bars if there are any."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)
        self._said = time.monotonic()

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()

    @property
    def counted(self) -> str:
        """The progress of the bench, and an estimate of the time left."""
        left = "" if self.seconds_left is None else f", about {duration(self.seconds_left)} left"
        return f"{len(self._finished)} of {len(self._cells)} cells, {self.done} of {self.total} tasks{left}"

    @property
    def done(self) -> int:
        """Tasks that are finished."""
        return sum(self._tasks.values())

    @property
    def total(self) -> int:
        """Tasks of all cells."""
        return sum(cell.tasks for cell in self._cells.values())

    @property
    def seconds_left(self) -> float | None:
        """Seconds for the rest at the pace so far; None until there is a pace."""
        done_now = self.done - self._before
        left = sum(cell.tasks - self._tasks[name] for name, cell in self._cells.items() if name not in self._failed)
        if done_now <= 0 or left <= 0:
            return None
        return float(math.ceil((time.monotonic() - self._began) * left / done_now))

    def _count(self) -> None:
        """Count the tasks of every cell: a run writes a picture after each."""
        self._counted = time.monotonic()
        for name, cell in self._cells.items():
            pictures = cell.tasks if name in self._finished else len(RunFolder(self.folder / name).sample_grids())
            self._tasks[name] = min(pictures * cell.together, cell.tasks)


# --- the cells --------------------------------------------------------------------------------------------------------


@dataclass
class Matrix:
    """The cells of a bench and how far each has come."""

    cells: Sequence[Cell]
    folder: Path
    executor: Executor
    job: Callable[[Cell], Job]
    board: Board

    def __post_init__(self) -> None:
        self.failed: dict[str, str] = {}  # by the cell's title
        self._unique = list({cell.name: cell for cell in self.cells}.values())
        self._waiting = deque(cell for cell in self._unique if read_summary(self.folder, cell) is None)
        self._running: dict[Cell, Handle] = {}
        self._retry_at: dict[Cell, float] = {}
        self._lost: dict[Cell, tuple[int, int]] = {}  # how often without progress, and how far it was

    def run(self) -> None:
        """Run all cells that are not finished; if stopped, each running cell continues next time."""
        if skipped := len(self._unique) - len(self._waiting):
            self.board.note(f"{skipped} of {len(self._unique)} cells are already finished")
        self.board.begin(self._unique, self._waiting)
        try:
            while self._waiting or self._running:
                self._submit_waiting()
                self._collect()
                self.board.show(list(self._running))
                time.sleep(LOOK)
        except BaseException:
            for handle in self._running.values():
                handle.cancel()
            raise

    def _submit_waiting(self) -> None:
        """Fill the free slots with cells that no other process holds."""
        for cell in list(self._waiting):
            if len(self._running) >= self.executor.slots:
                return
            self._waiting.popleft()
            if self._retry_at.get(cell, 0.0) > time.monotonic():
                self._waiting.append(cell)
            elif read_summary(self.folder, cell) is not None:  # another bench has finished it
                self.board.finished(cell)
            else:
                self._begin(cell)

    def _begin(self, cell: Cell) -> None:
        try:
            with lock_of(self.folder, cell.name):
                pass  # nobody holds it
            self._running[cell] = self.executor.submit(self.job(cell))
        except Timeout:
            self._later(cell)
        except OSError as error:
            remedy = "make room" if error.errno in NO_ROOM else f"make {self.folder} writable"
            raise self._halted(cell, f"cannot start: {error.strerror}", remedy) from error

    def _halted(self, cell: Cell, error: str, remedy: str) -> RunError:
        """Return the error for a problem that affects all cells."""
        intact = f"The finished cells in {self.folder} are intact"
        return RunError(f"{cell.title}: {error}. {intact}: {remedy}, then run the same command to continue")

    def _later(self, cell: Cell) -> None:
        if cell not in self._retry_at:
            self.board.note(f"{cell.title}: another process works on it; waiting for it while the other cells continue")
        self._retry_at[cell] = time.monotonic() + BUSY
        self._waiting.append(cell)

    def _collect(self) -> None:
        for cell, handle in list(self._running.items()):
            answer = handle.poll()
            if answer is None:
                continue
            del self._running[cell]
            state, error = answer["state"], answer["error"]
            if state == "done":
                self.board.finished(cell)
            elif state == "busy":
                self._later(cell)
            elif state == "full":
                raise self._halted(cell, error, "make room")
            elif state == "lost" and self._worth_another(cell):
                self.board.note(f"{cell.title}: its worker was lost ({error}); running it again")
                self._waiting.appendleft(cell)
            else:
                log = self.folder / f"{cell.name}.log"
                self.failed[cell.title] = f"{error}; see {log}" if log.exists() else error
                self.board.failed(cell, self.failed[cell.title])

    def _worth_another(self, cell: Cell) -> bool:
        """Whether to retry a cell that lost its worker: as long as it makes progress, or a few times without."""
        log = self.folder / cell.name / "metrics.jsonl"
        far = log.stat().st_size if log.is_file() else 0
        times, before = self._lost.get(cell, (0, -1))
        times = 1 if far > before else times + 1
        self._lost[cell] = times, max(far, before)
        return times <= LIVES


@contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """End a bench with a clear message on Ctrl-C or SIGTERM; on a second Ctrl-C, without waiting for the workers.

    After a stop both signals stay ignored: only the message is left to print.
    """
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: found for number in numbers if (found := signal.getsignal(number)) != signal.SIG_IGN}
    stops: list[int] = []

    def stop(number: int, frame: object) -> None:
        stops.append(number)
        if len(stops) == 1 or number == signal.SIGINT:
            raise KeyboardInterrupt

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise RunError(f"stopped; everything is in {folder}: the same command continues it") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if stops else handler)
