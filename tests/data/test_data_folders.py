"""Folders of pictures: read in natural order, upright, at one size; what cannot be read is named."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from boovae.config.settings import Resize
from boovae.data import folders, load_stream, read_folder
from boovae.errors import InputError


def picture(path: Path, value: int = 0, size: tuple[int, int] = (5, 4), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode != "RGB" else (value, value + 1, value + 2)).save(path)


def test_folder_gives_one_class_per_sub_folder_in_sorted_order(tmp_path: Path) -> None:
    for value, name in enumerate(("b/1.png", "a/2.png", "a/1.PNG", "b/.hidden.png", ".cache/x.png")):
        picture(tmp_path / name, value)
    (tmp_path / "a" / "notes.txt").write_text("not a picture")
    read = read_folder(tmp_path)
    assert read.class_names == ("a", "b")
    assert read.labels.tolist() == [0, 0, 1]
    assert read.images.shape == (3, 4, 5)
    assert read.images[:, 0, 0].tolist() == [2, 1, 0]


def test_folder_with_one_colour_picture_is_read_as_colour_with_channels_first(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png", 9)
    picture(tmp_path / "a" / "2.png", 20, mode="RGB")
    images = read_folder(tmp_path).images
    assert images.shape == (2, 3, 4, 5)
    assert images[:, :, 0, 0].tolist() == [[9, 9, 9], [20, 21, 22]]


def test_folder_of_pictures_is_one_class(tmp_path: Path) -> None:
    picture(tmp_path / "cats" / "1.png")
    assert read_folder(tmp_path / "cats").class_names == ("cats",)


def test_folder_becomes_a_stream(tmp_path: Path) -> None:
    for index in range(12):
        picture(tmp_path / "ab"[index % 2] / f"{index}.png", 10 * index)
    stream = load_stream(f"folder:{tmp_path}")
    assert [task.name for task in stream] == ["a", "b"]
    assert stream.shape == (4, 5)
    assert [len(part.labels) for part in (stream[0].train, stream[0].valid, stream[0].test)] == [4, 1, 1]
    values = {
        round(float(v) * 255)
        for split in (stream[1].train, stream[1].valid, stream[1].test)
        for v in split.images[:, 0]
    }
    assert values == {10, 30, 50, 70, 90, 110}


def broken(path: Path) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((5, 4), 50).save(buffer, "PNG")
    path.write_bytes(buffer.getvalue()[:-40])


def test_folder_names_the_bad_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message):
            read_folder(tmp_path)
        bad.unlink()

    picture(tmp_path / "a" / "1.png")
    bad = tmp_path / "a" / "2.png"
    broken(bad)
    refused(r"2\.png: cannot be read as a picture")
    bad.write_text("no picture at all")
    refused(r"2\.png: cannot be read as a picture")
    picture(bad, size=(6, 4))
    refused(r"2\.png: 6 x 4 pixels, but .*1\.png has 5 x 4")
    bad = bad.with_suffix(".tif")
    picture(bad, mode="F")
    refused(r"2\.tif: more than 16 bits")
    picture(bad, size=(30, 30))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    refused(r"2\.tif: too large to be unpacked .*decompression bomb")


def test_folder_of_the_wrong_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none: cannot be read"):
        read_folder(tmp_path / "none")
    with pytest.raises(InputError, match="no pictures"):
        read_folder(tmp_path)
    picture(tmp_path / "a" / "inner" / "1.png")
    with pytest.raises(InputError, match="has sub-folders"):
        read_folder(tmp_path)
    picture(tmp_path / "loose.png")
    with pytest.raises(InputError, match=r"loose\.png"):
        read_folder(tmp_path)


# --- order ----------------------------------------------------------------------------------------------------------


def test_numbers_in_names_are_sorted_by_value(tmp_path: Path) -> None:
    for month in (10, 2, 1):
        for index in (10, 9, 1):
            picture(tmp_path / f"month_{month}" / f"img{index}.png", 10 * month + index)
    read = read_folder(tmp_path)
    assert read.class_names == ("month_1", "month_2", "month_10")
    assert read.images[:, 0, 0].tolist() == [11, 19, 20, 21, 29, 30, 101, 109, 110]
    plain = read_folder(tmp_path, natural=False)
    assert plain.class_names == ("month_1", "month_10", "month_2")
    assert plain.images[:3, 0, 0].tolist() == [11, 20, 19]


def test_names_that_mix_numbers_and_letters_are_sorted_too(tmp_path: Path) -> None:
    for name in ("b", "2b", "10", "a2", "a", "02", "2", "a10"):
        picture(tmp_path / name / "1.png")
    assert read_folder(tmp_path).class_names == ("02", "2", "2b", "10", "a", "a2", "a10", "b")


# --- sizes ----------------------------------------------------------------------------------------------------------


def gradient(path: Path, height: int, width: int) -> None:
    """Write a picture whose grey value at (y, x) is 2y + x in units of a hundredth of its sides."""
    path.parent.mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[:height, :width]
    Image.fromarray((128 + 50 * (2 * y / height - 1) + 50 * (2 * x / width - 1)).astype(np.uint8)).save(path)


def test_mixed_sizes_are_refused_with_both_files_and_the_remedy(tmp_path: Path) -> None:
    for name, size in (("1.png", (5, 4)), ("2.png", (5, 4)), ("3.png", (4, 5)), ("10.png", (9, 9))):
        picture(tmp_path / "a" / name, size=size)
    with pytest.raises(InputError, match=r"3\.png: 4 x 5 pixels, but .*1\.png has 5 x 4 .*resize='auto'"):
        read_folder(tmp_path)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_resized_pictures_cover_the_size_and_lose_both_ends_alike(suffix: str, tmp_path: Path) -> None:
    gradient(tmp_path / "a" / f"1.{suffix}", 400, 800)
    image = read_folder(tmp_path, (20, 20)).images[0].astype(float)
    # The middle half of the width is kept: 128 ± 50 from top to bottom, 128 ± 25 from left to right.
    middles = (np.arange(20) + 0.5) / 10 - 1
    expected = 128 + 50 * middles[:, None] + 25 * middles
    assert np.abs(image - expected)[1:-1, 1:-1].max() < 3


def test_resizing_averages_the_pixels_that_become_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    board = np.uint8(255 * (np.indices((64, 64)).sum(0) % 2))
    Image.fromarray(board).save(tmp_path / "a" / "1.png")
    image = read_folder(tmp_path, (8, 8)).images[0]
    assert image.min() >= 120  # picking single pixels would give 0 or 255
    assert image.max() <= 135


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(20, 30)] * 3, (20, 30)),  # already small: as they are
        ([(20, 30), (21, 31), (22, 32), (4000, 6000)], (21, 31)),  # one huge picture does not matter
        ([(480, 640)] * 2, (48, 64)),  # the longest side is 64, the proportions stay
        ([(1000, 20)], (64, 8)),  # no side is under 8
        ([(3, 4)], (8, 8)),
    ],
)
def test_auto_takes_the_median_size_within_bounds(
    sizes: list[tuple[int, int]], expected: tuple[int, int], tmp_path: Path
) -> None:
    for index, (height, width) in enumerate(sizes):
        picture(tmp_path / "a" / f"{index}.png", size=(width, height))
    read = read_folder(tmp_path, "auto")
    assert read.images.shape[1:] == expected
    assert f"resized to {expected[0]} x {expected[1]} (height x width): the median of {len(sizes)} is" in read.note


def test_a_size_is_checked_like_any_setting(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png")
    for wrong in ("large", (5,), (0, 5), (5.5, 5)):
        with pytest.raises(InputError, match="resize is "):
            load_stream(f"folder:{tmp_path}", resize=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="resize is for pictures in folder:PATH"):
        load_stream("digits", resize=(8, 8))


def test_photographs_are_refused_in_words_unless_they_are_resized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "memory_share", lambda: 64 * 10**9)
    picture(tmp_path / "a" / "holiday.jpg", size=(6000, 4000), mode="RGB")
    monkeypatch.setattr(folders, "read_picture", None)  # refused before a pixel is decoded
    with pytest.raises(InputError, match=r"holiday\.jpg: pictures of 6000 x 4000 .* 0\.4 GB .* 294\.9 GB,.*resize"):
        read_folder(tmp_path)
    monkeypatch.undo()
    assert read_folder(tmp_path, "auto").images.shape == (1, 3, 43, 64)


def test_a_large_jpeg_is_not_decoded_at_full_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    fit = ImageOps.fit

    def watched(image: Image.Image, size: tuple[int, int]) -> Image.Image:
        decoded.append(image.size)
        return fit(image, size)

    monkeypatch.setattr(ImageOps, "fit", watched)
    gradient(tmp_path / "a" / "1.jpg", 1600, 2400)
    read_folder(tmp_path, (32, 32))
    assert decoded == [(300, 200)]


# --- kinds ----------------------------------------------------------------------------------------------------------


def read_one(folder: Path) -> NDArray[np.uint8]:
    """Return the only picture of a folder with the colours last."""
    image: NDArray[np.uint8] = read_folder(folder).images[0]
    return image if image.ndim == 2 else np.moveaxis(image, 0, -1)


@pytest.mark.parametrize("kind", ["png", "tif", "pgm"])
def test_16_bits_are_scaled_not_clipped(kind: str, tmp_path: Path) -> None:
    values = np.array([[0, 128, 129, 257], [1000, 32768, 65000, 65535]], np.uint16)
    if kind == "pgm":
        (tmp_path / "1.pgm").write_bytes(b"P5 4 2 65535\n" + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(tmp_path / f"1.{kind}")
    assert read_one(tmp_path).tolist() == [[0, 0, 1, 1], [4, 128, 253, 255]]


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGBA", (10, 20, 30, 255), [10, 20, 30]),
        ("RGBA", (10, 20, 30, 0), [255, 255, 255]),
        ("RGBA", (0, 100, 255, 51), [204, 224, 255]),  # a fifth of the colour, four fifths of white
        ("LA", (0, 51), 204),
    ],
)
def test_what_is_transparent_becomes_white(
    mode: str, colour: tuple[int, ...], expected: list[int] | int, tmp_path: Path
) -> None:
    Image.new(mode, (3, 2), colour).save(tmp_path / "1.png")
    assert (read_one(tmp_path) == expected).all()


def test_palettes_become_their_colours_and_their_transparent_one_white(tmp_path: Path) -> None:
    indexed = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    indexed.putpalette([10, 20, 30, 200, 0, 0, 0, 0, 9])
    indexed.save(tmp_path / "1.png", transparency=2)
    assert read_one(tmp_path).tolist() == [[[10, 20, 30], [200, 0, 0], [255, 255, 255]]]


def test_printed_colours_become_screen_colours(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (255, 0, 0, 0)).save(tmp_path / "1.jpg", quality=95)
    assert np.abs(read_one(tmp_path).astype(int) - [0, 255, 255]).max() <= 2


@pytest.mark.parametrize("kind", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("resize", [None, (48, 32), "auto"])
def test_photographs_are_turned_upright(kind: str, resize: Resize, tmp_path: Path) -> None:
    """Bright on the left as stored, on top as it should be seen: the sides are exchanged before anything is resized."""
    stored = np.repeat(np.linspace(250, 5, 48).astype(np.uint8)[None], 32, 0)
    turn = Image.Exif()
    turn[0x0112] = 6  # rotate clockwise to see it
    Image.fromarray(stored).save(tmp_path / f"1.{kind}", exif=turn)
    image = read_folder(tmp_path, resize).images[0].astype(int)
    image = image if image.ndim == 2 else image[0]
    assert image.shape == (48, 32)
    assert np.abs(image - np.rot90(stored, -1)).max() <= 6


def test_of_a_moving_picture_the_first_frame_is_read(tmp_path: Path) -> None:
    frames = [Image.new("L", (5, 4), value) for value in (50, 200)]
    frames[0].save(tmp_path / "1.gif", save_all=True, append_images=frames[1:])
    assert (read_one(tmp_path) == 50).all()


@pytest.mark.parametrize("resize", [None, (8, 8)])
def test_an_empty_file_is_named(resize: Resize, tmp_path: Path) -> None:
    picture(tmp_path / "1.png")
    (tmp_path / "2.jpg").touch()
    with pytest.raises(InputError, match=r"2\.jpg: cannot be read as a picture"):
        read_folder(tmp_path, resize)


def test_a_class_without_pictures_or_with_too_few_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png")
    with pytest.raises(InputError, match=r"class 'a': too few images: .*at least 3"):
        load_stream(f"folder:{tmp_path}")
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match="/b: no pictures"):
        load_stream(f"folder:{tmp_path}")
