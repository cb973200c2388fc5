"""Kill runs repeatedly; they must end with the same bytes as a run that was never killed.

Each life of a run is a process, started by a fork server that has imported everything, so that restarting is cheap.
Half of the kills come at a random time. The others come at a given moment, where the life stops and waits for SIGKILL:
while it learns a component, in an evaluation with some steps already on disk, during a write (the temporary file is cut
to a random length, as after a power cut), or between two files of a checkpoint. The moments are patched in from here;
the package does not know about them.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import random
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from boovae.cli.main import main
from boovae.metrics import likelihood
from boovae.training import checkpoint

SMALL = (
    "--dataset digits --net mlp:24 --latent-dim 4 --limit 40 --tasks 3 --batch-size 8 --replicas 2 --epochs 12 "
    "--early-stop 100 --components 4 --samples 200 --generated 100 --quiet --resume auto"
)
#: Runs to kill: name, and arguments of `boovae train`.
RUNS = {
    "boo+distill": "--method boo+distill --boo-steps 20 --boo-until 8 --distill-latents 20",
    "boo, paper": "--method boo --preset paper --boo-steps 20",
    "ewc": "--method ewc --binarize dynamic",
    "coreset": "--method coreset --coreset-images 5",
    "vcl": "--method vcl",
}
#: Modules that the fork server imports beforehand; importing them would take most of a life.
IMPORTED = [
    "kills",
    "boovae.report.page",
    "sklearn.datasets",
    "torch._dynamo",
    "matplotlib.pyplot",
    "PIL.Image",
    "jinja2",
]
#: Seconds between checkpoints: short, so that kills fall between many of them.
CHECKPOINT_SECONDS = 0.05
#: Bytes per step of a likelihood: few, so that an evaluation has many steps.
LIKELIHOOD_BYTES = 1 << 16
#: Longest wait for a life, in seconds.
PATIENCE = 300.0

# --- the moments ----------------------------------------------------------------------------------------------------

Stop = Callable[[], None]


def _counted(module: str, name: str, number: int, stop: Stop) -> None:
    """Stop the life at the `number`-th call of a function, before the call does anything."""
    place: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        place = getattr(place, part)
    function, calls = getattr(place, last), 0

    def patched(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            stop()
        return function(*arguments, **options)

    setattr(place, last, patched)


def _component(number: int, stop: Stop) -> None:
    _counted("boovae.replicas.descent", "adam_step", 13 * number, stop)


def _evaluation(number: int, stop: Stop) -> None:
    checkpoint.CHECKPOINT_SECONDS = 0.0  # part of the evaluation is on disk
    module, name, calls = [
        ("boovae.metrics.likelihood", "_weigh", 9 * number),
        ("boovae.metrics.reference", "precision_recall", 1 + number // 2),
        ("boovae.metrics.metric", "Context.samples.func", 1 + number // 3),
    ][number % 3]
    _counted(module, name, calls, stop)


def _task_end(number: int, stop: Stop) -> None:
    _counted("boovae.runs.run", "Run.checkpoint", number, stop)


def _rename(number: int, stop: Stop) -> None:
    _counted("pathlib", "Path.replace", number, stop)


def _write(number: int, stop: Stop) -> None:
    sync, calls = os.fsync, 0

    def patched(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            path = Path(f"/proc/self/fd/{descriptor}")
            if path.resolve().suffix == ".tmp" and stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.truncate(path, random.randrange(os.fstat(descriptor).st_size + 1))
            stop()
        sync(descriptor)

    setattr(os, "fsync", patched)  # noqa: B010 - a type checker would reject the assignment


#: Moments at which to stop and kill a life, at a numbered call; runs without components never reach the first.
MOMENTS: dict[str, Callable[[int, Stop], None]] = {
    "component": _component,
    "evaluation": _evaluation,
    "write": _write,
    "rename": _rename,
    "checkpoint": _task_end,
}
ANY_TIME = "any time"


# --- a life ---------------------------------------------------------------------------------------------------------


def live(words: list[str], output: str, moment: str | None, number: int, waiting: Connection) -> None:
    """Run a command of boovae, stopping at `moment` if one is given; called in the new process."""
    os.setsid()  # its child processes die with it
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    checkpoint.CHECKPOINT_SECONDS = CHECKPOINT_SECONDS
    likelihood.CHUNK_BYTES = dict.fromkeys(likelihood.CHUNK_BYTES, LIKELIHOOD_BYTES)

    def stop() -> None:
        waiting.send_bytes(b"here")
        time.sleep(PATIENCE)

    if moment in MOMENTS:
        MOMENTS[moment](number, stop)
    main(words)


@dataclass
class Tally:
    """Kills by moment, the number of runs that ended identically, and the losses."""

    kills: Counter[str] = field(default_factory=Counter)
    identical: int = 0
    losses: list[str] = field(default_factory=list)


def fork_server() -> ForkServerContext:
    """Return a context that starts processes with everything imported."""
    # If the server itself initialised CUDA, its forks could not use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class Killer:
    """Starts and kills lives; `seconds` limits how long a command is killed."""

    def __init__(self, folder: Path, seed: int = 0, seconds: float = math.inf) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.seconds = seconds
        self.context = fork_server()

    def run(self, words: list[str], output: Path, moment: str | None = None, seconds: float = 1.0) -> int:
        """Run a command; kill it at `moment`, or at any time after `seconds`. Return its exit code, -9 if killed."""
        parent, child = self.context.Pipe(duplex=False)
        number = self.random.randint(1, 8)
        life = self.context.Process(target=live, args=(words, str(output), moment, number, child))
        life.start()
        child.close()
        pid = life.pid or 0
        try:
            reached = parent.poll(seconds if moment == ANY_TIME else PATIENCE)
            if moment is not None and (reached or moment == ANY_TIME) and life.is_alive():
                time.sleep(self.random.uniform(0, 0.01))
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            life.join(PATIENCE)
            return -1 if life.exitcode is None else life.exitcode
        finally:
            with suppress(ProcessLookupError):  # its child processes too
                os.killpg(pid, signal.SIGKILL)
            life.join()
            parent.close()


def moments(method: str) -> Iterator[str]:
    """Yield moments to kill at, endlessly: half of them at any time."""
    special = [moment for moment in MOMENTS if moment != "component" or method.startswith("boo")]
    while True:
        for moment in special:
            yield moment
            yield ANY_TIME


def drill_run(
    killer: Killer, name: str, words: list[str], kills: int, tally: Tally, same: Callable[[Path, Path], str]
) -> None:
    """Kill a command `kills` times, over as many runs as that takes; each must end like an uninterrupted one.

    `words` contain {out} for the folder; `same` returns how two folders differ.
    """
    home = killer.folder / name.replace(", ", "-")
    home.mkdir(parents=True)

    def command(out: Path) -> list[str]:
        return [word.replace("{out}", str(out)) for word in words]

    whole, output = home / "whole", home / "output.txt"
    began = time.monotonic()
    if killer.run(command(whole), output) != 0:
        tally.losses.append(f"{name}: the uninterrupted run fails; see {output}")
        return
    seconds, done, where = time.monotonic() - began, 0, moments(name)
    deadline = time.monotonic() + killer.seconds
    for attempt in range(kills):
        if done >= kills or (done and time.monotonic() > deadline):
            return
        out = home / f"killed-{attempt}"
        while True:
            moment = next(where) if done < kills and time.monotonic() < deadline else None
            code = killer.run(command(out), output, moment, killer.random.uniform(0.1, 0.5) * seconds)
            if code == -signal.SIGKILL and moment is not None:
                tally.kills[moment] += 1
                done += 1
            else:
                break
        problem = same(whole, out) if code == 0 else f"ended with {code} after a kill; see {output}"
        if problem:
            tally.losses.append(f"{name}, {out.name}: {problem}")
        else:
            tally.identical += 1


# --- comparing ------------------------------------------------------------------------------------------------------


def difference(whole: Path, killed: Path) -> str:
    """Return how two run folders differ, times aside: in weights, log, components or pictures."""
    one, other = _content(whole), _content(killed)
    different = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return f"differs in {', '.join(different)}" if different else ""


def _content(run: Path) -> dict[str, bytes]:
    """Return the files of a run that must be reproduced; of the checkpoints only the newest, without its time."""
    clocks = ("timing.jsonl", "environment.json", "report.html", ".lock")
    files = {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name not in clocks and path.parent.name != "checkpoint"
    }
    newest = max((run / "checkpoint").glob("*.json"), key=lambda path: int(path.stem))
    record = json.loads(newest.read_bytes())["record"] | {"task_seconds": 0}
    return files | {
        "checkpoint (tensors)": newest.with_suffix(".safetensors").read_bytes(),
        "checkpoint (record)": json.dumps(record, sort_keys=True).encode(),
    }


def kill_training(
    folder: Path,
    kills: int,
    runs: dict[str, str],
    *,
    device: str = "cpu",
    compile: str = "auto",
    seed: int = 0,
    seconds: float = math.inf,
) -> Tally:
    """Share the kills among `runs`; kill none of them for longer than `seconds`."""
    killer, tally = Killer(folder, seed, seconds), Tally()
    for name, own in runs.items():
        words = ["train", *SMALL.split(), *own.split(), "--device", device, "--compile", compile, "--out", "{out}"]
        drill_run(killer, name, words, -(-kills // len(runs)), tally, difference)
    return tally


# --- the bench ----------------------------------------------------------------------------------


BENCH = "bench paper --quick --methods standard ewc boo --tasks 2 --replicas 1 --workers 1 --quiet"


def kill_bench(folder: Path, kills: int, *, seed: int = 0, seconds: float = math.inf) -> Tally:
    """Kill `boovae bench`; its cells must end like those of an uninterrupted one."""
    killer, tally = Killer(folder, seed, seconds), Tally()
    folder.mkdir(parents=True)
    (folder / "bench.toml").write_text('net = "mlp:24"\nlatent_dim = 4\nepochs = 8\nlimit = 40\nsamples = 100\n')
    words = [
        *BENCH.split(),
        "--config",
        str(folder / "bench.toml"),
        "--out",
        "{out}/cells",
        "--results",
        "{out}/results",
    ]
    drill_run(killer, "bench", words, kills, tally, _bench_difference)
    return tally


def _bench_difference(whole: Path, killed: Path) -> str:
    cells = sorted(path.parent.name for path in (whole / "cells").glob("*/config.toml"))
    found = sorted(path.parent.name for path in (killed / "cells").glob("*/config.toml"))
    if cells != found or not cells:
        return f"has cells {found}, not {cells}"
    differences = {cell: difference(whole / "cells" / cell, killed / "cells" / cell) for cell in cells}
    return "; ".join(f"{cell} {problem}" for cell, problem in differences.items() if problem)
