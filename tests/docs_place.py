"""A folder in which the commands of the documentation run: the files that its pages speak of, each very small."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from boovae.cli.main import main
from boovae.config import CORE_NAMES
from boovae.data import DATASETS, DataFile, DatasetInfo, write_idx
from boovae.errors import as_flag
from boovae.methods import REGISTRY
from faces import four_colours, write_celeba

Bytes = NDArray[np.uint8]

#: What makes a run take a moment; the command stays what the page says otherwise.
BUDGET = {
    "epochs": 1,
    "limit": 12,
    "samples": 4,
    "generated": 20,
    "batch_size": 8,
    "boo_steps": 2,
    "distill_latents": 8,
}
#: Validation images that MNIST's split takes away; the files below have as many more.
HELD_OUT = 10_000


def small(method: str) -> list[str]:
    """Return the flags that make a run of a method take a moment."""
    read = CORE_NAMES | {item.name for kind in REGISTRY.sections(method) for item in dataclasses.fields(kind)}
    return [word for name, value in BUDGET.items() if name in read for word in (as_flag(name), str(value))]


def digits(*classes: int, count: int = 30) -> tuple[Bytes, NDArray[np.int64]]:
    """Return as many real digits of 8 x 8 pixels of each class, class by class, and their classes from 0."""
    found = load_digits()
    rows = np.concatenate([np.flatnonzero(found.target == digit)[:count] for digit in classes])
    images = (found.images[rows] / 16 * 255).astype(np.uint8)
    return images, np.unique(found.target[rows], return_inverse=True)[1].astype(np.int64)


def make_place(folder: Path) -> Path:
    """Fill a folder with the arrays, pictures and run folders that the pages take for granted."""
    folder.mkdir()
    for name, classes in (("january", (0, 1, 2)), ("february", (3,)), ("new", (4,)), ("mine", (0, 1, 2))):
        images, labels = digits(*classes)
        np.savez(folder / f"{name}.npz", images=images, labels=labels)
    images, labels = digits(0, 1, count=120)
    np.savez(folder / "stream.npz", images=images, labels=labels)
    for name in ("pictures", "my_pictures", "march"):
        _write_pictures(folder / name)
    for name, method, tasks in (("RUN", "boo+distill", 4), ("boo", "boo", 2), ("ewc", "ewc", 2), ("joint", "joint", 2)):
        flags = ["--tasks", str(tasks), *small(method), "--metric", "nll", "--quiet"]
        main(["train", "--method", method, *flags, "--out", str(folder / name)])
    return folder


def _write_pictures(folder: Path) -> None:
    images, labels = digits(5, 6, count=12)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / "ab"[label] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def make_data(folder: Path) -> dict[str, DatasetInfo]:
    """Lay out datasets as the real ones lie, made of enlarged digits and drawn faces; return what is known of them."""
    write_celeba(folder, four_colours(train=12, held_out=4))
    images, labels = digits(*range(10), count=100)
    enlarged = np.pad(np.kron(images, np.ones((3, 3), np.uint8)), ((0, 0), (2, 2), (2, 2)))
    train = np.resize(np.arange(len(labels)), HELD_OUT + len(labels))  # round and round
    arrays: dict[str, tuple[Any, ...]] = {
        "mnist": (enlarged[train], labels[train], enlarged, labels),
        "fashion_mnist": (enlarged[train], labels[train], enlarged, labels),
        "notmnist": (enlarged, labels),
    }
    return {name: _written(folder, DATASETS[name], content) for name, content in arrays.items()}


def _written(folder: Path, info: DatasetInfo, arrays: tuple[Any, ...]) -> DatasetInfo:
    (folder / info.name).mkdir()
    files = []
    for file, array in zip(info.files, arrays, strict=True):
        path = folder / info.name / file.name.removesuffix(".gz")
        write_idx(path, array.astype(np.uint8))
        files.append(DataFile(file.name, hashlib.sha256(path.read_bytes()).hexdigest()))
    return dataclasses.replace(info, files=tuple(files))
