"""Streams: every image in one split of one task, seeds that decide, and errors before any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from boovae.data import DATASETS, Split, Stream, Task, load_stream
from boovae.errors import InputError

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def splits(task: Task) -> tuple[Split, Split, Split]:
    return task.train, task.valid, task.test


def marks(task: Task) -> list[list[int]]:
    """Return what ``marked`` wrote into the images of each split, to tell them apart."""
    return [[round(float(row @ torch.tensor([65280.0, 255.0]))) for row in split.images] for split in splits(task)]


def marked(count: int, start: int = 0) -> NDArray[np.uint8]:
    numbers = np.arange(start, start + count)
    return np.stack([numbers // 256, numbers % 256], 1).astype(np.uint8)


def save_npz(folder: Path, labels: NDArray[Any], **more: NDArray[Any]) -> str:
    np.savez(folder / "data.npz", images=marked(len(labels)), labels=labels, **more)  # type: ignore[arg-type]
    return f"npz:{folder / 'data.npz'}"


@few
@given(
    counts=st.dictionaries(st.integers(0, 12), st.integers(3, 30), min_size=1, max_size=5),
    size=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_every_image_is_in_one_split_of_the_task_of_its_class(
    tmp_path: Path, counts: dict[int, int], size: int, seed: int, data: st.DataObject
) -> None:
    labels = np.array(data.draw(st.permutations(np.repeat(list(counts), list(counts.values())).tolist())))
    order = data.draw(st.permutations(list(counts)))[: data.draw(st.integers(1, len(counts)))]
    stream = load_stream(save_npz(tmp_path, labels), seed=seed, classes_per_task=size, class_order=order)
    assert [task.classes for task in stream] == [tuple(sorted(order[i : i + size])) for i in range(0, len(order), size)]
    found = [mark for task in stream for part in marks(task) for mark in part]
    assert sorted(found) == np.flatnonzero(np.isin(labels, order)).tolist()
    for task in stream:
        for split, part in zip(splits(task), marks(task), strict=True):
            assert split.labels.tolist() == labels[part].tolist()
            assert len(part) > 0


@few
@given(counts=st.lists(st.integers(3, 40), min_size=1, max_size=4), seed=st.integers(0, 100))
def test_arrays_are_split_without_loss(counts: list[int], seed: int) -> None:
    starts = np.cumsum([0, *counts])
    arrays = [marked(count, start) for count, start in zip(counts, starts, strict=False)]
    for index, task in enumerate(Stream.from_tasks(arrays, seed=seed)):
        found = sorted(mark for part in marks(task) for mark in part)
        assert found == list(range(starts[index], starts[index + 1]))
        assert all(set(split.labels.tolist()) == {index} for split in splits(task))


def test_a_slice_keeps_digest_names_and_the_full_stream() -> None:
    stream = load_stream("digits")
    part = stream[2:7][1:3]
    assert [task.name for task in part] == ["3", "4"]
    assert (part.digest, part.class_names, part.shape) == (stream.digest, stream.class_names, (8, 8))
    assert part.full is stream.full is stream
    assert stream[-1].name == "9"
    with pytest.raises(IndexError):
        stream[10]


def test_digits_have_the_promised_split_and_pixels() -> None:
    stream = load_stream("digits")
    assert stream.split_record["sizes"] == {"train": 1293, "valid": 144, "test": 360}
    assert json.loads(json.dumps(stream.split_record)) == stream.split_record
    assert sum(task["train"] for task in stream.split_record["tasks"]) == 1293
    images = torch.cat([split.images for task in stream for split in splits(task)])
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert torch.equal(images * 16, (images * 16).round())


def test_the_seed_decides_the_split() -> None:
    first, again, other = (load_stream("digits", seed=seed) for seed in (0, 0, 1))
    assert first.digest == again.digest != other.digest
    assert torch.equal(first[4].valid.images, again[4].valid.images)
    assert not torch.equal(first[4].test.images[:10], other[4].test.images[:10])


def test_digest_changes_with_the_content_but_not_with_order_or_grouping(tmp_path: Path) -> None:
    labels = np.arange(40) % 4
    name = save_npz(tmp_path, labels)
    stream = load_stream(name)
    assert load_stream(name, class_order=[3, 1, 0, 2], classes_per_task=2).digest == stream.digest
    assert load_stream(name, binarize="threshold").digest != stream.digest
    assert load_stream(name, class_order=[0, 1]).digest != stream.digest
    (tmp_path / "other").mkdir()
    assert load_stream(save_npz(tmp_path / "other", labels[::-1])).digest != stream.digest


def test_the_split_of_a_class_does_not_depend_on_the_other_classes(tmp_path: Path) -> None:
    name = save_npz(tmp_path, np.arange(60) % 3)
    assert marks(load_stream(name)[2]) == marks(load_stream(name, class_order=[2])[0])


def test_groups_are_named_after_their_classes() -> None:
    stream = load_stream("digits", classes_per_task=4, class_order=[7, 1, 3, 0, 2, 9])
    assert [task.name for task in stream] == ["7/1/3/0", "2/9"]
    assert stream[1].classes == (2, 9)


def test_npz_keeps_its_own_split_and_draws_only_what_is_lacking(tmp_path: Path) -> None:
    split = np.arange(60) // 2 % 3
    stream = load_stream(save_npz(tmp_path, np.arange(60) % 2, split=split))
    assert [sorted(part) for part in marks(stream[0])] == [
        np.flatnonzero((np.arange(60) % 2 == 0) & (split == code)).tolist() for code in range(3)
    ]
    assert stream.split_record["how"] == "as given"
    given_test = np.where(split == 1, 0, split)
    train, valid, test = marks(load_stream(save_npz(tmp_path, np.arange(60) % 2, split=given_test))[0])
    assert test == np.flatnonzero((np.arange(60) % 2 == 0) & (split == 2)).tolist()
    assert (len(train), len(valid)) == (18, 2)


def test_limit_takes_that_many_per_class_and_split() -> None:
    small, larger = (load_stream("digits", classes_per_task=2, limit=limit) for limit in (3, 5))
    for task in small:
        for split in splits(task):
            assert sorted(split.labels.tolist()) == [task.classes[0]] * 3 + [task.classes[1]] * 3
    small_rows, larger_rows = ({tuple(row.tolist()) for row in s[0].test.images} for s in (small, larger))
    assert small_rows < larger_rows
    assert small.digest != larger.digest


def test_threshold_makes_all_pixels_black_or_white() -> None:
    grey, hard = load_stream("digits"), load_stream("digits", binarize="threshold")
    for soft, sharp in zip(splits(grey[3]), splits(hard[3]), strict=True):
        assert torch.equal(sharp.images, (soft.images > 0.5).float())


def test_dynamic_draws_valid_and_test_once_and_leaves_train_grey() -> None:
    grey, drawn, again = (load_stream("digits", binarize=kind) for kind in ("none", "dynamic", "dynamic"))
    assert drawn.binarize == "dynamic"
    assert torch.equal(drawn[0].train.images, grey[0].train.images)
    for name in ("valid", "test"):
        soft, sharp, same = (getattr(stream[0], name).images for stream in (grey, drawn, again))
        assert torch.equal(sharp, same)
        assert set(sharp.flatten().tolist()) == {0, 1}
        assert torch.equal(sharp[(soft == 0) | (soft == 1)], soft[(soft == 0) | (soft == 1)])
        assert abs(float(sharp.mean() - soft.mean())) < 0.03
    assert not torch.equal(drawn[0].test.images[:5], (grey[0].test.images[:5] > 0.5).float())


@pytest.mark.parametrize(
    ("images", "shape"),
    [
        (np.zeros((5, 6)), (6,)),
        (torch.zeros(5, 4, 4), (4, 4)),
        (np.zeros((5, 4, 6, 3), np.uint8), (3, 4, 6)),
        (torch.zeros(5, 3, 4, 6), (3, 4, 6)),
        (np.zeros((5, 4, 6, 1)), (4, 6)),
        (np.zeros((5, 4, 4), bool), (4, 4)),
        (torch.zeros(5, 4, dtype=torch.bfloat16), (4,)),
    ],
)
def test_arrays_of_many_forms_are_taken(images: Any, shape: tuple[int, ...]) -> None:
    stream = Stream.from_tasks([images])
    assert stream.shape == shape
    assert stream[0].train.images.shape == (3, np.prod(shape))
    assert stream[0].train.images.dtype == torch.float32


def test_colour_is_stored_channels_first() -> None:
    images = np.random.default_rng(0).random((1, 4, 5, 3), np.float32)
    stream = Stream.from_tasks([images], valid=[images], test=[images])
    stored = stream[0].test.images.reshape(3, 4, 5)
    np.testing.assert_array_equal(stored, images[0].transpose(2, 0, 1))


def test_flat_images_get_the_shape_that_is_asked_for() -> None:
    assert Stream.from_tasks([np.zeros((5, 12))], shape=(3, 2, 2)).shape == (3, 2, 2)
    with pytest.raises(InputError, match=r"shape \(5, 5\) does not fit"):
        Stream.from_tasks([np.zeros((5, 12))], shape=(5, 5))


def test_bytes_and_floats_in_one_stream_are_on_one_scale() -> None:
    stream = Stream.from_tasks([np.full((4, 2), 255, np.uint8), np.ones((4, 2))], pixel_range=(-1, 1))
    assert {float(task.train.images.max()) for task in stream} == {1.0}
    assert float(Stream.from_tasks([np.zeros((4, 2), np.uint8)], pixel_range=(-1, 1))[0].train.images.min()) == -1


def test_given_splits_are_used_as_they_are() -> None:
    parts = [marked(3), marked(2, 3), marked(1, 5)]
    labels = [np.array([1, 0, 4]), np.array([0, 0]), np.array([4])]
    train, valid, test = ([(images, label)] for images, label in zip(parts, labels, strict=True))
    task = Stream.from_tasks(train, valid=valid, test=test, names=["only"])[0]
    assert marks(task) == [[0, 1, 2], [3, 4], [5]]
    assert (task.name, task.classes, task.train.labels.tolist()) == ("only", (0, 1, 4), [1, 0, 4])


def test_shares_and_numbers_of_held_out_images() -> None:
    task = Stream.from_tasks([np.zeros((20, 2))], test=0.25, valid=4)[0]
    assert [len(split.labels) for split in splits(task)] == [11, 4, 5]


def test_the_stream_does_not_share_memory_with_the_arrays() -> None:
    images = np.zeros((6, 2), np.float32)
    stream = Stream.from_tasks([images], valid=[images], test=[images])
    images[:] = np.nan
    assert torch.isfinite(stream[0].train.images).all()


ok = np.zeros((6, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": []}, "tasks: no tasks"),
        ({"tasks": np.zeros((3, 6, 4))}, "one entry per task"),
        ({"tasks": [ok, ok[:0]]}, r"tasks\[1\]: no pixels"),
        ({"tasks": [ok, ok[:1]]}, r"tasks\[1\] \('1'\): too few images.*at least 3"),
        ({"tasks": [ok[:2]]}, "so at least 3"),
        ({"tasks": [ok], "valid": 6}, "6 valid"),
        ({"tasks": [ok], "valid": -1}, "valid=-1"),
        ({"tasks": [ok], "test": 1.5}, "test=1.5"),
        ({"tasks": [ok, ok], "test": [ok]}, "test: 1 entries for 2 tasks"),
        ({"tasks": [(ok, np.zeros(5, int))]}, r"tasks\[0\] labels: 6 images need labels"),
        ({"tasks": [(ok, np.zeros((6, 2), int))]}, r"found \(6, 2\)"),
        ({"tasks": [(ok, np.zeros(6, int)), ok]}, r"tasks\[1\]: pass labels for all"),
        ({"tasks": [(ok, ok, ok)]}, "3 entries"),
        ({"tasks": [(ok, np.full(6, 10**6))]}, "number the classes from 0"),
        ({"tasks": [np.where(np.eye(6) > 0, np.nan, 0)]}, "NaN or infinite pixels, first in image 0"),
        ({"tasks": [ok, ok + np.inf]}, r"tasks\[1\]: NaN or infinite"),
        ({"tasks": [ok + 200]}, r"pixels in \[200, 200\], outside pixel_range \[0, 1\]; divide by 255"),
        ({"tasks": [ok - 0.5]}, "rescale them"),
        ({"tasks": [ok, np.zeros((6, 5))]}, r"tasks\[1\]: images of shape \(5,\)"),
        ({"tasks": [[[0.0, 1.0], [0.0]]]}, r"tasks\[0\]: images of different sizes"),
        ({"tasks": [["a", "b"]]}, "must be numbers"),
        ({"tasks": [np.zeros(7)]}, "pass a single image"),
        ({"tasks": [np.zeros((4, 5, 5, 7))]}, "1 or 3 colours"),
        ({"tasks": [ok], "names": ["a", "b"]}, "names: 1 tasks"),
        ({"tasks": [ok, ok], "names": ["a", "a"]}, "different names"),
        ({"tasks": [(ok, np.full(6, 2))], "class_names": ["a"]}, "class_names: 1 names"),
        ({"tasks": [ok], "pixel_range": (1, 0)}, "pixel_range"),
        ({"tasks": [ok], "pixel_range": 1}, "pixel_range"),
        ({"tasks": [ok], "seed": -1}, "seed is -1"),
        ({"tasks": [ok], "binarize": "dynamc"}, "did you mean 'dynamic'"),
        ({"tasks": [ok], "binarize": "dynamic", "pixel_range": (-1, 1)}, "needs pixel_range"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Stream.from_tasks(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "digist"}, "did you mean 'digits'"),
        ({"name": "npz:"}, "unknown dataset"),
        ({"name": "digits", "class_order": [1, 2, 1]}, "class 1 occurs more than once"),
        ({"name": "digits", "class_order": [3, 10]}, "unknown class 10; known: 0, 1"),
        ({"name": "digits", "class_order": []}, "is empty"),
        ({"name": "digits", "classes_per_task": 0}, "classes_per_task is 0"),
        ({"name": "digits", "limit": 0}, "limit is 0"),
        ({"name": "digits", "limit": 2.5}, "limit is 2.5"),
        ({"name": "digits", "seed": -3}, "seed is -3"),
        ({"name": "digits", "binarize": "yes"}, "unknown binarize"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_stream(**arguments)


def test_a_class_with_too_few_images_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"class '1': too few images.*at least 1 image in train, valid and test"):
        load_stream(save_npz(tmp_path, np.array([0, 0, 0, 1, 1])))
    with pytest.raises(InputError, match="task '1' has no test image"):
        load_stream(save_npz(tmp_path, np.array([0, 0, 0, 1, 1]), split=np.array([0, 1, 2, 0, 1])))


REAL = {
    "mnist": ([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], (50000, 10000, 10000)),
    "fashion_mnist": ([6000] * 10, (50000, 10000, 10000)),
    "notmnist": ([1872, 1873, 1873, 1873, 1873, 1872, 1872, 1872, 1872, 1872], (15165, 1686, 1873)),
}


@pytest.mark.parametrize("name", REAL)
def test_real_data_has_the_published_counts(name: str) -> None:
    beside = Path(__file__).parents[3] / "shared" / "data"
    folder = None if DATASETS[name].is_present() else beside
    if not DATASETS[name].is_present(folder):
        pytest.skip(f"{name} is not on this disk")
    counts, sizes = REAL[name]
    stream = load_stream(name, data_dir=folder)
    assert tuple(stream.split_record["sizes"].values()) == sizes
    canonical = 2 if name != "notmnist" else 3  # published counts are of train and valid, or of all
    assert [sum(len(split.labels) for split in splits(task)[:canonical]) for task in stream] == counts
    assert load_stream(name, data_dir=folder, limit=20).digest == load_stream(name, data_dir=folder, limit=20).digest
    other = load_stream(name, data_dir=folder, seed=1)
    assert other.digest != stream.digest
    if canonical == 2:
        assert all(torch.equal(a.test.images, b.test.images) for a, b in zip(stream, other, strict=True))
