"""Where cells are computed: processes on this machine, a Ray cluster, or Slurm.

An executor is only told "do this job" and asked later how it went. Skipping, resuming and locking belong to the cell's
folder (`work.py`), so all executors behave the same; a worker that is lost answers "lost", and its cell is run again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import boovae
from boovae.arguments import Bench
from boovae.errors import InputError
from boovae.experiments.work import Answer, Job

#: Where this package lies: a worker imports the same one, installed or not.
SOURCE = Path(boovae.__file__).parents[1]


class Handle(Protocol):
    """A job that was handed over."""

    def poll(self) -> Answer | None:
        """Return how the job ended; None while it has not."""

    def cancel(self) -> None:
        """Ask the worker to stop where it is, and wait until it has, if that can be known."""


class Executor(Protocol):
    """Does jobs; at most `slots` of them are handed over at once."""

    slots: int

    def submit(self, job: Job) -> Handle:
        """Hand a job over."""

    def close(self) -> None:
        """Let go of what the executor holds."""


# --- this machine ---------------------------------------------------------------------------------------------------


class Local:
    """A process per cell: one per GPU, or more with a share of it each; without GPUs one per core."""

    def __init__(self, device: str, workers: int | None = None, gpus: float | None = None) -> None:
        self._places = _places(device)
        cores = _cores()
        share = min(gpus or 1.0, 1.0)
        fitting = len(self._places) * max(1, round(1 / share)) if self._places else cores
        self.slots = workers or fitting
        self._threads = str(max(1, cores // self.slots))
        self._running: list[_Process] = []

    def submit(self, job: Job) -> Handle:
        """Start a process, on the GPU that has the fewest."""
        self._running = [process for process in self._running if process.running]
        environment = {"OMP_NUM_THREADS": self._threads, **os.environ, "PYTHONPATH": _search_path()}
        place = None
        if self._places:
            taken = [process.place for process in self._running]
            place = min(self._places, key=taken.count)
            environment["CUDA_VISIBLE_DEVICES"] = place
        process = _Process(job, environment, place)
        self._running.append(process)
        return process

    def close(self) -> None:
        """Nothing is held."""


class _Process:
    """A cell in a process of its own. Should the bench die, the process goes on and keeps its cell locked."""

    def __init__(self, job: Job, environment: dict[str, str], place: str | None) -> None:
        self.place = place
        self._log = Path(job["folder"]) / f"{job['name']}.log"
        words = [sys.executable, "-m", "boovae.experiments.work", json.dumps(job)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def poll(self) -> Answer | None:
        """Return the answer that the process has printed; one that printed none has died."""
        if self.running:
            return None
        output, _ = self._process.communicate()
        if output.strip():
            answer: Answer = json.loads(output.splitlines()[-1])
            return answer
        code = self._process.returncode
        if code < 0:
            return {"state": "lost", "error": f"its process was killed ({signal.Signals(-code).name})"}
        return {"state": "failed", "error": f"its process ended with code {code}; see {self._log}"}

    def cancel(self) -> None:
        """Let the run write a checkpoint and end."""
        if self.running:
            self._process.terminate()
        self._process.communicate()


def _places(device: str) -> list[str]:
    """Return the GPUs to spread over, as CUDA_VISIBLE_DEVICES names them; none for one device that was named."""
    import torch

    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _search_path() -> str:
    return os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))


def make_executor(arguments: Bench, cells: int) -> Executor:
    """Return the executor that the command line names, for so many cells."""
    for name, value in (("--workers", arguments.workers), ("--gpus", arguments.gpus), ("--minutes", arguments.minutes)):
        if value is not None and not value > 0:
            raise InputError(f"{name} is {value}; it must be above 0")
    return Local(arguments.device, arguments.workers, arguments.gpus)
