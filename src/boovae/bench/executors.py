"""Where cells are computed: processes on this machine, a Ray cluster, or Slurm.

An executor takes a job and is polled for the answer. Skipping, resuming and locking happen in the cell's folder
(`worker.py`), so all executors behave the same. The answer of a lost worker is "lost", and its cell runs again.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

import boovae
from boovae.bench.request import BenchOptions, Request
from boovae.bench.worker import Answer, Job, work
from boovae.errors import InputError

#: The folder that holds this package: workers import the same copy, installed or not.
SOURCE = Path(boovae.__file__).parents[1]
#: Flags that only one executor reads.
READER = {"address": "ray", "partition": "slurm", "minutes": "slurm"}
#: Default time limit of a Slurm job, in minutes.
MINUTES = 60
#: Seconds to wait for a connection to a Ray cluster; Ray itself would wait ten minutes.
CONNECT = 5.0


@dataclass
class Handle:
    """A submitted job; `cancel` asks its worker to stop.

    `result` raises `failed` if the work raised an error, and `lost` if the worker is gone: it was killed, ran out of
    time, or was on a machine that went down.
    """

    done: Callable[[], bool]
    result: Callable[[], Answer]
    cancel: Callable[[], None]
    failed: type[Exception] | tuple[()] = ()
    lost: type[Exception] | tuple[()] = ()

    def poll(self) -> Answer | None:
        """Return the job's answer; None while it runs."""
        if not self.done():
            return None
        try:
            return self.result()
        except self.failed as error:
            return {"state": "failed", "error": str(error).strip().splitlines()[-1]}
        except self.lost as error:
            first = next(iter(str(error).strip().splitlines()), "")
            return {"state": "lost", "error": f"{type(error).__name__}: {first}"}


class Executor(Protocol):
    """Runs jobs; the bench submits at most `slots` of them at a time."""

    slots: int

    def submit(self, job: Job) -> Handle:
        """Start or queue a job."""

    def close(self) -> None:
        """Release what the executor holds; cancelled jobs may end first."""


def check_executor(arguments: BenchOptions) -> None:
    """Refuse flags that the executor does not read, and numbers that are not positive."""
    for name, executor in READER.items():
        if getattr(arguments, name) is not None and arguments.executor != executor:
            raise InputError(f"{{{name}}} is for {{executor={executor}}}; add it, or leave {{{name}}} out")
    for name in ("workers", "gpus", "minutes"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise InputError(f"{{{name}}} is {value}; it must be above 0")


def make_executor(request: Request, cells: int) -> Executor:
    """Return the executor that a request names; a cluster may get all `cells` at once."""
    kinds: dict[str, Callable[[Request, int], Executor]] = {"local": Local, "ray": Ray, "slurm": Slurm}
    return kinds[request.executor](request, cells)


# --- this machine ---------------------------------------------------------------------------------------------------


class Local:
    """A process per cell: one per GPU, or several that share it; without GPUs, one per core.

    If the bench dies, its processes continue and keep their cells locked.
    """

    def __init__(self, request: Request, cells: int) -> None:
        self._places = _places(request.device)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = min(request.gpus or 1.0, 1.0)
        # Tolerate rounding: a third may be written 0.34.
        fitting = len(self._places) * int(1 / share + 0.1) if self._places else cores
        self.slots = request.workers or fitting
        self._threads = str(max(1, cores // self.slots))
        self._running: list[tuple[subprocess.Popen[bytes], str | None]] = []  # with their GPUs

    def submit(self, job: Job) -> Handle:
        """Start a process on the GPU that has the fewest."""
        self._running = [(process, place) for process, place in self._running if process.poll() is None]
        environment = {"OMP_NUM_THREADS": self._threads, **os.environ, "PYTHONPATH": _search_path()}
        place = min(self._places, key=[place for _, place in self._running].count, default=None)
        if place is not None:
            environment["CUDA_VISIBLE_DEVICES"] = place
        words = [sys.executable, "-m", "boovae.bench.worker", json.dumps(job)]
        with (Path(job["folder"]) / f"{job['name']}.log").open("ab") as log:
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        self._running.append((process, place))
        # Once terminated, a run writes a checkpoint before it ends.
        return Handle(lambda: process.poll() is not None, partial(_answer, process), process.terminate)

    def close(self) -> None:
        """Wait for the processes that were asked to stop; they write a checkpoint first."""
        for process, _ in self._running:
            process.wait()


def _answer(process: subprocess.Popen[bytes]) -> Answer:
    """Return the answer that a process printed; if it printed none, it died."""
    output, _ = process.communicate()
    if output.strip():
        return msgspec.json.decode(output.splitlines()[-1], type=Answer)
    if process.returncode < 0:
        return {"state": "lost", "error": f"its process was killed ({signal.Signals(-process.returncode).name})"}
    return {"state": "failed", "error": f"its process ended with code {process.returncode}"}


def _places(device: str) -> list[str]:
    """Return the GPUs to use, as CUDA_VISIBLE_DEVICES names them; none if the user chose one device."""
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def _search_path() -> str:
    return os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))


# --- clusters -------------------------------------------------------------------------------------------------------


class Ray:
    """Tasks of a Ray cluster, each with a share of a GPU; without an address, start a cluster on this machine."""

    def __init__(self, request: Request, cells: int) -> None:
        ray = self._ray = _imported("ray", "ray")
        address = request.address
        self.slots = request.workers or max(cells, 1)
        self._ours = not ray.is_initialized()
        if self._ours:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            _check_listening(address)
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=None if address else False)
            except (ConnectionError, ValueError) as error:
                raise _no_cluster(address, error) from error
        there = ray.cluster_resources().get("GPU", 0) > 0 and request.device != "cpu"
        wanted = (1.0 if request.gpus is None else request.gpus) if there else 0.0
        variables = {"PYTHONPATH": _search_path(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        variables |= {name: value for name, value in os.environ.items() if name.startswith("BOOVAE_")}
        # Use a fresh process for every cell and count lost workers ourselves, as with the other executors.
        options = {"num_cpus": 1, "num_gpus": wanted, "max_retries": 0, "max_calls": 1}
        self._work = ray.remote(**options, runtime_env={"env_vars": variables})(work)

    def submit(self, job: Job) -> Handle:
        """Queue a task."""
        ray, errors = self._ray, self._ray.exceptions
        task = self._work.remote(job)
        return Handle(
            done=lambda: bool(ray.wait([task], timeout=0)[0]),
            result=lambda: ray.get(task),
            cancel=lambda: ray.cancel(task),  # its last checkpoint is at most half a minute old
            failed=errors.RayTaskError,
            lost=errors.RayError,
        )

    def close(self) -> None:
        """Leave the cluster; shut it down if it was started here."""
        if self._ours:
            self._ray.shutdown()


def _check_listening(address: str | None) -> None:
    """Refuse an address HOST:PORT, with or without ray://, where nobody listens; Ray checks all other addresses."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:  # a port beyond 65535
        raise _no_cluster(address, error) from error


def _no_cluster(address: str | None, error: Exception) -> InputError:
    return InputError(
        f"{{address}} {address}: no Ray cluster answers ({error}); name the HOST:PORT that `ray start --head` printed, "
        "or leave {address} out: then a cluster is started on this machine"
    )


class Slurm:
    """A Slurm job per cell, through submitit; `cluster="local"` runs the jobs as processes on this machine."""

    def __init__(self, request: Request, cells: int, cluster: str = "slurm") -> None:
        submitit = self._submitit = _imported("submitit", "slurm")
        self.slots = request.workers or max(cells, 1)
        try:
            self._executor = submitit.AutoExecutor(folder=request.out.resolve() / "slurm", cluster=cluster)
        except RuntimeError as error:
            raise InputError(f"{{executor}} slurm: {error}; is this a machine that can submit jobs?") from error
        whole = 0 if request.device == "cpu" else max(1, round(request.gpus or 1))  # Slurm allocates whole GPUs
        options = {"slurm_partition": request.partition} if request.partition else {}
        limits = {"timeout_min": request.minutes or MINUTES, "cpus_per_task": 2, "gpus_per_node": whole}
        self._executor.update_parameters(name="boovae", **limits, **options)

    def submit(self, job: Job) -> Handle:
        """Queue a job."""
        task, errors = self._executor.submit(work, job), self._submitit.core.utils
        return Handle(task.done, task.result, task.cancel, errors.FailedJobError, errors.UncompletedJobError)

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _imported(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise InputError(f"{{executor}} needs the package {package}: pip install 'boovae[{extra}]'") from None
