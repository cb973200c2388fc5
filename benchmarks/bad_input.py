"""Try every bad input of docs/bad-input.md, which says what must happen.

The tests run each one as a separate case, the drill runs all of them in a row.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from boovae.bench.studies import bench
from boovae.cli.arguments import Bench
from boovae.config import Settings
from boovae.data import ImageSpec, Stream, load_stream, read_idx, write_idx
from boovae.errors import BoovaeError, as_flag
from boovae.methods import from_mapping, resolve
from boovae.replicas.devices import choose_device
from boovae.runs.run import Run
from boovae.runs.train import load_trainer, train
from boovae.training.trainer import Trainer

Case = Callable[[Path], object]
PAGE = Path(__file__).parents[1] / "docs" / "bad-input.md"
GOOD = np.random.default_rng(0).random((12, 8, 8), np.float32)
BRIGHT = GOOD.max() <= GOOD


class Expected(NamedTuple):
    """What the page promises: whether the input is refused, and part of the message."""

    refused: bool
    message: str


def documented() -> dict[str, Expected]:
    """Return what the tables of the page promise for each input; the message is in backquotes."""
    rows = re.findall(r"^\| (.+?) \| (refused|taken)(?:: | )?(.*?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    quoted = {name: re.search(r"`([^`]+)`", text) for name, _, text in rows}
    return {name: Expected(how == "refused", found[1] if (found := quoted[name]) else "") for name, how, _ in rows}


def attempt(case: Case, expected: Expected, folder: Path) -> str:
    """Try an input; return how the outcome differs from the expected one, empty if it does not."""
    folder.mkdir(parents=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with np.errstate(over="ignore"):
            case(folder)
        return "it was taken" if expected.refused else ""
    except BoovaeError as error:
        if not expected.refused:
            return f"it was refused: {error}"
        return (
            ""
            if expected.message and expected.message in error.spelled(as_flag)
            else f"it was refused with another message: {error}"
        )
    except Exception as error:
        return f"it crashed: {type(error).__name__}: {error}"
    finally:
        os.chdir(before)


# --- kinds of input --------------------------------------------------------------------------------------


def arrays(*tasks: Any, **options: Any) -> Case:
    """Load arrays, one per task."""
    return lambda folder: Stream.from_tasks(list(tasks), **options)


def npz(**changes: Any) -> Case:
    """Load an NPZ file of good arrays with some of them changed."""

    def case(folder: Path) -> object:
        content: dict[str, Any] = {"images": GOOD, "labels": np.arange(12) % 2, **changes}
        np.savez(folder / "data.npz", **{name: array for name, array in content.items() if array is not None})
        return load_stream(f"npz:{folder / 'data.npz'}")

    return case


def raw_npz(content: Callable[[bytes], bytes]) -> Case:
    """Load a good NPZ file after changing its bytes."""

    def case(folder: Path) -> object:
        buffer = io.BytesIO()
        np.savez(buffer, images=GOOD, labels=np.arange(12) % 2)
        (folder / "data.npz").write_bytes(content(buffer.getvalue()))
        return load_stream(f"npz:{folder / 'data.npz'}")

    return case


def idx(content: Callable[[bytes], bytes] = bytes, sha256: str | None = None) -> Case:
    """Load a good IDX file after changing its bytes."""

    def case(folder: Path) -> object:
        write_idx(folder / "data", (255 * GOOD).astype(np.uint8))
        (folder / "data").write_bytes(content((folder / "data").read_bytes()))
        return read_idx(folder / "data", sha256)

    return case


def folder_with(change: Callable[[Path], object], name: str = "a", **options: Any) -> Case:
    """Load a folder with a class of good pictures after a change."""

    def case(folder: Path) -> object:
        for number in range(5):
            picture(folder / "set" / name / f"{number}.png", value=number)
        change(folder / "set")
        return load_stream(f"folder:{folder / 'set'}", **options)

    return case


def picture(path: Path, size: tuple[int, int] = (8, 8), mode: str = "L", value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def configured(text: str | bytes) -> Case:
    """Read a configuration file."""

    def case(folder: Path) -> object:
        (folder / "run.toml").write_bytes(text.encode() if isinstance(text, str) else text)
        return resolve({}, folder / "run.toml")

    return case


def trained(**changes: Any) -> Case:
    """Train on the embedded digits."""
    return lambda folder: train(resolve({"dataset": "digits", **changes}), load_stream("digits"), folder / "run")


def model(**changes: Any) -> Case:
    """Make a model and its method."""
    return lambda folder: Trainer(resolve({"dataset": "digits", "net": "mlp:4", **changes}), ImageSpec((8, 8)))


def benched(**changes: Any) -> Case:
    """Run a bench on the embedded digits."""
    return lambda folder: bench(Bench(study="paper", quick=True, **changes), "boovae bench")


def _torn_marker(folder: Path) -> object:
    (folder / "runs" / "bench").mkdir(parents=True)
    (folder / "runs" / "bench" / "bench.json").write_text('{"format"')
    return benched()(folder)


def _labelled(labels: Any) -> tuple[Any, Any]:
    return GOOD, labels


def _bomb(content: bytes) -> bytes:
    """Make the directory of the archive claim an impossible unpacked size."""
    place = content.rindex(b"PK\x01\x02") + 24  # the unpacked size of the last member
    return content[:place] + (1 << 31).to_bytes(4, "little") + content[place + 4 :]


def _pickled() -> Any:
    return np.array([{"rows": 1}] * 12, dtype=object)


def _unreadable(folder: Path) -> object:
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with patch.object(Path, "iterdir", side_effect=denied):
        return load_stream(f"folder:{folder}")


def _unwritable(folder: Path) -> object:
    (folder / "file").write_text("in the way")
    return train(resolve({"dataset": "digits"}), load_stream("digits"), folder / "file" / "run")


def _two_runs(folder: Path) -> object:
    settings = Settings()
    with contextlib.closing(Run.create(folder / "run", settings, {})):
        return Run.open(folder / "run")


def _noise(path: Path, length: int) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(length))


def _torn_picture(folder: Path) -> None:
    picture(folder / "a" / "9.png")
    content = (folder / "a" / "9.png").read_bytes()
    (folder / "a" / "9.png").write_bytes(content[: len(content) // 2])


def _loop(folder: Path) -> None:
    (folder / "a" / "9.png").symlink_to(folder / "a" / "9.png")


def _linked(folder: Path) -> None:
    (folder / "b").symlink_to(folder / "a", target_is_directory=True)


def _beyond(pixels: int) -> Case:
    def change(folder: Path) -> None:
        picture(folder / "a" / "9.png", (40, 40))

    def case(folder: Path) -> object:
        with patch.object(Image, "MAX_IMAGE_PIXELS", pixels):
            return folder_with(change)(folder)

    return case


# --- the table ------------------------------------------------------------------------------------------------------

CASES: dict[str, Case] = {
    # arrays: shapes and types
    "one image without the axis of images": arrays(np.zeros(64)),
    "five axes": arrays(np.zeros((5, 2, 2, 2, 3))),
    "two colours": arrays(np.zeros((12, 8, 8, 2))),
    "text instead of numbers": arrays(np.array([["a", "b"]] * 12)),
    "objects instead of numbers": arrays(_pickled()),
    "complex numbers": arrays(GOOD + 1j),
    "a list of images of different sizes": arrays([np.zeros((8, 8)), np.zeros((9, 9))]),
    "tasks whose images differ in size": arrays(GOOD, np.zeros((12, 9, 9))),
    "one array instead of a list of tasks": lambda folder: Stream.from_tasks(GOOD),  # type: ignore[arg-type]
    "a dictionary of tasks": lambda folder: Stream.from_tasks({"a": GOOD}),  # type: ignore[arg-type]
    "booleans": arrays(GOOD > 0.5),
    "half precision": arrays(torch.from_numpy(GOOD).bfloat16()),
    "bytes in one task and floats in another": arrays(GOOD, (255 * GOOD).astype(np.uint8)),
    # arrays: values
    "floats from 0 to 255": arrays(255 * GOOD),
    "integers from 0 to 255 that are not uint8": arrays((255 * GOOD).astype(np.int16)),
    "negative pixels": arrays(GOOD - 0.5),
    "a pixel that is NaN": arrays(np.where(BRIGHT, np.nan, GOOD)),
    "an infinite pixel": arrays(np.where(BRIGHT, np.inf, GOOD)),
    "a pixel too large for float32": arrays(np.where(BRIGHT, 1e300, GOOD.astype(np.float64))),
    "images that are all constant": arrays(np.zeros((12, 8, 8))),
    "the same image again and again": arrays(np.repeat(GOOD[:1], 12, 0)),
    # arrays: emptiness and numbers
    "no tasks": arrays(),
    "a task without images": arrays(GOOD, np.zeros((0, 8, 8))),
    "images without pixels": arrays(np.zeros((12, 0, 8))),
    "a task of two images": arrays(GOOD[:2]),
    # labels, names, arguments
    "fewer labels than images": arrays(_labelled(np.arange(11))),
    "labels that are floats": arrays(_labelled(np.zeros(12))),
    "labels below zero": arrays(_labelled(np.arange(12) - 1)),
    "identifiers as labels": arrays(_labelled(np.arange(12) + 20_240_000)),
    "labels for some tasks only": arrays(_labelled(np.zeros(12, int)), GOOD),
    "a tuple of three": arrays((GOOD, np.zeros(12, int), 1)),
    "two tasks of the same name": arrays(GOOD, GOOD, names=["a", "a"]),
    "a range of pixels upside down": arrays(GOOD, pixel_range=(1.0, 0.0)),
    "binary pixels of another range": arrays(GOOD, pixel_range=(-1.0, 1.0), binarize="threshold"),
    "more than all images held out": arrays(GOOD, test=1.5),
    "a seed below zero": arrays(GOOD, seed=-1),
    # NPZ
    "an NPZ file that is not there": lambda folder: load_stream(f"npz:{folder / 'none.npz'}"),
    "an empty NPZ file": raw_npz(lambda content: b""),
    "a text called .npz": raw_npz(lambda content: b"images, labels\n"),
    "an NPZ file cut short": raw_npz(lambda content: content[: len(content) // 2]),
    "an NPZ file that claims an impossible size": raw_npz(_bomb),
    "an NPZ file without labels": npz(labels=None),
    "an NPZ file whose labels have another name": npz(labels=None, target=np.arange(12) % 2),
    "an NPZ file with pickled objects": npz(images=_pickled()),
    "an NPZ file with an unknown split": npz(split=np.arange(12)),
    "fewer names than classes": npz(class_names=np.array(["a"])),
    "two classes of the same name": npz(class_names=np.array(["a", "a"])),
    "a class of one image": npz(labels=np.array([0] * 11 + [1])),
    # IDX
    "an IDX file cut short": idx(lambda content: content[:-1]),
    "an IDX file with more than it says": idx(lambda content: content + b"more"),
    "an IDX file of floats": idx(lambda content: b"\0\0\x0d\x03" + content[4:]),
    "an IDX header that promises too much": idx(lambda content: content[:4] + b"\xff" * 12 + content[16:]),
    "an IDX file with another checksum": idx(sha256="0" * 64),
    # folders of pictures
    "a folder that is not there": lambda folder: load_stream(f"folder:{folder / 'none'}"),
    "a folder without permission": _unreadable,
    "an empty folder": folder_with(lambda folder: (folder / "b").mkdir()),
    "pictures of different sizes": folder_with(lambda folder: picture(folder / "a" / "9.png", (9, 8))),
    "a picture cut short": folder_with(_torn_picture),
    "noise called .png": folder_with(lambda folder: _noise(folder / "a" / "9.png", 500)),
    "an empty file called .jpg": folder_with(lambda folder: (folder / "a" / "9.jpg").touch()),
    "a size of pictures that no memory holds": folder_with(lambda folder: None, resize=(30_000, 30_000)),
    "a size of pictures for arrays": lambda folder: load_stream("digits", resize=(8, 8)),
    "a picture of 16 bits": folder_with(lambda folder: picture(folder / "a" / "9.png", mode="I;16")),
    "a picture of 32 bits": folder_with(lambda folder: picture(folder / "a" / "9.tif", mode="F")),
    "a picture that moves": folder_with(lambda folder: picture(folder / "a" / "9.gif")),
    "a picture larger than Pillow trusts": _beyond(600),
    "pictures next to sub-folders": folder_with(lambda folder: picture(folder / "9.png")),
    "folders within the folder of a class": folder_with(lambda folder: picture(folder / "a" / "b" / "9.png")),
    "a link that leads nowhere": folder_with(lambda folder: (folder / "a" / "9.png").symlink_to(folder / "none.png")),
    "a link to itself": folder_with(_loop),
    "a pipe called .png": folder_with(lambda folder: os.mkfifo(folder / "a" / "9.png")),
    "a link to another class": folder_with(_linked),
    "grey and colour pictures mixed": folder_with(lambda folder: picture(folder / "a" / "9.png", mode="RGB")),
    "transparent pictures": folder_with(lambda folder: picture(folder / "a" / "9.png", mode="LA")),
    "notes and hidden files among pictures": folder_with(lambda folder: (folder / "a" / ".9.png").touch()),
    "names in any alphabet": folder_with(lambda folder: picture(folder / "ключ 鍵 🗝" / "9.png"), name="ключ 鍵 🗝"),
    "a path with a line break": lambda folder: Settings().changed(dataset="folder:a\nb"),
    # settings
    "a setting that does not exist": configured("epoch = 3\n"),
    "a setting of another type": configured('epochs = "many"\n'),
    "a setting out of range": configured("learning_rate = -1\n"),
    "a number beyond 64 bits": lambda folder: from_mapping({"seed": 2**70}),
    "a configuration that is not TOML": configured("epochs: 3\n"),
    "a configuration that is not text": configured(b"\xff\xfe\x00"),
    "a configuration nested without end": configured("net = " + "[" * 100_000),
    "a configuration that is not there": lambda folder: resolve({}, folder / "none.toml"),
    "an unknown dataset": lambda folder: load_stream("mnits"),
    "a path without `npz:` or `folder:`": lambda folder: load_stream("mine.npz"),
    "an unknown method": model(method="boovea"),
    "methods that exclude each other": model(method="multihead+distill"),
    "an unknown network": model(net="transformer"),
    "an unknown device": lambda folder: choose_device("tpu9"),
    "more tasks than the dataset has": trained(tasks=11),
    "a class that the dataset lacks": lambda folder: load_stream("digits", class_order=[3, 12]),
    "a class named twice": lambda folder: load_stream("digits", class_order=[3, 3]),
    "a limit of no images": lambda folder: load_stream("digits", limit=0),
    # run folders
    "a file where the run folder should be": _unwritable,
    "a folder that holds no run": lambda folder: load_trainer(folder),
    "a run folder in use": _two_runs,
    # a bench
    "a flag of another executor": benched(address="127.0.0.1:6379"),
    "a device that does not exist, for many cells": benched(device="tpu9"),
    "a folder of datasets that is not there": benched(data_dir=Path("none")),
    "own data of a bench that are not there": benched(datasets=("folder:none",)),
    "tables of cells that nobody has run": benched(only_tables=True),
    "a folder of cells whose version cannot be read": _torn_marker,
}
