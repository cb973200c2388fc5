"""Progress of a run on stderr: live bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import progress
from rich.console import Console

from boovae.training.trainer import Observer, Trainer

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


class TimeEstimate:
    """Says after the first epochs of the first two tasks how long the training of those to come will take.

    The first task has no past to hold on to, so the others take longer.
    """

    #: The epoch of a task that is timed, counted from 0: the first ones compile, and fit components.
    timed = 2

    def __init__(self, images: Sequence[int], display: Display) -> None:
        """`images` are the numbers of training images of the tasks to come."""
        self._images, self._display = list(images), display
        self._done, self._begun, self._began = 0, 0, 0.0

    def task(self) -> None:
        """Take note that the next task begins."""
        if self._begun:
            del self._images[0]
        self._begun, self._done = self._begun + 1, 0

    def epoch(self, epochs: int) -> None:
        """Take note that an epoch has ended; a task has up to `epochs`."""
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        if self._done == self.timed and epochs > self.timed and self._begun <= 2:
            total = seconds * epochs * sum(self._images) / self._images[0]
            tasks = "this task" if len(self._images) == 1 else f"{len(self._images)} tasks"
            self._display.note(f"training {tasks} takes up to {duration(total)}; evaluations come on top")
        self._done += 1


def duration(seconds: float) -> str:
    """Return a rough duration in words.

    >>> duration(4), duration(100), duration(9000)
    ('5 seconds', '2 minutes', '2.5 hours')
    """
    if seconds < 90:
        return f"{max(5, round(seconds / 5) * 5)} seconds"
    return f"{round(seconds / 60)} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def choice_table(event: dict[str, Any], shown: dict[str, Any]) -> str:
    """Return a table of the settings chosen for a task, without those that are `shown` already, to which it adds them.

    >>> event = {"task": 0, "choices": [{"setting": "net", "value": "mlp:128", "reason": "few numbers"}]}
    >>> shown = {}
    >>> print(choice_table(event, shown))
    chosen from the data; what you give holds:
      net  mlp:128  few numbers
    >>> choice_table(event, shown)
    ''
    """
    fresh = [each for each in event["choices"] if shown.get(each["setting"]) != each["value"]]
    shown |= {each["setting"]: each["value"] for each in fresh}
    if not fresh:
        return ""
    head = "chosen from the data; what you give holds:" if event["task"] == 0 else "changed for this task:"
    name, value = (max(len(str(each[key])) for each in fresh) for key in ("setting", "value"))
    rows = [f"  {each['setting']:{name}}  {each['value']!s:{value}}  {each['reason']}" for each in fresh]
    return "\n".join([head, *rows])


class Watch(Observer):
    """Observes a trainer that has no run folder: shows epochs and notes, and keeps the events in memory."""

    def __init__(self, display: Display, shown: Mapping[str, Any] | None = None) -> None:
        """`shown` are settings that the user knows already."""
        self.display = display
        self.events: list[dict[str, Any]] = []
        self._choices = dict(shown or {})

    def event(self, event: dict[str, Any]) -> None:
        """Keep an event; show notes and choices."""
        self.events.append(event)
        if event["event"] == "note":
            self.display.note(event["text"])
        if event["event"] == "choices" and (table := choice_table(event, self._choices)):
            self.display.note(table)

    def epoch(self, trainer: Trainer, event: dict[str, Any]) -> None:
        """Show an epoch."""
        self.display.epoch(event)


def _losses(event: dict[str, Any]) -> str:
    losses = event["valid"]["loss"]
    shown = " ".join("-" if loss is None else f"{loss:.2f}" for loss in losses[:5])
    return shown + (" …" if len(losses) > 5 else "")
