"""Progress of a run on stderr: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich import progress
from rich.console import Console

#: Seconds between two plain lines.
LINE_INTERVAL = 10.0


class Display:
    """Shows how far a run is; this one shows nothing."""

    def task(self, index: int, total: int | None, name: str, epochs: int) -> None:
        """A task begins; how many there are in `total` may not be known."""

    def epoch(self, event: dict[str, Any]) -> None:
        """An epoch has ended; `event` is its entry in `metrics.jsonl`."""

    def evaluating(self, share: float) -> None:
        """This share of an evaluation is done."""

    def note(self, text: str) -> None:
        """Show a line that stays on the screen."""

    def close(self) -> None:
        """Remove the display."""


class Lines(Display):
    """Plain lines, at most one every ten seconds within a task."""

    def __init__(self) -> None:
        self._last, self._head, self._epochs = time.monotonic(), "", 0

    def task(self, index: int, total: int | None, name: str, epochs: int) -> None:
        """Print which task begins."""
        count = f"{index + 1}" if total is None else f"{index + 1}/{total}"
        self._head, self._epochs = f"task {count} ({name})", epochs
        self.note(self._head)

    def epoch(self, event: dict[str, Any]) -> None:
        """Print the loss, if the last line is old enough."""
        if time.monotonic() - self._last >= LINE_INTERVAL:
            self.note(f"{self._head}: epoch {event['epoch'] + 1}/{self._epochs}, loss {_losses(event)}")

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)
        self._last = time.monotonic()


class Live(Display):
    """Bars with the loss of every replica and the time left.

    They appear with the first task, so an error before that leaves the screen as it was.
    """

    def __init__(self) -> None:
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[text]}", markup=False),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
        )
        self._all: progress.TaskID | None = None
        self._epochs = self._bars.add_task("epoch", text="")

    def task(self, index: int, total: int | None, name: str, epochs: int) -> None:
        """Start the bar of a task."""
        self._bars.start()
        if self._all is None:
            self._all = self._bars.add_task("tasks", total=total, text="")
        self._bars.update(self._all, completed=index, text=f"learning {name}")
        self._bars.reset(self._epochs, description="epoch", total=epochs, text="")

    def epoch(self, event: dict[str, Any]) -> None:
        """Advance the bar of the task."""
        self._bars.update(self._epochs, completed=event["epoch"] + 1, text=f"loss {_losses(event)}")

    def evaluating(self, share: float) -> None:
        """Show how far the evaluation is."""
        self._bars.start()
        self._bars.update(self._epochs, description="evaluation", total=100, completed=int(100 * share), text="percent")

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()


def make_display(*, quiet: bool) -> Display:
    """Return a display that suits stderr: bars on a terminal, lines elsewhere, nothing if `quiet`."""
    if quiet:
        return Display()
    return Live() if sys.stderr.isatty() else Lines()


class Watch:
    """Observes a trainer that has no run folder: shows epochs and notes, and keeps the events in memory."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.events: list[dict[str, Any]] = []

    def event(self, event: dict[str, Any]) -> None:
        """Keep an event; show it if it is a note."""
        self.events.append(event)
        if event["event"] == "note":
            self.display.note(event["text"])

    def block(self, trainer: Any) -> None:
        """Write nothing."""

    def epoch(self, trainer: Any, event: dict[str, Any]) -> None:
        """Show an epoch."""
        self.display.epoch(event)


def _losses(event: dict[str, Any]) -> str:
    losses = event["valid"]["loss"]
    shown = " ".join("-" if loss is None else f"{loss:.2f}" for loss in losses[:5])
    return shown + (" …" if len(losses) > 5 else "")
