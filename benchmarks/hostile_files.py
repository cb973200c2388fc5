"""Damaged and forged files: each must be refused with a `BoovaeError` or do no harm; none may crash the program.

A file of a run, a configuration, a dataset or a picture is changed at random (flipped bits, pieces cut out, doubled or
overwritten, absurd numbers, deep nesting), then read by the program. Checkpoints are also forged, as an attacker would:
a number or a tensor is replaced and the checksum recomputed. All attempts share one process with limited memory, and
each has a time limit.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import resource
import shutil
import signal
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load, save

from boovae.cli.commands import write_page
from boovae.config import Settings
from boovae.data import load_stream, read_folder, read_idx, read_npz, write_idx
from boovae.errors import BoovaeError, RunError
from boovae.methods import resolve
from boovae.report.matrices import write_csv
from boovae.runs.extend import extend
from boovae.runs.reading import read_record
from boovae.runs.run import Run
from boovae.runs.train import load_trainer, train
from boovae.training import checkpoint
from boovae.training.checkpoint import _checksum
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer

#: Seconds allowed per file, and bytes of memory beyond those in use at the start.
TIME_LIMIT, MEMORY_LIMIT = 60, 3 << 30
SETTINGS: dict[str, Any] = {
    "dataset": "digits",
    "net": "mlp:8",
    "latent_dim": 3,
    "limit": 12,
    "tasks": 2,
    "epochs": 4,
    "batch_size": 4,
    "replicas": 2,
    "components": 2,
    "samples": 5,
    "boo_steps": 2,
    "boo_until": 2,
    "distill_latents": 4,
    "coreset_images": 3,
}
METHODS = ("boo+distill", "ewc", "coreset", "multihead")

# --- damage ---------------------------------------------------------------------------------------------------------


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return the content with one kind of damage."""
    kinds = [_flipped, _cut, _without, _doubled, _overwritten, _absurd, _nested]
    return chance.choice(kinds)(content, chance)


def _piece(content: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(content) + 1)
    return start, min(len(content), start + chance.randint(1, 64))


def _flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _without(content: bytes, chance: random.Random) -> bytes:
    start, end = _piece(content, chance)
    return content[:start] + content[end:]


def _doubled(content: bytes, chance: random.Random) -> bytes:
    start, end = _piece(content, chance)
    return content[:end] + content[start:]


def _overwritten(content: bytes, chance: random.Random) -> bytes:
    start, end = _piece(content, chance)
    return content[:start] + chance.choice([b"\0", b"\xff", b"9"]) * (end - start) + content[end:]


def _absurd(content: bytes, chance: random.Random) -> bytes:
    """Replace a number by an absurd one, or by something else."""
    numbers = list(re.finditer(rb"\d+", content))
    if not numbers:
        return _overwritten(content, chance)
    chosen = chance.choice(numbers)
    number = chance.choice([b"999999999999", b"-1", b"1e999", b"NaN", b"null", b'"../../etc/passwd"', b"9" * 5000])
    return content[: chosen.start()] + number + content[chosen.end() :]


def _nested(content: bytes, chance: random.Random) -> bytes:
    start, end = _piece(content, chance)
    return content[:start] + chance.choice([b"[", b'{"a":']) * 100_000 + content[end:]


# --- forgery --------------------------------------------------------------------------------------------------------


def forged(tensors: bytes, head: bytes, chance: random.Random) -> tuple[bytes, bytes]:
    """Return a checkpoint with one thing wrong and a valid checksum."""
    held, record = load(tensors), json.loads(head)["record"]
    if chance.random() < 0.4:
        name = chance.choice(sorted(record))
        odd: list[Any] = [None, -1, 10**30, 1e308, "x", [], {}, [[1]], True, [-1], ["../x"], [10**12] * 3]
        record[name] = chance.choice(odd)
        if chance.random() < 0.2:
            del record[name]
    else:
        name = chance.choice(sorted(held))
        changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda tensor: tensor[:-1] if tensor.dim() else tensor[None],
            lambda tensor: tensor.double() if tensor.is_floating_point() else tensor.float(),
            lambda tensor: torch.cat([tensor, tensor], -1) if tensor.dim() else tensor[None],
            lambda tensor: torch.full_like(tensor, -1),
            lambda tensor: torch.zeros(0),
            lambda tensor: tensor.flatten(),
            lambda tensor: tensor.half() if tensor.is_floating_point() else tensor.bool(),
            lambda tensor: torch.full(tensor.shape, float("nan")) if tensor.is_floating_point() else tensor * 10**9,
        ]
        held[name] = chance.choice(changes)(held[name]).contiguous()
        if chance.random() < 0.15:
            del held[name]
    content = save(held)
    return content, json.dumps({"format": 1, "checksum": _checksum(content, record), "record": record}).encode()


# --- what is tried --------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How many files were tried, refused and harmless, and which crashed."""

    tried: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    harmless: int = 0
    crashes: list[str] = field(default_factory=list)


class Targets:
    """The files to damage, made once, and the ways to read them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        folder.mkdir(parents=True, exist_ok=True)
        self.stream = load_stream("digits", limit=SETTINGS["limit"])
        self.finished = {method: self._finished(method) for method in METHODS}
        self.stopped = {method: self._stopped(method, "stopped", _in_second_task) for method in METHODS}
        self.evaluating = {method: self._stopped(method, "evaluating", _in_evaluation) for method in METHODS}
        self.data = _data_files(folder / "data")

    def _settings(self, method: str) -> Settings:
        return resolve({"method": method}, common=SETTINGS)

    def _finished(self, method: str) -> Path:
        return train(self._settings(method), self.stream, self.folder / "finished" / method, metrics=("nll",))

    def _stopped(self, method: str, name: str, where: Callable[[Run, Trainer], bool]) -> Path:
        """Make a run that stops where `where` says."""
        out, watch = self.folder / name / method, Run.block

        def block(run: Run, trainer: Trainer) -> None:
            run.stop_requested = where(run, trainer)
            watch(run, trainer)

        with _patched(Run, "block", block):
            try:
                train(self._settings(method), self.stream, out, metrics=("nll",))
            except RunError:
                return out
        raise AssertionError("the run did not stop")

    def damaged_run(self, copy: Path) -> Callable[[], object]:
        """Damage a file of a run; return what reads it."""
        kind = self.chance.choice(["finished", "stopped", "evaluating"])
        method = self.chance.choice(METHODS)
        shutil.copytree(getattr(self, kind)[method], copy)
        files = [path for path in sorted(copy.rglob("*")) if path.is_file() and path.suffix in READ]
        for _ in range(self.chance.choice([1, 1, 3])):
            path = self.chance.choice(files)
            path.write_bytes(damaged(path.read_bytes(), self.chance))
        return self._readers(copy, method, continues=kind != "finished")

    def forged_run(self, copy: Path) -> Callable[[], object]:
        """Forge the checkpoints of a run; return what reads them."""
        kind = self.chance.choice(["finished", "stopped", "stopped", "evaluating"])
        method = self.chance.choice(METHODS)
        shutil.copytree(getattr(self, kind)[method], copy)
        newest = max((copy / "checkpoint").glob("*.json"), key=lambda path: int(path.stem))
        tensors, head = forged(newest.with_suffix(".safetensors").read_bytes(), newest.read_bytes(), self.chance)
        shutil.rmtree(copy / "checkpoint")
        (copy / "checkpoint").mkdir()
        newest.with_suffix(".safetensors").write_bytes(tensors)
        newest.write_bytes(head)
        return self._readers(copy, method, continues=kind != "finished")

    def _readers(self, run: Path, method: str, *, continues: bool) -> Callable[[], object]:
        """Return one of the ways to read a run folder."""

        def sample() -> None:
            opened, trainer = load_trainer(run, "cpu")
            with opened:
                generate(trainer, 3)

        def events() -> None:
            with Run.open(run) as opened:
                opened.events("evaluation")

        def resume() -> None:
            train(self._settings(method), self.stream, run, metrics=("nll",))

        ways: list[Callable[[], object]] = [
            sample,
            lambda: write_page([read_record(run)], [run]),
            lambda: write_csv(read_record(run), run / "table.csv"),
            events,
            lambda: extend(run, metrics=("nll",)),
        ]
        return self.chance.choice([*ways, resume, resume, resume] if continues else ways)

    def damaged_data(self, copy: Path) -> Callable[[], object]:
        """Damage a dataset or a picture; return what reads it."""
        name = self.chance.choice(sorted(self.data))
        content = damaged(self.data[name].read_bytes(), self.chance)
        if name.startswith("picture"):
            path = copy / "a" / f"1{Path(name).suffix}"
            path.parent.mkdir(parents=True)
            Image.new("L", (9, 9)).save(copy / "a" / "0.png")
            path.write_bytes(content)
            return lambda: read_folder(copy)
        copy.mkdir()
        path = copy / name
        path.write_bytes(content)
        return (lambda: read_npz(path)) if path.suffix == ".npz" else (lambda: read_idx(path))


def _in_second_task(run: Run, trainer: Trainer) -> bool:
    return trainer.tasks_done == 1 and trainer.epoch == 2


def _in_evaluation(run: Run, trainer: Trainer) -> bool:
    return trainer.tasks_done == 2 and bool(run.partial_results)


READ = (".toml", ".json", ".jsonl", ".safetensors", ".png")


def _data_files(folder: Path) -> dict[str, Path]:
    folder.mkdir(parents=True)
    images, labels = np.random.default_rng(0).integers(0, 256, (6, 9, 9), np.uint8), np.arange(6) % 2
    np.savez(folder / "plain.npz", images=images, labels=labels, split=np.arange(6) % 3)
    np.savez_compressed(folder / "packed.npz", x=images, y=labels)
    write_idx(folder / "plain.idx", images)
    write_idx(folder / "packed.gz", images)
    for ending in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"):
        Image.fromarray(images[0]).save(folder / f"picture.{ending}")
    return {path.name: path for path in folder.iterdir()}


@contextmanager
def _patched(place: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def _late(number: int, frame: object) -> None:
    raise TimeoutError(f"took more than {TIME_LIMIT} s")


def try_files(folder: Path, count: int, seed: int = 0) -> Outcome:
    """Try `count` files of each kind. Call it in a separate process: it limits the memory of the process for good."""
    checkpoint.CHECKPOINT_SECONDS = 0.0
    files, outcome = Targets(folder, seed), Outcome()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, _late)
    kinds = {"damaged runs": files.damaged_run, "forged runs": files.forged_run, "damaged data": files.damaged_data}
    for name, make in kinds.items():
        for number in range(count):
            copy = folder / "copy"
            attempt = make(copy)
            outcome.tried[name] += 1
            signal.alarm(TIME_LIMIT)
            try:
                attempt()
                outcome.harmless += 1
            except BoovaeError:
                outcome.refused += 1
            except Exception as error:
                outcome.crashes.append(f"{name} {number}: {type(error).__name__}: {error}")
                shutil.copytree(copy, folder / "crashed" / f"{name.replace(' ', '-')}-{number}")
            finally:
                signal.alarm(0)
            shutil.rmtree(copy)
    return outcome


def bombs(folder: Path) -> dict[str, Callable[[], object]]:
    """Return decompression bombs, each with a function that reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "idx.gz").write_bytes(gzip.compress(b"\0\0\x08\x01" + (1 << 31).to_bytes(4, "big") + bytes(1 << 22)))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 9)})
    np.savez(folder / "plain.npz", labels=np.zeros(1, int))
    with zipfile.ZipFile(folder / "plain.npz", "a") as archive:
        archive.writestr("images.npy", header.getvalue())
    (folder / "pictures").mkdir()
    Image.new("1", (20_000, 20_000)).save(folder / "pictures" / "bomb.png")
    return {
        "idx.gz": lambda: read_idx(folder / "idx.gz"),
        "npz": lambda: read_npz(folder / "plain.npz"),
        "picture": lambda: read_folder(folder / "pictures"),
    }
