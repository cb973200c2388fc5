"""Two processes need the same download or the same classifier at once: both must end with a good file.

In every other round one of them is killed at a random time; the other must still succeed. No partial file may remain
that a later process would take for complete.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from boovae.data import DataFile, Stream
from boovae.data.download import CACHE_VARIABLE, get_file
from boovae.metrics.classifier_training import trained_classifier
from boovae.training import checkpoint
from kills import fork_server

#: The download, and the number of pieces it is sent in, with a pause after each to leave time for a kill.
PACKED = gzip.compress(np.random.default_rng(0).bytes(200_000), mtime=0)
FILE = DataFile("data.gz", hashlib.sha256(gzip.decompress(PACKED)).hexdigest(), hashlib.md5(PACKED).hexdigest())
PIECES, PAUSE = 10, 0.05
#: Longest wait for a process in seconds, and the answer of one that was killed before it had a file.
PATIENCE, KILLED = 120.0, "killed"


@dataclass
class Outcome:
    """The number of races, of kills and of good files, and the losses."""

    tried: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    good: int = 0
    losses: list[str] = field(default_factory=list)


# --- one process -------------------------------------------------------------------------------------------


def _download(cache: Path, address: str) -> str:
    os.environ |= {CACHE_VARIABLE: str(cache), "NO_PROXY": "*"}
    os.environ.pop("BOOVAE_DATA", None)
    return hashlib.md5(get_file("set", FILE, [address]).read_bytes()).hexdigest()


def _classifier(cache: Path, address: str) -> str:
    noise = np.random.default_rng(0).random((2, 100, 8, 8)) / 2
    return trained_classifier(Stream.from_tasks([noise[0], noise[1] + 0.5]), device="cpu", cache_dir=cache).digest


WANTED: dict[str, Callable[[Path, str], str]] = {"downloads": _download, "classifiers": _classifier}


def _want(name: str, cache: Path, address: str, together: Any, answer: Connection) -> None:
    """Get the file at the same time as the other processes; called in the new process."""
    checkpoint.CHECKPOINT_SECONDS = 0.0  # an interrupted training can continue
    together.wait(PATIENCE)
    answer.send(WANTED[name](cache, address))


# --- the race -------------------------------------------------------------------------------------------------------


def two_at_once(folder: Path, rounds: int, seed: int = 0) -> Outcome:
    """Let two processes race for each thing `rounds` times, with an empty cache each time."""
    outcome, chance = Outcome(), random.Random(seed)
    with _mirror() as address:
        for name in WANTED:
            (right,), seconds = _race(name, folder / name / "alone", address, 1)
            for number in range(rounds):
                cache = folder / name / str(number)
                kill_after = chance.uniform(0, seconds) if number % 2 else None
                answers, _ = _race(name, cache, address, 2, kill_after)
                answers += _race(name, cache, address, 1)[0]  # a later process must find a good file
                outcome.tried[name] += 1
                outcome.killed += kill_after is not None
                outcome.good += answers.count(right)
                outcome.losses += [f"{name} {number}: {one}" for one in answers if one not in (right, KILLED)]
    return outcome


def _race(
    name: str, cache: Path, address: str, processes: int, kill_after: float | None = None
) -> tuple[list[str], float]:
    """Return the answers of competing processes, and the seconds they took; the first may be killed."""
    context = fork_server()
    together = context.Barrier(processes + 1)
    started = []
    for _ in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_want, args=(name, cache, address, together, sender))
        process.start()
        sender.close()
        started.append((process, receiver))
    together.wait(PATIENCE)
    began = time.monotonic()
    if kill_after is not None:
        time.sleep(kill_after)
        started[0][0].kill()
    answers = []
    for process, receiver in started:
        try:
            answers.append(receiver.recv() if receiver.poll(PATIENCE) else "no answer")
        except EOFError:
            first = process is started[0][0]
            answers.append(KILLED if first and kill_after is not None else "the process died")
        process.kill()
        process.join()
    return answers, time.monotonic() - began


class _Slowly(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PACKED)))
        self.end_headers()
        step = -(-len(PACKED) // PIECES)
        try:
            for start in range(0, len(PACKED), step):
                self.wfile.write(PACKED[start : start + step])
                time.sleep(PAUSE)
        except (BrokenPipeError, ConnectionResetError):  # the client was killed
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def _mirror() -> Iterator[str]:
    """Serve the file from this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Slowly) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
