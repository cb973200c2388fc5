from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from boovae.errors import InputError, RunError
from boovae.files import write_file
from boovae.training.checkpoint import FORMAT, load_checkpoint, save_checkpoint

RECORD: dict[str, Any] = {"sizes": [10, 20], "frozen": [False, True], "epoch": 7, "text": "Prüfung ü", "none": None}


def tensors_of(value: float) -> dict[str, Tensor]:
    return {
        "model/weight": torch.full((2, 3), value),
        "double": torch.tensor([value], dtype=torch.float64),
        "whole": torch.arange(5),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "scalar": torch.tensor(value),
        "empty": torch.zeros(0, 4),
        "turned": torch.arange(6.0).view(2, 3).T,
        "special": torch.tensor([float("inf"), float("nan"), -0.0]),
    }


def save_series(folder: Path, count: int) -> None:
    for number in range(count):
        save_checkpoint(folder, tensors_of(number), {"number": number})


def newest(folder: Path, suffix: str) -> Path:
    return max(folder.glob(f"*.{suffix}"), key=lambda path: int(path.stem))


def no_space(descriptor: int) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- round trip -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "new" / "folder", tensors_of(0.1), RECORD)
    loaded = load_checkpoint(tmp_path / "new" / "folder")
    assert loaded is not None
    tensors, record = loaded
    assert record == RECORD
    assert tensors.keys() == tensors_of(0.1).keys()
    for name, tensor in tensors_of(0.1).items():
        assert tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_loaded_tensors_can_be_trained_on(tmp_path: Path) -> None:
    save_series(tmp_path, 1)
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    loaded[0]["model/weight"].add_(1)
    again = load_checkpoint(tmp_path)
    assert again is not None
    assert again[0]["model/weight"].sum().item() == 0


def test_there_is_none_before_the_first(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    assert load_checkpoint(tmp_path / "missing") is None


def test_the_newest_is_loaded_and_the_last_two_are_kept(tmp_path: Path) -> None:
    save_series(tmp_path, 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "10.json",
        "10.safetensors",
        "11.json",
        "11.safetensors",
    ]
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded[1] == {"number": 11}
    assert loaded[0]["scalar"].item() == 11


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "1.5.json").write_text("{}")
    save_series(tmp_path, 4)
    assert (tmp_path / "notes.json").read_text() == (tmp_path / "1.5.json").read_text() == "{}"
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded[1] == {"number": 3}


def test_nothing_is_pickled(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tensors_of(1.0), RECORD)
    content = newest(tmp_path, "safetensors").read_bytes()
    # The safetensors format: eight bytes with the length of a JSON header, the header, the numbers.
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert header["model/weight"]["dtype"] == "F32"
    assert header["model/weight"]["shape"] == [2, 3]
    head = json.loads(newest(tmp_path, "json").read_text(encoding="utf-8"))
    assert head["format"] == FORMAT
    assert head["record"] == RECORD


# --- damage ---------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def flip_middle_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


def passed_over(folder: Path, suffix: str, damage: Callable[[Path], None]) -> str:
    """Damage a file of the newest of three checkpoints; the one before it is loaded, with the warning returned."""
    save_series(folder, 3)
    damage(newest(folder, suffix))
    warnings: list[str] = []
    loaded = load_checkpoint(folder, warnings.append)
    assert loaded is not None
    assert loaded[1] == {"number": 1}
    assert loaded[0]["scalar"].item() == 1
    (warning,) = warnings
    return warning


@pytest.mark.parametrize("damage", [truncate, empty, flip_last_bit, flip_middle_bit, remove])
def test_damaged_tensors_are_passed_over_with_a_warning(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    assert "2.safetensors" in passed_over(tmp_path, "safetensors", damage)


@pytest.mark.parametrize("damage", [truncate, empty, flip_last_bit, flip_middle_bit])
def test_a_damaged_record_is_passed_over_with_a_warning(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    warning = passed_over(tmp_path, "json", damage)
    assert "2.json" in warning or "2.safetensors" in warning


def test_no_flipped_bit_of_the_record_goes_unnoticed(tmp_path: Path) -> None:
    save_series(tmp_path, 2)
    path = newest(tmp_path, "json")
    content = path.read_bytes()
    unnoticed = []
    for place in range(content.index(b'"record"'), len(content)):
        for bit in (1, 2, 4):
            path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            loaded = load_checkpoint(tmp_path)
            assert loaded is not None
            if loaded[1] not in ({"number": 0}, {"number": 1}):
                unnoticed.append(loaded[1])
    assert unnoticed == []


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b"{}", b'{"format": 1}', b"[" * 100_000, b"\xff\xfe"])
def test_json_of_another_kind_is_passed_over(tmp_path: Path, content: bytes) -> None:
    save_series(tmp_path, 2)
    newest(tmp_path, "json").write_bytes(content)
    warnings: list[str] = []
    loaded = load_checkpoint(tmp_path, warnings.append)
    assert loaded is not None
    assert loaded[1] == {"number": 0}
    assert len(warnings) == 1


def test_that_all_are_damaged_is_an_error(tmp_path: Path) -> None:
    save_series(tmp_path, 3)
    for path in tmp_path.glob("*.safetensors"):
        truncate(path)
    warnings: list[str] = []
    with pytest.raises(InputError, match=r"in another folder \(out\)") as caught:
        load_checkpoint(tmp_path, warnings.append)
    assert str(tmp_path) in str(caught.value)
    assert len(warnings) == 2


def test_another_format_is_refused_and_both_versions_are_named(tmp_path: Path) -> None:
    save_series(tmp_path, 1)
    path = newest(tmp_path, "json")
    head = json.loads(path.read_bytes())
    path.write_text(json.dumps({**head, "format": 99}))
    with pytest.raises(InputError, match=f"format 99.*format {FORMAT}"):
        load_checkpoint(tmp_path)


def test_a_foreign_checkpoint_with_numbers_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    # Whole by its checksum and valid by the format, yet of a type that torch cannot hold.
    header = json.dumps({"weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    content = struct.pack("<Q", len(header)) + header + b"\0"
    save_series(tmp_path, 1)
    path = newest(tmp_path, "json")
    head = json.loads(path.read_bytes())
    newest(tmp_path, "safetensors").write_bytes(content)
    path.write_text(json.dumps({**head, "checksum": hashlib.blake2b(content).hexdigest()}))
    with pytest.raises(InputError, match="no checkpoint"):
        load_checkpoint(tmp_path)


def test_saving_continues_after_a_damaged_one(tmp_path: Path) -> None:
    save_series(tmp_path, 2)
    truncate(newest(tmp_path, "json"))
    save_checkpoint(tmp_path, tensors_of(5.0), {"number": 5})
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded[1] == {"number": 5}


def test_tensors_without_their_record_are_not_a_checkpoint(tmp_path: Path) -> None:
    # Killed between the two files: the one before counts, and the next one takes the place.
    save_series(tmp_path, 2)
    newest(tmp_path, "json").unlink()
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded[1] == {"number": 0}
    save_checkpoint(tmp_path, tensors_of(7.0), {"number": 7})
    again = load_checkpoint(tmp_path)
    assert again is not None
    assert again[1] == {"number": 7}
    assert again[0]["scalar"].item() == 7


# --- writing --------------------------------------------------------------------------------------------------------


def test_write_file_replaces_the_content(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for content in (b"old and longer", b"new"):
        write_file(path, content)
        assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


def test_a_full_disk_leaves_the_old_content_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    write_file(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(RunError, match=f"file.json.*{os.strerror(errno.ENOSPC)}"):
            write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_series(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(RunError):
            save_checkpoint(tmp_path, tensors_of(9.0), {"number": 9})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_write_file_makes_the_folder(tmp_path: Path) -> None:
    write_file(tmp_path / "a" / "b" / "file", b"new")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"new"


def test_a_file_where_a_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file, not a folder")
    with pytest.raises(RunError, match="cannot write"):
        write_file(tmp_path / "occupied" / "file", b"new")
    assert (tmp_path / "occupied").read_text() == "a file, not a folder"


# --- the owner of a damaged one -------------------------------------------------------------------------------------


def test_continuing_after_a_damaged_checkpoint_leaves_two_intact_ones(tmp_path: Path) -> None:
    save_series(tmp_path, 2)
    (tmp_path / "1.safetensors").write_bytes(b"damaged")
    found = load_checkpoint(tmp_path)  # somebody who only looks
    assert found is not None
    assert (tmp_path / "1.json").exists()
    found = load_checkpoint(tmp_path, owner=True)
    assert found is not None
    assert found[1] == {"number": 0}
    save_checkpoint(tmp_path, tensors_of(5), {"number": 5})
    newest(tmp_path, "safetensors").write_bytes(b"damaged, too")
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found[1] == {"number": 0}
    assert (tmp_path / "1.json.damaged").exists()


def test_checkpoints_that_are_all_damaged_stay_where_they_are(tmp_path: Path) -> None:
    save_series(tmp_path, 2)
    for number in (0, 1):
        (tmp_path / f"{number}.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="no checkpoint"):
        load_checkpoint(tmp_path, owner=True)
    assert {path.name for path in tmp_path.iterdir()} == {"0.json", "0.safetensors", "1.json", "1.safetensors"}
