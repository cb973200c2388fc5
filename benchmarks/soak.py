"""Two hundred tasks in sequence: does a run become slower or larger than its method explains?

Every task is a handful of digits, and the classes repeat. After each task its time and the memory of the process are
recorded. Only what the method keeps may grow: nothing for `standard` and `ewc`, a few images per task for `coreset`,
the components of the prior for `boo+distill`. The evaluation after each task covers all tasks seen, so for every method
its time grows with their number, and so does its log entry, which the process keeps in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch

from boovae.data import Stream, Task, load_stream
from boovae.methods import resolve
from boovae.runs.progress import Display
from boovae.runs.run import Run
from boovae.runs.train import train
from boovae.training.trainer import Trainer

#: Growth of the process in bytes per task, beyond what method and log explain, that counts as a leak.
LEAK = 64 << 10
#: Bytes that the allocator may take once.
ONCE = 4 << 20
#: Tasks that are learned regardless of time: the least that gives a meaningful result.
FEWEST = 12
#: Bytes in memory per byte of an evaluation in the log: every number is a Python object in a list.
REMEMBERED = 10
SETTINGS: dict[str, Any] = {
    "net": "mlp:8",
    "latent_dim": 3,
    "epochs": 1,
    "batch_size": 8,
    "components": 2,
    "samples": 1,
    "boo_steps": 1,
    "boo_until": 1,
    "distill_latents": 4,
    "coreset_images": 2,
}
#: Methods, and whether the time of a task may grow with the number of tasks.
METHODS = {"standard": False, "ewc": False, "coreset": True, "boo+distill": True}


@dataclass(frozen=True)
class Soak:
    """What was measured of a method: memory and training time after each task."""

    method: str
    tasks: int
    resident: list[int]  # bytes of the process after each task
    device: list[int]  # bytes allocated on the GPU
    seconds: list[float]  # CPU time of training each task, without its evaluation
    kept: int  # bytes that the method keeps at the end
    logged: list[int]  # bytes of each evaluation in the log

    @property
    def leak(self) -> float:
        """Bytes per task that the process gained beyond what method and log explain, over the last three quarters."""
        log = np.cumsum(self.logged) * REMEMBERED
        return (
            _slope([own - int(noted) for own, noted in zip(self.resident, log, strict=True)]) - self.kept / self.tasks
        )

    @property
    def device_leak(self) -> float:
        """Bytes per task that the GPU memory gained beyond what the method keeps."""
        return _slope(self.device) - self.kept / self.tasks

    @property
    def growth(self) -> float:
        """How many times longer the last tenth of the tasks took than the second tenth."""
        tenth = max(1, self.tasks // 10)
        return float(np.median(self.seconds[-tenth:]) / np.median(self.seconds[tenth : 2 * tenth]))

    @property
    def problem(self) -> str:
        """Describe a leak or slowdown; empty if there is none."""
        if max(self.leak, self.device_leak) > LEAK + ONCE / self.tasks:
            return f"{self.method}: {max(self.leak, self.device_leak):,.0f} bytes per task leak"
        if self.growth > (1.5 * self.tasks / (0.15 * self.tasks) if METHODS[self.method] else 2.0):
            return f"{self.method}: the last tasks took {self.growth:.1f} times as long as the first"
        return ""


def _slope(values: list[int]) -> float:
    """Return the growth per task over the last three quarters: the median slope between points half of that apart."""
    rest = np.array(values[len(values) // 4 :], dtype=np.float64)
    half = len(rest) // 2
    return float(np.median((rest[half : 2 * half] - rest[:half]) / half)) if half else 0.0


class TimeIsUpError(Exception):
    """Ends a run that exceeds its time."""


class _Meter(Display):
    """Records the memory of the process at the start of each task; starts no task once the time is up."""

    def __init__(self, device: str, seconds: float) -> None:
        self.resident: list[int] = []
        self.allocated: list[int] = []
        self.cuda = device != "cpu"
        self.deadline = time.monotonic() + seconds

    def task(self, index: int, total: int | None, name: str, epochs: int) -> None:
        """Record it after collecting garbage, since the pictures of all components are large for a moment."""
        if index >= FEWEST and time.monotonic() > self.deadline:
            raise TimeIsUpError
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc keeps freed memory unless asked
            ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident.append(pages * resource.getpagesize())
        self.allocated.append(torch.cuda.memory_allocated() if self.cuda else 0)


@contextlib.contextmanager
def _timed() -> Iterator[list[float]]:
    """Yield the CPU seconds of training each task, which do not depend on other load of the machine."""
    seconds: list[float] = []
    learn = Run.learn

    def timed(run: Run, trainer: Trainer, task: Task) -> None:
        began = time.process_time()
        learn(run, trainer, task)
        seconds.append(time.process_time() - began)

    with patch.object(Run, "learn", timed):
        yield seconds


def digits_again(tasks: int, images: int = 12) -> Stream:
    """Return a stream of small tasks that repeat the ten digits, with different images each time."""
    pool = [
        torch.cat([task.train.images, task.valid.images, task.test.images]).numpy() for task in load_stream("digits")
    ]
    chance = np.random.default_rng(0)
    parts = [pool[task % 10][chance.choice(len(pool[task % 10]), images, replace=False)] for task in range(tasks)]
    return Stream.from_tasks([part.reshape(-1, 8, 8) for part in parts], valid=1, test=1)


def soak(
    method: str,
    tasks: int,
    device: str = "cpu",
    compile: Literal["auto", "on", "off"] = "auto",
    limit: float = math.inf,
) -> Soak:
    """Learn `tasks` tasks with one method, or as many as `limit` seconds allow, in a temporary folder."""
    settings = resolve({"dataset": "arrays", "method": method}, common=SETTINGS)
    meter = _Meter(device, limit)
    with tempfile.TemporaryDirectory() as home:
        run, stream = Path(home) / "run", digits_again(tasks)
        with contextlib.suppress(TimeIsUpError), _timed() as seconds:
            train(settings, stream, run, device=device, compile=compile, metrics=("nll",), display=meter)
        lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"evaluation"' in line]
    kept = json.loads(lines[-1])["ledger"]["memory_bytes"]
    return Soak(method, len(lines), meter.resident, meter.allocated, seconds, kept, [len(line) for line in lines])
