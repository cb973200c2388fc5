"""The folder of a run: settings, log, checkpoints, held by one process at a time (docs/run-folder.md)."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boovae.config import Settings, to_toml
from boovae.config.resolve import read_toml
from boovae.errors import InputError
from boovae.files import appending, hold_folder, make_folder, remove_leftovers, write_file
from boovae.methods import REGISTRY, from_mapping
from boovae.metrics import partial as tally
from boovae.report.log import checked, read_events
from boovae.runs.progress import Display, Silent
from boovae.training.checkpoint import due, load_checkpoint, save_checkpoint
from boovae.training.events import Event, Interrupted
from boovae.training.state import logged, refused
from boovae.training.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from boovae.data import Task
    from boovae.runs.trackers import Follower


class Run:
    """A run folder, held by one process at a time. Watches the trainer: log, checkpoints, display."""

    def __init__(self, folder: Path, settings: Settings, display: Display | None = None) -> None:
        self.folder = folder
        self.settings = settings
        self.display = display or Silent()
        self.stop_requested = False
        self.follower: Follower | None = None
        self.tallies: dict[str, tally.Tally] = {}  # of the evaluation that is going on
        self._lines: list[str] = []
        self._untold: list[Event] = []  # events since the last checkpoint
        self._saved = self._asked = time.monotonic()
        self._task_seconds = 0.0  # spent on the task in training, by earlier processes too
        self._began: float | None = None
        self._lock = hold_folder(folder)

    # --- making and opening -------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, folder: Path, settings: Settings, environment: dict[str, Any], display: Display | None = None
    ) -> Run:
        """Make a new run folder; refuses one that holds a run."""
        try:
            make_folder(folder / "samples")
        except OSError as error:
            raise InputError(f"cannot write to {folder} ({{out}}): {error.strerror}; choose another folder") from error
        with ExitStack() as stack:
            run = stack.enter_context(cls(folder, settings, display))
            if (folder / "config.toml").exists():  # asked once nobody else can make one
                raise InputError(
                    f"{folder} already holds a run: choose another {{out}}, or {{resume=auto}} to continue it"
                )
            write_file(folder / "environment.json", json.dumps(environment, indent=1).encode())
            write_file(folder / "metrics.jsonl", b"")
            write_file(folder / "config.toml", to_toml(settings, REGISTRY.sections(settings.method)).encode())
            stack.pop_all()
            return run

    @classmethod
    def open(cls, folder: Path, display: Display | None = None) -> Run:
        """Open an existing run folder."""
        if not (folder / "config.toml").is_file():
            raise InputError(
                f"{folder} is no run folder: it has no config.toml; `boovae train --out {folder}` makes one"
            )
        return cls(folder, from_mapping(read_toml(folder / "config.toml")), display)

    def close(self) -> None:
        """Let other processes use the folder."""
        os.close(self._lock)
        self.display.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- the log ------------------------------------------------------------------------------------------------

    def events(self, kind: str | None = None, length: int | None = None) -> list[Event]:
        """Return what `metrics.jsonl` (or its first `length` bytes) says, all of it or one kind of event."""
        self._flush()
        path = self.folder / "metrics.jsonl"
        events = checked(read_events(path, [], length), path)  # a torn last line is behind the checkpoint
        return [event.data for event in events if kind is None or event.value("event") == kind]

    def head(self, length: int | None = None) -> Event:
        """Return the first event: what the run is about."""
        events = self.events("run", length)
        if not events:
            raise InputError(
                f"{self.folder / 'metrics.jsonl'} is empty: the run has not begun; `boovae train` begins it"
            )
        return events[0]

    def event(self, event: Event) -> None:
        """Take an event for the log; it reaches the disk with the next checkpoint at the latest."""
        self._lines.append(json.dumps(event) + "\n")
        self._untold.append(event)
        if event["event"] == "note":
            self.display.note(event["text"])
        if event["event"] == "divergence":
            done = (
                "given up; the others go on"
                if event["retry"] == "frozen"
                else "back to where it was good, half the learning rate"
            )
            self.display.note(f"replica {event['replica']} diverged in epoch {event['epoch']}: {done}")

    def timing(self, event: Event) -> None:
        """Append wall times, which never repeat, to their own file."""
        with appending(self.folder / "timing.jsonl", begin=True) as file:
            file.seek(0)
            file.seek(file.read().rfind(b"\n") + 1)
            file.truncate()  # a line torn by a process that was killed or a full disk: nobody could read it
            file.write(json.dumps(event).encode() + b"\n")

    def _flush(self) -> int:
        """Write the log to disk; return its length."""
        with appending(self.folder / "metrics.jsonl") as file:
            file.write("".join(self._lines).encode())
            self._lines = []
            return file.tell()

    # --- watching the trainer -----------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Tell the user something; leave if asked to."""
        if self.stop_requested:
            raise Interrupted
        self.display.note(text)

    def block(self, trainer: Trainer) -> None:
        """Checkpoint if it is time; leave if asked to. Also between two steps of an evaluation."""
        if self.stop_requested:
            self.checkpoint(trainer)
            raise Interrupted
        lasted, self._asked = time.monotonic() - self._asked, time.monotonic()
        if due(self._saved, ahead=lasted):  # the next block may last as long as this one
            self.checkpoint(trainer)

    def epoch(self, trainer: Trainer, event: Event) -> None:
        """Show an epoch."""
        self.display.epoch(event)

    def checkpoint(self, trainer: Trainer) -> None:
        """Write a checkpoint that knows how long the log was, and how far an evaluation is."""
        tensors, record = trainer.state()
        counted, plans = tally.state(self.tallies)
        record |= {"metrics_length": self._flush(), "task_seconds": self.task_seconds, **plans}
        save_checkpoint(self.folder / "checkpoint", tensors | counted, record)
        self._saved = time.monotonic()
        untold, self._untold = self._untold, []
        if self.follower is not None:
            self.follower.follow(untold)

    @property
    def task_seconds(self) -> float:
        """Seconds spent on the training of the current or last task."""
        return self._task_seconds + (time.monotonic() - self._began if self._began is not None else 0.0)

    def learn(self, trainer: Trainer, task: Task) -> None:
        """Let the trainer learn a task, by the clock."""
        if not trainer.in_task:
            self._task_seconds = 0.0
        self._began = time.monotonic()
        trainer.learn(task, self)
        self._task_seconds, self._began = self.task_seconds, None

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and record of the newest checkpoint; nothing is changed."""
        loaded = load_checkpoint(self.folder / "checkpoint", self.display.note)
        if loaded is None:
            raise InputError(f"{self.folder} has no checkpoint yet: continue it with `boovae train`")
        return loaded

    def restore(self, trainer: Trainer) -> bool:
        """Put the trainer where the newest checkpoint was and cut the log back to it; False if there is none."""
        loaded = load_checkpoint(self.folder / "checkpoint", self.display.note, owner=True)
        length = 0
        if loaded is not None:
            tensors, record = loaded
            trainer.load_state(tensors, record)
            length, self._task_seconds = logged(record)
            with refused():
                self.tallies = tally.load_state(tensors, record)
        path = self.folder / "metrics.jsonl"
        with appending(path) as file:
            if file.tell() < length:
                raise InputError(f"{path} is shorter than the checkpoint says: copy the whole run folder")
            file.truncate(length)
        for folder in (self.folder, self.folder / "samples"):
            remove_leftovers(folder)
        return loaded is not None
