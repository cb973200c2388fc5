"""CelebA from its official files: what is chosen, how it is cut, and what is said about broken files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from boovae.cli.main import main
from boovae.data import DATASETS, load_stream
from boovae.data.celeba import HAIR, VIEWS, decode_picture, decode_pictures, read_celeba
from boovae.errors import InputError
from faces import face, four_colours, write_celeba


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOVAE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BOOVAE_DATA", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_celeba(tmp_path / "data", four_colours(train=3))


def test_faces_become_four_tasks_with_the_official_split(folder: Path) -> None:
    stream = load_stream("celeba", data_dir=folder)
    assert [task.name for task in stream] == ["black", "blond", "brown", "gray"]
    assert stream.split_record["sizes"] == {"train": 12, "valid": 8, "test": 8}
    assert stream.shape == (3, 32, 32)
    assert stream.pixel_range == (-1.0, 1.0)
    for task in stream:
        assert -1 <= task.train.images.min() < -0.2
        assert 0.2 < task.train.images.max() <= 1
    tops = [task.train.images.unflatten(1, (3, 32, 32))[:, :, 4, 16].mean(0) for task in stream]
    assert tops[1][0] > tops[1][2] + 0.3  # blond hair at the top of the head: more red than blue
    assert tops[0].max() < -0.6  # black hair


def test_exactly_one_colour_and_neither_hat_nor_bald_nor_receding(tmp_path: Path) -> None:
    rows: list[tuple[tuple[str, ...], int]] = [((hair,), code) for code in range(3) for hair in HAIR]
    excluded = [(), ("Black_Hair", "Brown_Hair"), ("Blond_Hair", "Gray_Hair"), tuple(HAIR)]
    excluded += [("Black_Hair", mark) for mark in ("Wearing_Hat", "Bald", "Receding_Hairline")]
    folder = write_celeba(tmp_path / "data", rows + [(marks, 0) for marks in excluded])
    data = read_celeba(32, folder)
    assert data.labels.tolist() == [0, 1, 2, 3] * 3
    assert data.split is not None
    assert data.split.tolist() == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(("side", "resized", "corner"), [(32, (45, 55), (6, 12)), (64, (90, 110), (13, 23))])
def test_pictures_are_resized_and_their_middle_is_kept(
    side: int, resized: tuple[int, int], corner: tuple[int, int], folder: Path
) -> None:
    """Against the plain way: decode, resize, crop. Decoding at half size may change a pixel by a few levels."""
    data = read_celeba(side, folder)
    assert data.images.shape == (28, 3, side, side)
    files = sorted((folder / "celeba" / "img_align_celeba").iterdir())
    left, top = corner
    for pixels, file in zip(data.images, files, strict=True):
        plain = Image.open(file).convert("RGB").resize(resized, Image.Resampling.BILINEAR)
        wanted = np.asarray(plain.crop((left, top, left + side, top + side)), int).transpose(2, 0, 1)
        difference = np.abs(pixels.astype(int) - wanted)
        assert difference.mean() < (1.5 if side == 32 else 0.01)
        assert difference.max() <= (24 if side == 32 else 1)


def test_pictures_are_decoded_once_and_mapped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_celeba(32, folder).images
    assert isinstance(first, np.memmap)
    monkeypatch.setattr("boovae.data.celeba.decode_pictures", None)  # would fail if it were called
    np.testing.assert_array_equal(read_celeba(32, folder).images, first)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_changed_picture_is_decoded_again(folder: Path) -> None:
    before = np.array(read_celeba(32, folder).images)
    Image.fromarray(255 - face("Black_Hair", 1)).save(folder / "celeba" / "img_align_celeba" / "000001.jpg")
    after = read_celeba(32, folder).images
    assert np.abs(after[0].astype(int) - before[0]).mean() > 30
    np.testing.assert_array_equal(after[1:], before[1:])


def test_the_folders_of_the_official_download_are_found(folder: Path) -> None:
    base = folder / "celeba"
    places = {"Anno": "list_attr_celeba.txt", "Eval": "list_eval_partition.txt", "Img": "img_align_celeba"}
    for place, name in places.items():
        (base / place).mkdir()
        (base / name).rename(base / place / name)
    assert len(read_celeba(32, folder).labels) == 28


@pytest.mark.parametrize("first", [True, False])
def test_a_prepared_file_is_enough(first: bool, folder: Path, tmp_path: Path) -> None:
    data = read_celeba(32, folder)
    images = data.images if first else data.images.transpose(0, 2, 3, 1)
    (tmp_path / "other" / "celeba").mkdir(parents=True)
    path = tmp_path / "other" / "celeba" / "celeba_32.npz"
    np.savez_compressed(path, images=images, labels=data.labels, split=np.asarray(data.split))
    there, here = load_stream("celeba", data_dir=tmp_path / "other"), load_stream("celeba", data_dir=folder)
    assert there.digest == here.digest
    assert there.class_names == here.class_names == ("black", "blond", "brown", "gray")
    np.savez_compressed(path, images=images, labels=data.labels)
    with pytest.raises(InputError, match=r"celeba_32\.npz.*split"):
        load_stream("celeba", data_dir=tmp_path / "other")


def test_a_packed_dataset_is_the_same_dataset(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "packed" / "celeba" / "celeba_32.npz"
    main(["datasets", "--pack", "celeba", "--out", str(out), "--data-dir", str(folder)])
    assert capsys.readouterr().out.strip() == str(out)
    packed = load_stream("celeba", data_dir=tmp_path / "packed")
    assert packed.digest == load_stream("celeba", data_dir=folder).digest
    main(["datasets", "--pack", "digits", "--out", str(tmp_path / "digits.npz")])
    digits = load_stream(f"npz:{tmp_path / 'digits.npz'}")
    assert digits.split_record["sizes"] == load_stream("digits").split_record["sizes"]


def test_presence_is_known_without_reading(folder: Path, tmp_path: Path) -> None:
    assert DATASETS["celeba"].where(folder) == folder / "celeba"
    assert DATASETS["celeba"].is_present(folder)
    assert not DATASETS["celeba"].is_present(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"not on this disk[\s\S]*img_align_celeba"):
        load_stream("celeba", data_dir=tmp_path / "nothing")


def test_a_user_can_stretch_other_pictures_over_the_range_of_the_faces(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.linspace(0, 1, 40 * 4).reshape(40, 4), labels=np.zeros(40, int))
    stream = load_stream(f"npz:{tmp_path / 'a.npz'}", pixel_range=(-1.0, 1.0))
    assert stream[0].train.images.min() < -0.8
    np.savez(tmp_path / "b.npz", images=np.full((40, 4), 255, np.uint8), labels=np.zeros(40, int))
    assert load_stream(f"npz:{tmp_path / 'b.npz'}", pixel_range=(-1.0, 1.0))[0].train.images.min() == 1.0


# --- what is broken ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "other format"])
def test_a_broken_picture_is_named(damage: str, folder: Path) -> None:
    path = folder / "celeba" / "img_align_celeba" / "000005.jpg"
    content = path.read_bytes()
    if damage == "other format":
        Image.fromarray(face("Gray_Hair", 0)).save(path, format="PNG")
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "noise": b"\xff\xd8" + bytes(500), "empty": b""}[damage])
    with pytest.raises(InputError, match=r"000005\.jpg.*cannot be read"):
        read_celeba(32, folder)


def test_a_picture_of_another_size_is_named(folder: Path) -> None:
    path = folder / "celeba" / "img_align_celeba" / "000003.jpg"
    Image.fromarray(face("Brown_Hair", 0, (200, 218))).save(path)
    with pytest.raises(InputError, match=r"000003\.jpg: 200 x 218 pixels instead of 178 x 218"):
        read_celeba(32, folder)


def test_a_row_without_picture_is_named_before_anything_is_decoded(folder: Path, tmp_path: Path) -> None:
    for number in (4, 9):
        (folder / "celeba" / "img_align_celeba" / f"{number:06}.jpg").unlink()
    with pytest.raises(InputError, match=r"000004\.jpg.*not there \(2 of 28"):
        read_celeba(32, folder)
    assert not (tmp_path / "cache" / "celeba").exists()


@pytest.mark.parametrize("name", ["list_attr_celeba.txt", "list_eval_partition.txt"])
def test_a_missing_list_is_named(name: str, folder: Path) -> None:
    (folder / "celeba" / name).unlink()
    with pytest.raises(InputError, match=f"{name}: not there"):
        read_celeba(32, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "promises 28 rows|marks for 8"),
        (lambda text: text.replace("28\n", "30\n", 1), "promises 30 rows, there are 28"),
        (lambda text: text.replace("Bald", "Bold"), "no attribute 'Bald'"),
        (lambda text: text.replace("000002.jpg -1", "000002.jpg  7"), "marks must be 1 or -1"),
        (lambda text: text.replace("000002.jpg -1", "000002.jpg  x"), "marks must be 1 or -1"),
        (lambda text: text.replace("000002.jpg", "../../002.jpg"), "not a plain file name"),
        (lambda text: "", "first line"),
    ],
)
def test_a_broken_attribute_list_is_refused(change: object, message: str, folder: Path) -> None:
    path = folder / "celeba" / "list_attr_celeba.txt"
    assert callable(change)
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match=message) as refused:
        read_celeba(32, folder)
    assert "list_attr_celeba.txt" in str(refused.value)


def test_a_partition_that_lacks_a_picture_or_has_a_strange_row_is_refused(folder: Path) -> None:
    path = folder / "celeba" / "list_eval_partition.txt"
    text = path.read_text()
    path.write_text(text.replace("000002.jpg 0\n", ""))
    with pytest.raises(InputError, match=r"list_eval_partition\.txt: no row for 000002\.jpg"):
        read_celeba(32, folder)
    path.write_text(text.replace("000002.jpg 0\n", "000002.jpg 3\n"))
    with pytest.raises(InputError, match=r"list_eval_partition\.txt, line 2"):
        read_celeba(32, folder)


def test_decoding_reports_how_far_it_is_and_fills_the_array_in_order(folder: Path, tmp_path: Path) -> None:
    pictures = folder / "celeba" / "img_align_celeba"
    files = sorted(path.name for path in pictures.iterdir())
    done: list[int] = []
    decode_pictures(files, pictures, tmp_path / "out.npy", VIEWS[32], done.append, threads=3)
    assert sum(done) == len(files)
    array = np.load(tmp_path / "out.npy")
    for row in (0, 13, 27):
        np.testing.assert_array_equal(array[row], decode_picture(pictures / files[row], VIEWS[32]).transpose(2, 0, 1))
