"""Running all cells of a bench: finished ones are skipped, lost ones run again, failed ones are told at the end."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import Timeout

from boovae.bench.board import Board
from boovae.bench.cells import Cell, read_summary
from boovae.bench.executors import Executor, Handle
from boovae.bench.worker import NO_ROOM, Job, lock_of
from boovae.errors import RunError

#: Seconds between two looks at the running cells.
LOOK = 0.2
#: Seconds after which a cell that another process had is tried again.
BUSY = 2.0
#: How often a cell may lose its worker without getting further.
LIVES = 3


class Stopped(BaseException):
    """Ctrl-C or SIGTERM arrived."""


@dataclass
class Matrix:
    """The cells of a bench on their way."""

    cells: Sequence[Cell]
    folder: Path
    executor: Executor
    job: Callable[[Cell], Job]
    board: Board
    failed: dict[str, str] = field(default_factory=dict)  # by the cell's title
    _waiting: deque[Cell] = field(default_factory=deque)
    _running: dict[Cell, Handle] = field(default_factory=dict)
    _retry_at: dict[Cell, float] = field(default_factory=dict)
    _lost: dict[Cell, tuple[int, int]] = field(default_factory=dict)  # how often without getting further, and how far

    def run(self) -> None:
        """Run all cells that are not finished; stopping leaves every cell as a run that goes on next time."""
        unique = {cell.name: cell for cell in self.cells}
        self._waiting = deque(cell for cell in unique.values() if read_summary(self.folder, cell) is None)
        skipped = len(unique) - len(self._waiting)
        if skipped:
            self.board.note(f"{skipped} of {len(unique)} cells are finished already")
        self.board.begin(list(unique.values()), list(self._waiting))
        try:
            while self._waiting or self._running:
                self._hand_over()
                self._collect()
                self.board.show(list(self._running))
                time.sleep(LOOK)
        except BaseException:
            self._cancel()
            raise

    def _hand_over(self) -> None:
        """Fill the free slots with cells that no other process has."""
        for _ in range(len(self._waiting)):
            if len(self._running) >= self.executor.slots:
                return
            cell = self._waiting.popleft()
            if self._retry_at.get(cell, 0.0) > time.monotonic():
                self._waiting.append(cell)
            elif read_summary(self.folder, cell) is not None:  # another bench has finished it
                self.board.finished(cell)
            else:
                self._begin(cell)

    def _begin(self, cell: Cell) -> None:
        try:
            if self._taken(cell):
                self._later(cell)
            else:
                self._running[cell] = self.executor.submit(self.job(cell))
        except OSError as error:
            remedy = "make room" if error.errno in NO_ROOM else f"make {self.folder} writable"
            raise self._halted(cell, f"cannot begin: {error.strerror}", remedy) from error

    def _halted(self, cell: Cell, error: str, remedy: str) -> RunError:
        """Return the error for trouble that concerns all cells."""
        return RunError(
            f"{cell.title}: {error}. The finished cells in {self.folder} are intact: {remedy}, then the same command "
            "continues"
        )

    def _taken(self, cell: Cell) -> bool:
        try:
            with lock_of(self.folder, cell.name):
                return False
        except Timeout:
            return True

    def _later(self, cell: Cell) -> None:
        if cell not in self._retry_at:
            self.board.note(f"{cell.title}: another process works on it; waiting for it, the other cells go on")
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
                self.board.note(f"{cell.title}: its worker was lost ({error}); it is run again")
                self._waiting.appendleft(cell)
            else:
                log = self.folder / f"{cell.name}.log"
                told = f"{error}; see {log}" if log.exists() else error
                self.failed[cell.title] = told
                self.board.failed(cell, told)

    def _worth_another(self, cell: Cell) -> bool:
        """Whether to go on with a cell that lost its worker: as long as each gets further, or a few times."""
        log = self.folder / cell.name / "metrics.jsonl"
        far = log.stat().st_size if log.is_file() else 0
        times, before = self._lost.get(cell, (0, -1))
        times = 1 if far > before else times + 1
        self._lost[cell] = times, max(far, before)
        return times <= LIVES

    def _cancel(self) -> None:
        for handle in self._running.values():
            handle.cancel()


@contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """End a bench by Ctrl-C or SIGTERM with its last line, whatever comes after; a second Ctrl-C ends at once.

    Once it was stopped both signals are ignored for good: nothing is left to do but to say so.
    """
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: found for number in numbers if (found := signal.getsignal(number)) != signal.SIG_IGN}
    stops: list[int] = []

    def stop(number: int, frame: object) -> None:
        stops.append(number)
        if len(stops) == 1 or number == signal.SIGINT:
            raise Stopped

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    except (KeyboardInterrupt, Stopped):
        raise RunError(f"stopped; everything is in {folder}: the same command continues it") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if stops else handler)
