"""The work on one cell: `work(job)` runs it in its folder, in any process.

A job and its answer are plain dictionaries, so that any executor can carry them. Only the process that holds the cell's
lock works on it; a stopped run continues, a finished cell is left alone. `python -m boovae.bench.worker JOB` does the
same for a job given as JSON and prints the answer.
"""

import contextlib
import errno
import json
import os
import sys
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict

from filelock import FileLock, Timeout

from boovae.bench.cells import Cell
from boovae.bench.figures import component_pictures, sample_pictures
from boovae.bench.request import FORMAT, Request
from boovae.bench.results import Summary, read_summary, summary_path
from boovae.config import Settings, to_toml
from boovae.errors import BoovaeError
from boovae.files import write_file
from boovae.methods import from_mapping
from boovae.runs import train
from boovae.runs.data import load_data
from boovae.runs.folder import RunFolder
from boovae.runs.progress import Lines
from boovae.training.events import Interrupted

#: Errors of a full disk.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Job(TypedDict):
    """What a worker needs: the cell's settings as TOML, the folder of all cells, and how to compute."""

    name: str
    label: str
    config: str
    folder: str
    data_dir: str | None
    options: dict[str, Any]


class Answer(TypedDict):
    """How the work ended.

    `state` is done; busy (another process works on the cell); lost (the worker was stopped or died: the cell can be run
    again); full (no space left); or failed.
    """

    state: Literal["done", "busy", "lost", "full", "failed"]
    error: str


def make_job(cell: Cell, request: Request) -> Job:
    """Return the job of a cell; its paths are absolute, so that any machine with the same disk can run it."""
    options: dict[str, Any] = {name: getattr(request, name) for name in ("device", "compile", "command")}
    return {
        "name": cell.name,
        "label": cell.label,
        "config": to_toml(cell.settings),
        "folder": str(request.out.resolve()),
        "data_dir": str(request.data_dir.expanduser().resolve()) if request.data_dir else None,
        "options": options | {"features": list(request.features_of(cell.settings.data.dataset))},
    }


def lock_of(folder: Path, name: str) -> FileLock:
    """Return the lock of a cell; it is released when the process that holds it ends, however that happens."""
    return FileLock(folder / f"{name}.lock", timeout=0)


def work(job: Job) -> Answer:
    """Run a cell to its end, unless another process does; answer with an error instead of raising it."""
    folder = Path(job["folder"])
    cell = Cell(job["label"], from_mapping(tomllib.loads(job["config"])))
    path = folder / f"{cell.name}.log"
    try:
        with lock_of(folder, cell.name), path.open("a", encoding="utf-8") as log, contextlib.redirect_stderr(log):
            return _run(job, cell, folder)
    except Timeout:
        return {"state": "busy", "error": ""}
    except Exception as error:  # becomes the answer: one bad cell must not stop the others
        text = str(error) if isinstance(error, BoovaeError) else f"{type(error).__name__}: {error}"
        # A full disk affects all cells, a stopped worker is not a failure.
        full = any(isinstance(cause, OSError) and cause.errno in NO_ROOM for cause in _causes(error))
        return {"state": "full" if full else "lost" if _was_stopped(error) else "failed", "error": text}


def _run(job: Job, cell: Cell, folder: Path) -> Answer:
    try:
        if read_summary(folder, cell) is None:
            data_dir, run = Path(job["data_dir"]) if job["data_dir"] else None, folder / cell.name
            options = {"display": Lines(), "data_dir": data_dir, **job["options"]}
            train.train(cell.settings, load_data(cell.settings, data_dir), run, **options)
            write_file(summary_path(folder, cell.name), json.dumps(summarise(run, cell.settings)).encode())
        return {"state": "done", "error": ""}
    except Exception as error:
        if _was_stopped(error):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()  # into the log
        raise


def summarise(run: Path, settings: Settings) -> Summary:
    """Return the record of a finished run: all that tables and figures need, small, without its curves."""
    folder, notes = RunFolder(run), list[str]()
    events = [line.event for line in folder.read_log(notes)]
    timings = folder.read_timings(notes).values()
    head = events[0]
    kept = {event["task"]: event["kept"] for event in events if event["event"] == "components" and "kept" in event}
    return {
        "format": FORMAT,
        "settings": settings.flat(),
        "environment": folder.read_environment(),
        **{name: head[name] for name in ("seeds", "tasks", "split")},
        "evaluations": [event for event in events if event["event"] == "evaluation"],
        "divergences": [event for event in events if event["event"] == "divergence"],
        "kept": kept,
        "samples": sample_pictures(run, len(head["tasks"])),
        "components": component_pictures(run),
        "seconds": {what: sum(getattr(time, f"{what}_seconds") for time in timings) for what in ("train", "evaluate")},
    }


def _was_stopped(error: BaseException) -> bool:
    """Whether a run ended because it was asked to stop."""
    return any(isinstance(cause, Interrupted) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def main() -> None:
    """Do the job given on the command line and print the answer."""
    try:
        answer = work(json.loads(sys.argv[1]))
    except KeyboardInterrupt:  # before the run began, or a second one
        answer = {"state": "lost", "error": "stopped"}
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:  # the bench has died; the next one looks into the cell's folder
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
