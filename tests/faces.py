"""Small synthetic faces in CelebA's official layout: an oval of skin below a cap of hair, saved as JPEG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

#: Attributes of the lists that the tests write, in this order; the official list has 40.
ATTRIBUTES = ("Bald", "Black_Hair", "Blond_Hair", "Brown_Hair", "Gray_Hair", "Male", "Receding_Hairline", "Wearing_Hat")
COLOURS = {
    "Black_Hair": (25, 20, 20),
    "Blond_Hair": (225, 200, 120),
    "Brown_Hair": (110, 70, 40),
    "Gray_Hair": (160, 160, 165),
}


def face(hair: str, seed: int, size: tuple[int, int] = (178, 218)) -> NDArray[np.uint8]:
    """Return a picture (h, w, 3) of a face with hair of a colour."""
    rng = np.random.default_rng(seed)
    width, height = size
    y, x = np.mgrid[:height, :width]
    radius = np.hypot((x - width / 2) / (0.3 * width), (y - height * 0.55) / (0.33 * height))
    picture = np.broadcast_to(rng.integers(60, 200, 3).astype(float), (height, width, 3)).copy()
    picture[(radius < 1.35) & (y < height * 0.5)] = COLOURS[hair]
    picture[(radius < 1) & (y > height * 0.36)] = rng.normal((205, 160, 135), 15)
    return np.clip(picture + rng.normal(0, 4, picture.shape), 0, 255).astype(np.uint8)


def write_celeba(folder: Path, rows: Sequence[tuple[Sequence[str], int]], **options: Any) -> Path:
    """Write pictures with these attributes and split codes, and the two lists, into `folder / celeba`."""
    base = folder / "celeba"
    (base / "img_align_celeba").mkdir(parents=True)
    attributes, partition = [], []
    for number, (marked, code) in enumerate(rows, start=1):
        name = f"{number:06}.jpg"
        hair = next((mark for mark in marked if mark in COLOURS), "Black_Hair")
        Image.fromarray(face(hair, number, **options)).save(base / "img_align_celeba" / name, quality=92)
        marks = "  ".join(" 1" if attribute in marked else "-1" for attribute in ATTRIBUTES)
        attributes.append(f"{name} {marks} \n")
        partition.append(f"{name} {code}\n")
    head = f"{len(rows)}\n{' '.join(ATTRIBUTES)} \n"
    (base / "list_attr_celeba.txt").write_text(head + "".join(attributes))
    (base / "list_eval_partition.txt").write_text("".join(partition))
    return folder


def four_colours(train: int, held_out: int = 2) -> list[tuple[tuple[str, ...], int]]:
    """Return the rows of as many training, validation and test pictures of each colour."""
    codes = [0] * train + [1] * held_out + [2] * held_out
    return [((hair, "Male"), code) for code in codes for hair in COLOURS]
