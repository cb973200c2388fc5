"""Load datasets by name as streams of tasks."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from boovae.config.resolve import packaged_toml
from boovae.config.section import AtLeastOne, WholeNumber, checked
from boovae.config.settings import Resize
from boovae.data.arrays import TEST, TRAIN, VALID, Labelled, random_split
from boovae.data.celeba import find_celeba, read_celeba
from boovae.data.download import DataFile, find_file, get_file
from boovae.data.folders import read_folder
from boovae.data.readers import read_idx, read_npz
from boovae.data.tasks import Stream, build_stream
from boovae.errors import InputError, unknown_name
from boovae.files import write_file


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset: its origin, its content and the files that it needs."""

    name: str
    description: str
    origin: str
    licence: str
    shape: tuple[int, ...]
    class_names: tuple[str, ...]
    files: tuple[DataFile, ...] = ()
    mirrors: tuple[str, ...] = ()
    remedy: str = ""
    pixel_range: tuple[float, float] = (0.0, 1.0)
    embedded: bool = False
    """Whether it comes with a library and needs no files."""

    def where(self, data_dir: str | Path | None = None) -> Path | None:
        """Return the folder that holds the files, or None (also for a dataset that needs no files)."""
        paths = [find_file(self.name, file, data_dir) for file in self.files]
        return paths[0].parent if paths and paths[0] is not None and None not in paths else None

    def is_present(self, data_dir: str | Path | None = None) -> bool:
        """Return whether the dataset can be loaded without a network."""
        return self.embedded or self.where(data_dir) is not None

    def read(self, data_dir: str | Path | None = None) -> list[NDArray[np.uint8]]:
        """Return the content of the files, checked, in the order of ``files``."""
        paths = [get_file(self.name, file, self.mirrors, data_dir, self.remedy) for file in self.files]
        return [read_idx(path, file.sha256) for path, file in zip(paths, self.files, strict=True)]


class FacesInfo(DatasetInfo):
    """CelebA at one size; its files are found by their layout, or prepared as one NumPy file."""

    def where(self, data_dir: str | Path | None = None) -> Path | None:
        """Return the folder that holds the prepared pictures or the official files, or None."""
        found = find_celeba(self.shape[-1], data_dir)
        return found.parent if found is not None and found.is_file() else found


DATASETS: dict[str, DatasetInfo] = {
    name: msgspec.convert({"name": name, **table}, FacesInfo if name.startswith("celeba") else DatasetInfo)
    for name, table in packaged_toml("boovae.data", "datasets.toml").items()
}

#: Names that contain a path; not in ``DATASETS`` because the data are the user's own.
PATH_FORMS = {
    "folder:PATH": "a folder with one sub-folder of pictures per class",
    "npz:PATH": "a NumPy file with images and labels, perhaps split",
}


def load_stream(
    name: str,
    *,
    data_dir: str | Path | None = None,
    seed: int = 0,
    classes_per_task: int | None = 1,
    class_order: Sequence[int] | None = None,
    resize: Resize = None,
    limit: int | None = None,
    binarize: str = "none",
    pixel_range: tuple[float, float] | None = None,
    natural: bool = True,
) -> Stream:
    """Return a dataset as a stream of tasks: each task gets the next ``classes_per_task`` classes.

    Parameters
    ----------
    name : of a dataset in ``DATASETS``, or ``folder:PATH`` or ``npz:PATH``.
    data_dir : folder that holds ``<dataset>/<file>``; by default BOOVAE_DATA, then the cache, then a download.
    seed : decides the split into train, valid and test, and is recorded.
    classes_per_task : number of classes per task; None puts all classes into one task.
    class_order : the classes to use, in order; by default all, in numerical order.
    resize : height and width to which pictures of ``folder:PATH`` are brought, or "auto"; see docs/own-data.md.
    limit : maximum number of images per class and split.
    binarize : "none", "threshold" or "dynamic", see :class:`Stream`.
    pixel_range : range onto which black and white are mapped; by default that of the dataset.
    natural : sort folders and files by the values of numbers in their names; without it as plain text.

    >>> stream = load_stream("digits", classes_per_task=2)
    >>> stream, stream[0].name, stream.split_record["sizes"]
    (Stream('digits': 5 of 5 tasks), '0/1', {'train': 1293, 'valid': 144, 'test': 360})
    """
    seed = checked("seed", seed, WholeNumber)
    source = _read_source(name, data_dir, seed, checked("resize", resize, Resize), natural=natural)
    groups = _class_groups(source, class_order, classes_per_task)
    task_of_class = np.full(len(source.class_names), -1, np.int64)
    for task, group in enumerate(groups):
        task_of_class[list(group)] = task
    task_of = task_of_class[source.labels]
    if limit is not None:
        limit = checked("limit", limit, AtLeastOne)
        task_of[~_within_limit(source, limit, seed)] = -1
    if pixel_range is None:
        pixel_range = DATASETS[name].pixel_range if name in DATASETS else (0.0, 1.0)
    return build_stream(
        source._replace(images=_stretched(source.images, pixel_range)),
        task_of,
        ["/".join(source.class_names[label] for label in group) for group in groups],
        name=name,
        pixel_range=pixel_range,
        binarize=binarize,
        seed=seed,
        extra={"limit": limit} | ({"note": source.note} if source.note else {}),
    )


def pack_dataset(name: str, out: Path | None = None, data_dir: str | Path | None = None, seed: int = 0) -> Path:
    """Write a dataset as one NumPy file that ``npz:PATH`` reads: images, labels, split and class names.

    The file of faces, placed where CelebA is searched for, replaces the pictures that it was made from.
    """
    source = _read_source(name, data_dir, seed)
    sides = "x".join(map(str, dict.fromkeys(source.images.shape[-2:])))
    default = f"celeba_{sides}.npz" if name.startswith("celeba") else f"{name.replace(':', '-').replace('/', '-')}.npz"
    path = Path(default) if out is None else out.with_suffix(".npz")
    content = io.BytesIO()
    np.savez_compressed(
        content,
        images=source.images,
        labels=source.labels.astype(np.uint16),
        split=np.asarray(source.split, np.uint8),
        class_names=np.array(source.class_names),
    )
    write_file(path, content.getvalue())
    return path


def _stretched(images: NDArray[Any], pixel_range: tuple[float, float]) -> NDArray[Any]:
    """Map grey values in [0, 1] onto the range; uint8 is mapped later, when it is converted to floats."""
    if images.dtype == np.uint8 or pixel_range == (0.0, 1.0):
        return images
    low, high = pixel_range
    return low + (high - low) * images


def _read_source(
    name: str, data_dir: str | Path | None, seed: int, resize: Resize = None, *, natural: bool = True
) -> Labelled:
    form, _, path = str(name).partition(":")
    if form == "folder" and path:
        return _split_by_class(read_folder(Path(path).expanduser(), resize, natural=natural), seed)
    if resize is not None:
        raise InputError(f"{{resize}} is for pictures in folder:PATH, and {{dataset}} is {name}; leave it out")
    if form == "npz" and path:
        return _split_by_class(read_npz(Path(path).expanduser()), seed)
    if name not in DATASETS:
        raise unknown_dataset(str(name))
    return _SOURCES[name](DATASETS[name], data_dir, seed)


def unknown_dataset(name: str, argument: str = "dataset") -> InputError:
    """Return the error for an unknown dataset; for a path it explains how to write one."""
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".npz":
        return InputError(f"{argument} is {name}; a path needs its kind: {'folder' if path.is_dir() else 'npz'}:{name}")
    return unknown_name(argument, name, [*DATASETS, *PATH_FORMS])


def _digits(info: DatasetInfo, data_dir: str | Path | None, seed: int) -> Labelled:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = (bunch.images / 16).astype(np.float32), bunch.target.astype(np.int64)
    split = random_split(len(images), (seed,), info.name, test=0.2, valid=0.1)
    return Labelled(images, labels, split, info.class_names, "random: a fifth is test, a tenth of the rest is valid")


def _mnist(info: DatasetInfo, data_dir: str | Path | None, seed: int) -> Labelled:
    train_images, train_labels, test_images, test_labels = info.read(data_dir)
    train = random_split(len(train_labels), (seed,), info.name, test=0, valid=10_000)
    split = np.concatenate([train, np.full(len(test_labels), TEST)])
    labels = np.concatenate([train_labels, test_labels]).astype(np.int64)
    how = "canonical test set; 10,000 random images of the train set are valid"
    return Labelled(np.concatenate([train_images, test_images]), labels, split, info.class_names, how)


def _notmnist(info: DatasetInfo, data_dir: str | Path | None, seed: int) -> Labelled:
    images, labels = info.read(data_dir)
    split = random_split(len(labels), (seed,), info.name, test=0.1, valid=0.1)
    how = "random: a tenth is test, a tenth of the rest is valid"
    return Labelled(images, labels.astype(np.int64), split, info.class_names, how)


def _celeba(info: DatasetInfo, data_dir: str | Path | None, seed: int) -> Labelled:
    return read_celeba(info.shape[-1], data_dir)


def _split_by_class(data: Labelled, seed: int) -> Labelled:
    """Return the data with its own split; a missing part is drawn from the training images of each class."""
    split = np.full(len(data.labels), TRAIN) if data.split is None else data.split.copy()
    lacking: dict[str, Any] = {key: None for key, code in (("valid", VALID), ("test", TEST)) if code not in split}
    if lacking:
        for label in np.unique(data.labels):
            own = np.flatnonzero((data.labels == label) & (split == TRAIN))
            shares = {"valid": 0, "test": 0} | lacking
            split[own] = random_split(len(own), (seed, int(label)), f"class '{data.class_names[label]}'", **shares)
    drawn = " and ".join(f"a random tenth is {key}" for key in reversed(lacking))
    return data._replace(split=split, how=f"per class, {drawn}" if drawn else "as given")


_SOURCES: dict[str, Callable[[DatasetInfo, str | Path | None, int], Labelled]] = {
    "digits": _digits,
    "mnist": _mnist,
    "fashion_mnist": _mnist,
    "notmnist": _notmnist,
    "celeba": _celeba,
    "celeba64": _celeba,
}


def _class_groups(source: Labelled, class_order: Sequence[int] | None, size: int | None) -> list[tuple[int, ...]]:
    present = [int(label) for label in np.unique(source.labels)]
    order = present if class_order is None else list(class_order)
    size = len(order) if size is None else checked("classes_per_task", size, AtLeastOne)
    unknown = [label for label in order if label not in present]
    if unknown or not order:
        known = ", ".join(map(str, present))
        raise InputError(f"class_order: {f'unknown class {unknown[0]!r}' if unknown else 'is empty'}; known: {known}")
    twice = [label for label in order if order.count(label) > 1]
    if twice:
        raise InputError(f"class_order: class {twice[0]} occurs more than once; name each class once")
    return [tuple(int(label) for label in order[i : i + size]) for i in range(0, len(order), size)]


def _within_limit(source: Labelled, limit: int, seed: int) -> NDArray[np.bool_]:
    """Mark ``limit`` random images of each class and split; a smaller limit marks a subset of them."""
    kept = np.zeros(len(source.labels), np.bool_)
    for label in np.unique(source.labels):
        for code in (TRAIN, VALID, TEST):
            rows = np.flatnonzero((source.labels == label) & (source.split == code))
            order = np.random.default_rng([seed, int(label), code]).permutation(len(rows))
            kept[rows[order[:limit]]] = True
    return kept
