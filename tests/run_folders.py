"""Reading run folders in tests, and giving them new tasks to learn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boovae.cli.commands import write_page
from boovae.data import Stream
from boovae.report.matrices import write_csv as csv_of_record
from boovae.runs.reading import read_record
from boovae.training.checkpoint import load_checkpoint
from boovae.training.events import Event

NLL = ("nll",)


def events(folder: Path, *kinds: str) -> list[Event]:
    """Return the log, all of it or some kinds of events."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in lines if not kinds or event["event"] in kinds]


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page about run folders as `boovae report` does; of one run into its folder."""
    return write_page([read_record(folder) for folder in folders], folders, out)


def write_csv(folder: Path, out: Path) -> Path:
    """Write the numbers of a run folder."""
    return csv_of_record(read_record(folder), out)


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return everything the newest checkpoint holds: the model and the memory."""
    loaded = load_checkpoint(folder / "checkpoint")
    assert loaded is not None
    return loaded[0]


def assert_same_model(one: Path, other: Path) -> None:
    expected, found = tensors(one), tensors(other)
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    assert not different, different


def content(folder: Path) -> dict[str, bytes]:
    """Return every byte of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_npz(path: Path, stream: Stream, tasks: list[int], **more: Any) -> str:
    """Write some tasks with their split as a file of their own; return how to name it."""
    chosen = [stream[index] for index in tasks]
    parts = [(getattr(task, split), code) for task in chosen for code, split in enumerate(("train", "valid", "test"))]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        images=np.concatenate([part.images.numpy().reshape(-1, *stream.shape) for part, _ in parts]),
        labels=np.concatenate([part.labels.numpy() for part, _ in parts]),
        split=np.concatenate([np.full(len(part.labels), code) for part, code in parts]),
        **more,
    )
    return f"npz:{path}"
