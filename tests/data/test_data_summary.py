"""The facts about a task from which its settings are chosen."""

import numpy as np
import pytest
import torch
from torch import Tensor

from boovae.data import ImageSpec
from boovae.data.summary import mirrored_share, summarise
from shapes import SHAPES, shapes


def rows(pictures: np.ndarray) -> Tensor:
    """Pictures (n, H, W, 3) as rows with the colours first."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).flatten(1).float() / 255


def handed(count: int) -> Tensor:
    """Pictures (n, 16, 16) of an L of any place and size, whose mirror image is another letter."""
    rng, pictures = np.random.default_rng(0), np.zeros((count, 16, 16), np.float32)
    for picture in pictures:
        top, left, size = rng.integers(0, 6), rng.integers(0, 6), rng.integers(5, 10)
        picture[top : top + size, left] = picture[top + size - 1, left : left + size] = 1
    return torch.from_numpy(pictures).flatten(1)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_are_the_same_both_ways_may_be_mirrored(name: str) -> None:
    assert (mirrored_share(rows(shapes(name, 200, seed=0, height=24, width=32)), (3, 24, 32)) or 0) > 0.3


def test_letters_are_not_mirrored() -> None:
    share = mirrored_share(handed(200), (16, 16))
    assert share is not None
    assert share < 0.1


def test_few_images_say_nothing_about_symmetry() -> None:
    assert mirrored_share(torch.rand(49, 64), (8, 8)) is None


def test_rows_and_standardised_numbers_have_no_mirror_image() -> None:
    symmetric = rows(shapes("circle", 60, seed=0, height=16, width=16))
    assert summarise(symmetric, ImageSpec((768,))).mirrored is None
    assert summarise(symmetric, ImageSpec((3, 16, 16)), pixels=False).mirrored is None
    assert not summarise(symmetric, ImageSpec((3, 16, 16), binarize="threshold")).augmentable
