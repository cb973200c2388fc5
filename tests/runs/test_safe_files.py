"""Nothing is executed on load, and a file made by a stranger is refused with one kind of error, soon."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import re
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from boovae.config.resolve import read_toml
from boovae.data import readers
from boovae.data.download import ResumingDownloader
from boovae.data.readers import read_idx, read_npz
from boovae.errors import InputError
from boovae.files import read_file
from boovae.runs.reading import read_record
from boovae.runs.run import Run
from boovae.runs.train import load_trainer
from boovae.training.checkpoint import load_checkpoint, save_checkpoint
from conftest import tiny
from hostile_files import bombs
from run_folders import write_csv

# --- nothing is executed --------------------------------------------------------------------------------------------


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_refused_wherever_it_is_put_and_never_opened(finished: Callable[..., Path], tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    np.savez(tmp_path / "trap.npz", images=np.array([Trap(trap)] * 3, dtype=object), labels=np.zeros(3, int))
    torch.save({"weights": Trap(trap)}, tmp_path / "trap.pt")
    for content in (pickle.dumps(Trap(trap)), (tmp_path / "trap.pt").read_bytes()):
        for kind in ("checkpoint/*.safetensors", "checkpoint/*.json", "metrics.jsonl", "config.toml"):
            run = finished()
            for path in run.glob(kind):
                path.write_bytes(content)
            with pytest.raises(InputError):
                load_trainer(run)
        for name in ("data.npz", "data.idx"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(InputError):
                (read_npz if name.endswith("npz") else read_idx)(tmp_path / name)
    with pytest.raises(InputError, match="plain arrays"):
        read_npz(tmp_path / "trap.npz")
    assert not trap.exists()


def test_no_source_file_speaks_of_pickles() -> None:
    words = r"\b(pickle|cPickle|dill|joblib|cloudpickle|shelve|marshal)\b|torch\.save\(|allow_pickle=True"
    words += r"|torch\.load\((?!.*weights_only=True)"  # weights of networks for features exist in no other format
    code = re.compile(rf"^[^#\"']*(?:import .*)?(?:{words})", re.MULTILINE)
    sources = list((Path(__file__).parents[2] / "src").rglob("*.py"))
    found = {path.name: match[0] for path in sources if (match := code.search(path.read_text(encoding="utf-8")))}
    assert len(sources) > 20
    assert {name: line for name, line in found.items() if "allow_pickle=False" not in line} == {}


# --- forged checkpoints ---------------------------------------------------------------------------------------------


def forge(run: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """Change tensors and record of the newest checkpoint, with a checksum that fits; remove the others."""
    newest = max((run / "checkpoint").glob("*.json"), key=lambda path: int(path.stem))
    tensors, record = load(newest.with_suffix(".safetensors").read_bytes()), json.loads(newest.read_bytes())["record"]
    change(tensors, record)
    for path in (run / "checkpoint").iterdir():
        path.unlink()
    save_checkpoint(run / "checkpoint", tensors, record)
    return run


def changed(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(tensors: dict[str, Any], record: dict[str, Any]) -> None:
        (tensors if "/" in name else record)[name] = value

    return change


FORGERIES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = {
    "a missing tensor": (lambda tensors, record: tensors.pop("model/decoder.0.weight"), "decoder.0.weight' is missing"),
    "another shape": (changed("model/decoder.0.weight", torch.zeros(2, 3, 3)), r"'decoder.0.weight' is \(2, 3, 3\)"),
    "another type": (changed("model/decoder.0.bias", torch.zeros(2, 16, dtype=torch.int64)), "torch.int64, not"),
    "one replica too few": (changed("memory/mean", torch.zeros(1, 2, 3, 4)), "memory 'mean' is"),
    "memory of nobody": (changed("memory/secret", torch.zeros(2, 2)), "memory 'secret'"),
    "a million tasks": (changed("sizes", [1] * 1_000_000), "'sizes'"),
    "tasks without images": (changed("sizes", [24, 0]), "'sizes'"),
    "sizes that are text": (changed("sizes", "24"), "'sizes'"),
    "nothing about sizes": (lambda tensors, record: record.pop("sizes"), "lacks 'sizes'"),
    "too many frozen": (changed("frozen", [False] * 3), "'frozen'"),
    "negative steps": (changed("task_steps", -1), "'task_steps'"),
}


@pytest.mark.parametrize("case", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_checkpoint_is_refused(
    case: tuple[Callable[[dict[str, Any], dict[str, Any]], None], str], finished: Callable[..., Path]
) -> None:
    change, message = case
    run = forge(finished(tiny(method="boo", tasks=2)), change)
    with pytest.raises(InputError, match=message):
        load_trainer(run)


@pytest.mark.parametrize("length", [-1, 2.5, None, "x", 10**12])
def test_a_forged_length_of_the_log_is_refused(length: object, finished: Callable[..., Path]) -> None:
    from boovae.runs.extend import extend

    with pytest.raises(InputError, match=r"metrics_length|shorter than the checkpoint says"):
        extend(forge(finished(), changed("metrics_length", length)))


def test_checkpoints_with_huge_or_odd_names_are_not_confused(tmp_path: Path) -> None:
    for name in ("²", "007", "-1", "1e3", "../1"):
        (tmp_path / f"{name.replace('/', '%')}.json").write_text("{}")
    save_checkpoint(tmp_path, {"a": torch.ones(1)}, {"number": 1})
    (tmp_path / "9999999999.json").write_text("{}")
    save_checkpoint(tmp_path, {"a": torch.ones(1)}, {"number": 2})
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded[1] == {"number": 2}


# --- forged logs ----------------------------------------------------------------------------------------------------

ODD_HEADS: list[dict[str, Any]] = [
    {"shape": [10**9, 10**9]},
    {"shape": []},
    {"shape": [8.5, 8]},
    {"shape": "8x8"},
    {"pixel_range": [1, 0]},
    {"pixel_range": [0]},
    {"split": None},
    {"split": {"digest": 3, "binarize": "none"}},
    {"tasks": 3},
    {"seeds": None},
]


@pytest.mark.parametrize("change", ODD_HEADS, ids=str)
def test_a_forged_head_of_the_log_is_refused(change: dict[str, Any], finished: Callable[..., Path]) -> None:
    run = finished()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[0] = json.dumps(json.loads(lines[0]) | change) + "\n"
    (run / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        load_trainer(run)


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"event": "evaluation", "task": 1e9}',
        b'{"event": "evaluation", "task": 0, "seen": 5, "ledger": {"memory_bytes": 1}}',
        b'{"event": "evaluation", "task": 0, "seen": 1, "nll": {"own": 3}, "ledger": {"memory_bytes": 1}}',
        b'{"event": "evaluation", "task": 0, "seen": 1, "ledger": null}',
        b'{"event": "extend", "task": 0, "name": 3}',
        b'{"event": "run"}',
    ],
)
def test_a_broken_line_of_the_log_is_refused_and_a_torn_last_one_passed_over(
    line: bytes, finished: Callable[..., Path]
) -> None:
    run = finished()
    good = (run / "metrics.jsonl").read_bytes()
    first, rest = good.split(b"\n", 1)
    (run / "metrics.jsonl").write_bytes(first + b"\n" + line + b"\n" + rest)
    with Run.open(run) as opened, pytest.raises(InputError, match=r"metrics\.jsonl"):
        opened.events()
    with pytest.raises(InputError):
        write_csv(run, run / "table.csv")
    (run / "metrics.jsonl").write_bytes(good + b'{"event": "epo')
    with Run.open(run) as opened:
        assert len(opened.events("evaluation")) == 2
    assert read_record(run).finished


# --- what never ends ------------------------------------------------------------------------------------------------


def test_pipes_devices_and_huge_files_are_refused_at_once(tmp_path: Path, finished: Callable[..., Path]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    began = time.monotonic()
    for name in ("pipe", "zero", "sparse"):
        with pytest.raises(OSError, match=r"not an ordinary file|larger than"):
            read_file(tmp_path / name, 1000)
        with pytest.raises(InputError, match=r"\(config\)"):
            read_toml(tmp_path / name)
        for kind, reader in (("checkpoint/*.safetensors", load_trainer), ("metrics.jsonl", read_record)):
            run = finished()
            for path in list(run.glob(kind)):
                path.unlink()
                path.symlink_to(tmp_path / name)
            with pytest.raises(InputError):
                reader(run)
    assert time.monotonic() - began < 20


def test_bombs_are_refused_before_they_go_off(tmp_path: Path) -> None:
    for read in bombs(tmp_path).values():
        with pytest.raises(InputError):
            read()


def test_what_unpacks_to_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "data.npz", images=np.zeros((100, 100, 100)), labels=np.zeros(100, int))
    packed = gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, 1_000_000) + bytes(1_000_000))
    (tmp_path / "data.gz").write_bytes(packed)
    assert len(read_idx(tmp_path / "data.gz")) == 1_000_000
    monkeypatch.setattr(readers, "memory_share", lambda: 999_999)
    with pytest.raises(InputError, match="more than half of this machine's memory"):
        read_npz(tmp_path / "data.npz")
    with pytest.raises(InputError, match="more than half of this machine's memory"):
        read_idx(tmp_path / "data.gz")


def test_paths_inside_an_archive_lead_nowhere(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        archive.writestr("../outside.npy", b"x")
        archive.writestr("/tmp/outside.npy", b"x")
    with pytest.raises(InputError, match="no array 'images'"):
        read_npz(tmp_path / "data.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["data.npz"]


def test_a_download_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        headers: dict[str, str] = {}  # noqa: RUF012 - as the real one has it

        def iter_content(self, size: int) -> Any:
            while True:
                yield b"x" * size

    monkeypatch.setattr("boovae.data.download.LARGEST", 100_000)
    downloader = ResumingDownloader(tmp_path / "data.part")
    with pytest.raises(ValueError, match="no dataset is that large"):
        downloader._write(Endless(), 0)
    assert list(tmp_path.iterdir()) == []


def test_the_checksum_is_the_same_as_ever(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"a": torch.ones(2)}, {"b": 1})
    head = json.loads((tmp_path / "0.json").read_bytes())
    content = (tmp_path / "0.safetensors").read_bytes() + json.dumps({"b": 1}).encode()
    assert head["checksum"] == hashlib.blake2b(content).hexdigest()
