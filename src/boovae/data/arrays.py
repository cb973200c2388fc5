"""Accepted forms of images and labels, and the checks that every source passes through."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from boovae.errors import InputError

TRAIN, VALID, TEST = 0, 1, 2
SPLITS = ("train", "valid", "test")
LABEL_LIMIT = 10_000  # labels index a table of names; a larger one is a mistake (an identifier, a date)

IntArray = NDArray[np.int64]
Held = float | int | None


class Labelled(NamedTuple):
    """Images ``(n, *shape)``, their labels, their splits 0/1/2 if known, how they were split; a note on the reading."""

    images: NDArray[Any]
    labels: IntArray
    split: IntArray | None
    class_names: tuple[str, ...]
    how: str = ""
    note: str = ""


def as_images(
    array: ArrayLike | Tensor, where: str, shape: Sequence[int] | None = None, *, exact: bool = False
) -> NDArray[Any]:
    """Return images as ``(n, *shape)``, uint8 if they were, else float32; colour is stored channels first.

    With ``exact``, numbers that do not fit into float32 stay float64.

    ``where`` names the argument in errors. Accepted are ``(n, features)``, ``(n, h, w)``, ``(n, h, w, c)``
    and, if the last axis cannot be the colour, ``(n, c, h, w)``. ``shape`` is the shape that one image must have.

    >>> as_images(np.zeros((5, 8, 8, 3), np.uint8), "images").shape
    (5, 3, 8, 8)
    """
    images = as_numpy(array, where)
    if images.dtype.kind not in "buif":
        raise InputError(f"{where}: images must be numbers, found {images.dtype}")
    if images.dtype != np.uint8:
        images = images.astype(np.result_type(images, np.float32) if exact else np.float32)
    if images.ndim < 2 or images.ndim > 4:
        raise InputError(
            f"{where}: images must be (n, features), (n, height, width) or (n, height, width, colours), "
            f"found {images.shape}; pass a single image as images[None]"
        )
    if shape is None:
        images = _channels_first(images, where)
    elif images.shape[1:] != tuple(shape):
        images = images if images.ndim == 2 else _channels_first(images, where)
        if math.prod(images.shape[1:]) != math.prod(shape):
            raise InputError(f"{where}: shape {tuple(shape)} does not fit images of shape {images.shape[1:]}")
        images = images.reshape(len(images), *shape)
    if images.size == 0:
        raise InputError(f"{where}: no pixels in images of shape {images.shape}; leave out empty tasks")
    return images


def as_numpy(array: ArrayLike | Tensor, where: str) -> NDArray[Any]:
    """Return an array, or a tensor on any device, as a NumPy array; ``where`` names the argument in errors."""
    if isinstance(array, Tensor):
        tensor = array.detach().cpu()
        return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())
    try:
        return np.asarray(array)
    except (ValueError, TypeError) as error:
        raise InputError(f"{where}: images of different sizes or not an array ({error})") from error


def _channels_first(images: NDArray[Any], where: str) -> NDArray[Any]:
    if images.ndim != 4:
        return images
    if images.shape[-1] in (1, 3):
        images = np.moveaxis(images, -1, 1)
    if images.shape[1] not in (1, 3):
        raise InputError(f"{where}: images must have 1 or 3 colours, found {images.shape}")
    return images[:, 0] if images.shape[1] == 1 else images


def as_labels(labels: ArrayLike | Tensor, count: int, where: str) -> IntArray:
    """Return ``(count,)`` int64 labels; raise an error that says what is wrong with them."""
    found = as_numpy(labels, where)
    if found.ndim != 1 or len(found) != count:
        raise InputError(f"{where}: {count} images need labels of shape ({count},), found {found.shape}")
    if found.dtype.kind not in "iu":
        raise InputError(f"{where}: labels must be integers, found {found.dtype}; convert with astype(int)")
    if count and not 0 <= int(found.min()) <= int(found.max()) < LABEL_LIMIT:
        raise InputError(
            f"{where}: labels must lie in 0..{LABEL_LIMIT - 1}, found {found.min()}..{found.max()}; "
            "number the classes from 0"
        )
    return found.astype(np.int64)


def check_pixels(images: NDArray[Any], pixel_range: tuple[float, float], where: str) -> NDArray[Any]:
    """Return the images; float pixels must be finite and inside ``pixel_range`` (rounding errors are clipped)."""
    if images.dtype == np.uint8:
        return images
    low, high = pixel_range
    found_low, found_high = float(images.min()), float(images.max())
    if not (math.isfinite(found_low) and math.isfinite(found_high)):
        bad = int((~np.isfinite(images).reshape(len(images), -1).all(1)).argmax())
        raise InputError(f"{where}: NaN or infinite pixels, first in image {bad}; remove or repair these images")
    slack = 1e-6 * (high - low)
    if found_low < low - slack or found_high > high + slack:
        remedy = "divide by 255 or pass uint8" if 127 < found_high <= 255 else "rescale them"
        raise InputError(
            f"{where}: pixels in [{found_low:g}, {found_high:g}], outside pixel_range [{low:g}, {high:g}]; "
            f"{remedy}, or pass the right pixel_range"
        )
    clipped: NDArray[Any] = np.clip(images, low, high)
    return clipped


def to_float(images: NDArray[Any], pixel_range: tuple[float, float]) -> Tensor:
    """Return a float32 copy of images ``(n, *shape)``; uint8 0..255 is mapped onto ``pixel_range``."""
    pixels = torch.from_numpy(np.array(images))
    if pixels.dtype != torch.uint8:
        return pixels.float()
    low, high = pixel_range
    grey = pixels.float().div_(255.0)
    return grey if (low, high) == (0.0, 1.0) else grey.mul_(high - low).add_(low)


def random_split(count: int, seed: Sequence[int], where: str, *, valid: Held = None, test: Held = None) -> IntArray:
    """Return a split code 0, 1 or 2 for each of ``count`` images, drawn at random with ``seed``.

    ``test`` and ``valid`` are a share or a number of images: a tenth by default, 0 for none. The validation share
    is taken of the images that remain after the test images.
    """
    n_test = _held_out(test, count, f"{where}: test")
    n_valid = _held_out(valid, count - n_test, f"{where}: valid")
    if n_test + n_valid >= count:
        raise InputError(
            f"{where}: too few images: of {count}, {n_test} would be test and {n_valid} valid, none train; "
            "each task needs at least 1 image in train, valid and test, so at least 3"
        )
    split = np.full(count, TRAIN, np.int64)
    order = np.random.default_rng(list(seed)).permutation(count)
    split[order[count - n_test :]] = TEST
    split[order[count - n_test - n_valid : count - n_test]] = VALID
    return split


def _held_out(amount: Held, count: int, where: str) -> int:
    if amount is None:
        amount = 0.1
    if isinstance(amount, int):
        if amount < 0:
            raise InputError(f"{where}={amount}: pass a number of images, 0 or more")
        return amount
    if not 0 < amount < 1:
        raise InputError(f"{where}={amount:g}: a share lies between 0 and 1; pass an integer for a number of images")
    return math.ceil(round(count * amount, 9))  # rounded up, as in the published split of notMNIST
