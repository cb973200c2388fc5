"""A run folder open for writing: observes the trainer, and keeps log, checkpoints and display up to date."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from boovae.config import Settings, to_toml
from boovae.config.resolve import read_toml
from boovae.data import Task
from boovae.errors import InputError
from boovae.files import appending, hold_folder, make_folder, remove_leftovers, write_file
from boovae.methods import REGISTRY, from_mapping
from boovae.metrics import partial_results
from boovae.metrics.evaluation import Evaluation
from boovae.metrics.partial_results import PartialResult
from boovae.report.run_record import RunRecord
from boovae.runs.folder import Line, Log, RunFolder
from boovae.runs.progress import Display, TimeEstimate, choice_table
from boovae.runs.reading import record_of_log
from boovae.training.checkpoint import due, load_checkpoint, save_checkpoint
from boovae.training.events import Event, Interrupted
from boovae.training.state import logged, refused
from boovae.training.trainer import Observer, Trainer

#: Kinds of events, numerous ones, that neither resuming a run nor its warnings need.
PASSED = frozenset({"epoch"})


class Run(Observer):
    """A run folder, locked by one process at a time, and its log in memory."""

    def __init__(self, folder: Path, settings: Settings, display: Display | None = None) -> None:
        self.folder, self.files = folder, RunFolder(folder)
        self.settings = settings
        self.display = display or Display()
        self.stop_requested = False
        self.estimate: TimeEstimate | None = None
        self.follow: Callable[[Sequence[Event]], None] | None = None  # receives events that are safe in a checkpoint
        self.partial_results: dict[str, PartialResult] = {}  # of the evaluation in progress
        self._log: Log | None = None  # written and still to be written; None until it is read
        self._log_length: int | None = None  # the bytes that were read, if not all
        self._unwritten: list[str] = []
        self._unsent: list[Event] = []  # events since the last checkpoint, for trackers
        self._saved = self._asked = time.monotonic()
        self._choices: dict[str, Any] = {}  # shown so far
        self._task_seconds = 0.0  # spent on the task in training, by earlier processes too
        self._began: float | None = None
        self._lock = hold_folder(folder)

    # --- making and opening -------------------------------------------------------------------------------------

    @classmethod
    def create(cls, folder: Path, settings: Settings, made: dict[str, Any], display: Display | None = None) -> Self:
        """Make a new run folder, `made` in this environment; refuse one that already holds a run."""
        try:
            make_folder(RunFolder(folder).samples)
        except OSError as error:
            raise InputError(f"cannot write to {folder} ({{out}}): {error.strerror}; choose another folder") from error
        with ExitStack() as stack:
            run = stack.push(cls(folder, settings, display))
            if run.files.exists:  # checked under the lock, so nobody else can make one
                raise InputError(
                    f"{folder} already holds a run: choose another {{out}}, or {{resume=auto}} to continue it"
                )
            write_file(run.files.environment, json.dumps(made, indent=1).encode())
            write_file(run.files.log, b"")
            write_file(run.files.config, to_toml(settings, REGISTRY.sections(settings.method)).encode())
            stack.pop_all()
            return run

    @classmethod
    def open(cls, folder: Path, display: Display | None = None) -> Self:
        """Open an existing run folder."""
        files = RunFolder(folder)
        if not files.exists:
            raise InputError(
                f"{folder} is not a run folder: it has no config.toml; `boovae train --out {folder}` makes one"
            )
        return cls(folder, from_mapping(read_toml(files.config)), display)

    def close(self) -> None:
        """Unlock the folder and close the display."""
        os.close(self._lock)
        self.display.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- the log ------------------------------------------------------------------------------------------------

    def events(self, kind: str | None = None) -> list[Event]:
        """Return the events of `metrics.jsonl`, written and still to be written: all, or those of one kind."""
        return [event for event in self._read_log().events if kind is None or event.get("event") == kind]

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations so far."""
        return self._read_log().all_of(Evaluation)

    def head(self) -> Event:
        """Return the first event, which describes method, seeds and data."""
        return self._read_log().require().events[0]

    def record(self) -> RunRecord:
        """Return a record of the log so far, without its epochs."""
        config = {name: str(value) for name, value in self.settings.flat().items()}
        return record_of_log(self.folder, self._read_log(), config)

    def read_saved(self) -> list[Event]:
        """Return the log up to the newest checkpoint; what follows will be done again."""
        length, _ = logged(self.saved()[1])
        if not self.files.log.is_file() or self.files.log.stat().st_size < length:
            raise InputError(f"{self.files.log} is shorter than the checkpoint says: copy the whole run folder")
        self._log, self._log_length = None, length
        self.head()
        return self.events()

    def _read_log(self) -> Log:
        """Return the log, which is read on first use."""
        if self._log is None:
            lines = self.files.read_log([], self._log_length)  # a torn last line comes after the checkpoint
            self._log = Log(self.files.log, lines, PASSED)
        return self._log

    def event(self, event: Event) -> None:
        """Add an event to the log; it reaches the disk with the next checkpoint at the latest."""
        line = json.dumps(event)
        self._read_log().add(Line(self.files.log.name, json.loads(line)))
        self._unwritten.append(f"{line}\n")
        self._unsent.append(event)
        if event["event"] == "note":
            self.display.note(event["text"])
        if event["event"] == "choices":
            self._choices = self._choices or (dict(self.settings.flat()) if event["task"] else {})
            if table := choice_table(event, self._choices):
                self.display.note(table)
        if event["event"] == "collapse":
            who = ", ".join(str(index) for index, again in enumerate(event["collapsed"]) if again)
            self.display.note(
                f"the posterior of replica {who} collapsed: learning the task once more, with a KL warm-up of "
                f"{event['kl_warmup']} epochs"
            )
        if event["event"] == "divergence":
            lost = event["retry"] == "frozen"
            done = "given up; the others continue" if lost else "back to its best state, with half the learning rate"
            self.display.note(f"replica {event['replica']} diverged in epoch {event['epoch']}: {done}")

    def timing(self, event: Event) -> None:
        """Append wall times to a file of their own: they differ from run to run, the log does not."""
        with appending(self.files.timing, begin=True) as file:
            file.seek(0)
            file.seek(file.read().rfind(b"\n") + 1)
            file.truncate()  # remove a line torn by a killed process or a full disk
            file.write(json.dumps(event).encode() + b"\n")

    # --- watching the trainer -----------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Show a note; leave if asked to stop."""
        if self.stop_requested:
            raise Interrupted
        self.display.note(text)

    def block(self, trainer: Trainer) -> None:
        """Checkpoint if one is due; leave if asked to stop. Also called between two steps of an evaluation."""
        if self.stop_requested:
            self.checkpoint(trainer)
            raise Interrupted
        lasted, self._asked = time.monotonic() - self._asked, time.monotonic()
        if due(self._saved, ahead=lasted):  # the next block may last as long as this one
            self.checkpoint(trainer)

    def epoch(self, trainer: Trainer, event: Event) -> None:
        """Show an epoch."""
        self.display.epoch(event)
        if self.estimate is not None:
            self.estimate.epoch(trainer.settings.training.epochs)

    def checkpoint(self, trainer: Trainer) -> None:
        """Write a checkpoint with the length of the log and the state of an evaluation in progress."""
        tensors, record = trainer.state()
        sums, plans = partial_results.state(self.partial_results)
        with appending(self.files.log) as file:
            file.write("".join(self._unwritten).encode())
            length = file.tell()
        self._unwritten = []
        record |= {"metrics_length": length, "task_seconds": self.task_seconds, **plans}
        save_checkpoint(self.files.checkpoint, tensors | sums, record)
        self._saved = time.monotonic()
        unsent, self._unsent = self._unsent, []
        if self.follow is not None:
            self.follow(unsent)

    @property
    def task_seconds(self) -> float:
        """Seconds spent on the training of the current or last task."""
        return self._task_seconds + (time.monotonic() - self._began if self._began is not None else 0.0)

    def learn(self, trainer: Trainer, task: Task) -> None:
        """Let the trainer learn a task, and measure the time."""
        if not trainer.in_task:
            self._task_seconds = 0.0
        self._began = time.monotonic()
        trainer.learn(task, self)
        self._task_seconds, self._began = self.task_seconds, None

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and record of the newest checkpoint; change nothing."""
        loaded = load_checkpoint(self.files.checkpoint, self.display.note)
        if loaded is None:
            raise InputError(f"{self.folder} has no checkpoint yet: continue it with `boovae train`")
        return loaded

    def restore(self, trainer: Trainer) -> bool:
        """Restore the trainer and cut the log to the newest checkpoint; return False if there is none."""
        loaded = load_checkpoint(self.files.checkpoint, self.display.note, owner=True)
        length = 0
        if loaded is not None:
            tensors, record = loaded
            trainer.load_state(tensors, record)
            length, self._task_seconds = logged(record)
            with refused():
                self.partial_results = partial_results.load_state(tensors, record)
        path = self.files.log
        with appending(path) as file:
            if file.tell() < length:
                raise InputError(f"{path} is shorter than the checkpoint says: copy the whole run folder")
            file.truncate(length)
        if self._log_length != length:  # else `read_saved` has read it so far
            self._log, self._log_length = None, None
        for folder in (self.folder, self.files.samples):
            remove_leftovers(folder)
        return loaded is not None
