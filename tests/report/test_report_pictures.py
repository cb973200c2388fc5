"""Grids of samples: sizes, values and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from boovae.errors import InputError
from boovae.report.pictures import gallery, grid, save_grid


def test_tiles_lie_row_by_row_with_a_pixel_between() -> None:
    images = np.linspace(0, 1, 5)[:, None].repeat(6, axis=1)
    pixels = np.asarray(grid(images, (2, 3), columns=2, scale=1))
    assert pixels.shape == (3 * 3 + 1, 2 * 4 + 1)
    assert [pixels[1, 1], pixels[1, 5], pixels[4, 1], pixels[4, 5], pixels[7, 1]] == [0, 64, 128, 191, 255]
    assert len({int(pixels[0, 0]), int(pixels[3, 3]), int(pixels[7, 5])}) == 1  # separators and the empty place


def test_values_are_clipped_to_the_pixel_range() -> None:
    pixels = np.asarray(grid([[-3.0, -1.0, 0.0, 9.0]], (1, 4), scale=1, pixel_range=(-1.0, 1.0)))
    assert pixels[1, 1:5].tolist() == [0, 0, 128, 255]


def test_colour_planes_become_rgb() -> None:
    red = np.concatenate([np.ones(4), np.zeros(8)])[None]
    picture = grid(red, (3, 2, 2), scale=3)
    assert picture.mode == "RGB"
    assert picture.size == (8, 8)
    assert picture.getpixel((4, 4)) == (255, 0, 0)
    assert grid(np.zeros((1, 4)), (1, 2, 2)).mode == "L"


def test_features_become_strips_of_colours() -> None:
    picture = grid([[0.0, 1.0], [1.0, 0.0]], (2,))
    assert picture.mode == "RGB"
    assert picture.size == (258, 19)
    assert picture.getpixel((5, 5)) == picture.getpixel((250, 14)) == (68, 1, 84)
    assert picture.getpixel((250, 5)) == (253, 231, 37)


def test_a_gallery_has_a_named_row_per_task_and_pairs_above_each_other() -> None:
    dark, light = np.zeros((1, 3, 64)), np.ones((1, 3, 64))
    rows = [("first", np.concatenate([dark, light])), ("a much longer name\n\ud800", np.ones((2, 1, 64)))]
    pixels = np.asarray(gallery(rows, (8, 8)).convert("L"))
    tile, gap = 8 * 5 + 1, 8  # 8 x 8 pixels five times as large, and a pixel of separator
    assert pixels.shape[0] == gap + 2 * (2 * tile + 1 + gap)
    left = pixels.shape[1] - gap - (3 * tile + 1)
    assert pixels[gap + 5, left + 5] == 0
    assert pixels[gap + tile + 5, left + 5] == 255
    for top in (gap, gap + 2 * tile + 1 + gap):
        assert pixels[top : top + 2 * tile, :left].min() < 100  # the name
    assert pixels.shape[1] > np.asarray(gallery(rows[:1], (8, 8))).shape[1]  # room for the longest name


def test_a_gallery_of_features_has_pairs_side_by_side() -> None:
    low, high = np.zeros((1, 4, 2)), np.ones((1, 4, 2))
    picture = gallery([("x", np.concatenate([low, high]))], (2,))
    assert picture.getpixel((picture.width - 8 - 300, 8 + 5)) == (68, 1, 84)
    assert picture.getpixel((picture.width - 8 - 100, 8 + 5)) == (253, 231, 37)


def test_an_empty_gallery_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to show"):
        gallery([], (8, 8))


def test_what_is_not_a_number_is_drawn_grey() -> None:
    pixels = np.asarray(grid([[np.nan, 1.0]], (1, 2), scale=1))
    assert pixels[1, 1] == pixels[0, 0]


def test_saved_grid_is_a_png_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "task_00.png"
    for _ in range(2):
        save_grid(path, np.zeros((4, 4)), (2, 2), scale=2)
    with Image.open(path) as picture:
        assert (picture.format, picture.size) == ("PNG", (11, 11))
    assert [p.name for p in path.parent.iterdir()] == ["task_00.png"]


@pytest.mark.parametrize(
    ("images", "shape", "options", "message"),
    [
        (np.zeros((2, 5)), (2, 2), {}, r"images has shape \(2, 5\): give \(n, 4\)"),
        (np.zeros((0, 4)), (2, 2), {}, "with n > 0"),
        (np.zeros((2, 8)), (2, 2, 2), {}, r"shape \(2, 2, 2\) is not a picture"),
        (np.zeros((2, 4)), (2, 2), {"columns": 0}, "must be at least 1"),
        (np.zeros((2, 4)), (2, 2), {"pixel_range": (1.0, 1.0)}, "pixel_range"),
    ],
)
def test_wrong_arguments_are_named(images: Any, shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        grid(images, shape, **options)
