"""Files: what is written is read back, what is broken is refused and named."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from boovae.data import read_idx, read_npz, write_idx
from boovae.errors import InputError

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
byte_arrays = hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, max_side=6))


@few
@given(array=byte_arrays, suffix=st.sampled_from(["", ".gz"]))
def test_idx_round_trip(tmp_path: Path, array: NDArray[np.uint8], suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    write_idx(path, array)
    np.testing.assert_array_equal(read_idx(path), array)


@few
@given(array=byte_arrays, suffix=st.sampled_from(["", ".gz"]), data=st.data())
def test_idx_cut_at_any_byte_is_refused(
    tmp_path: Path, array: NDArray[np.uint8], suffix: str, data: st.DataObject
) -> None:
    path = tmp_path / f"file{suffix}"
    write_idx(path, array)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(InputError, match=path.name):
        read_idx(path)


def test_idx_with_more_than_its_header_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, 4) + bytes(10_000_000)))
    with pytest.raises(InputError, match="promises 4 bytes, there are more"):
        read_idx(path)


def test_idx_header_that_promises_too_much_is_refused_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(struct.pack(">BBBBIII", 0, 0, 8, 3, *[2**32 - 1] * 3) + bytes(100))
    with pytest.raises(InputError, match="too short for its header"):
        read_idx(path)


@pytest.mark.parametrize("content", [b"hello, world", struct.pack(">BBBBIf", 0, 0, 0x0D, 1, 1, 1.0)])
def test_idx_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError, match="IDX"):
        read_idx(path)


def test_checksum_is_that_of_the_unpacked_content(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    write_idx(tmp_path / "plain", array)
    expected = hashlib.sha256((tmp_path / "plain").read_bytes()).hexdigest()
    for level in (1, 9):  # packed anew is as good
        (tmp_path / "packed.gz").write_bytes(gzip.compress((tmp_path / "plain").read_bytes(), level))
        np.testing.assert_array_equal(read_idx(tmp_path / "packed.gz", expected), array)
    write_idx(tmp_path / "other.gz", array + 1)
    with pytest.raises(InputError) as refused:
        read_idx(tmp_path / "other.gz", expected)
    write_idx(tmp_path / "other", array + 1)
    found = hashlib.sha256((tmp_path / "other").read_bytes()).hexdigest()
    assert all(part in str(refused.value) for part in ("other.gz", expected, found))


@few
@given(
    images=hnp.arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))),
    keys=st.sampled_from([("images", "labels"), ("x", "y")]),
    packed=st.booleans(),
    data=st.data(),
)
def test_npz_round_trip_and_cut(
    tmp_path: Path, images: NDArray[np.uint8], keys: tuple[str, str], packed: bool, data: st.DataObject
) -> None:
    path = tmp_path / "data.npz"
    labels = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(images), max_size=len(images))))
    save = np.savez_compressed if packed else np.savez
    save(path, **{keys[0]: images, keys[1]: labels})  # type: ignore[arg-type]
    read = read_npz(path)
    np.testing.assert_array_equal(read.images, images)
    np.testing.assert_array_equal(read.labels, labels)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(InputError, match=r"data\.npz"):
        read_npz(path)


X, Y = np.zeros((6, 4), np.uint8), np.arange(6) % 2


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": X, "target": Y}, "no array 'labels' or 'y', found images, target; save it under that name"),
        ({"labels": Y}, "no array 'images' or 'x', found labels"),
        ({"x": X, "y": Y[:5]}, "6 images need labels"),
        ({"x": X, "y": Y.astype(float)}, "labels must be integers"),
        ({"x": X, "y": Y - 1}, "found -1..0"),
        ({"x": X + 7.0, "y": Y}, r"pixels in \[7, 7\].*rescale them"),
        ({"x": X + 200.0, "y": Y}, r"pixels in \[200, 200\].*divide by 255"),
        ({"x": np.full((6, 4), np.nan), "y": Y}, "NaN"),
        ({"x": X, "y": Y, "split": Y + 2}, "train, valid, test; found 3"),
        ({"x": X, "y": Y, "class_names": np.array(["only"])}, "1 names"),
        ({"x": np.array([{}] * 6), "y": Y}, "plain arrays"),
        ({"x": X[:0], "y": Y[:0]}, "no pixels"),
    ],
)
def test_npz_with_wrong_content_is_refused(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        read_npz(path)


def test_images_alone_are_one_class(tmp_path: Path) -> None:
    np.savez(tmp_path / "alone.npz", images=X)
    read = read_npz(tmp_path / "alone.npz")
    assert read.labels.tolist() == [0] * 6
    assert read.class_names == ("alone",)  # not "0", which would be one with the first class of a run that it extends


def test_npz_that_is_missing_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_npz(tmp_path / "none.npz")
    np.save(tmp_path / "single.npy", X)
    with pytest.raises(InputError, match=r"single\.npy"):
        read_npz(tmp_path / "single.npy")
