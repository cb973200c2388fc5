"""Tensors in the cache: one file for each set, with the key it belongs to and a checksum."""

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from boovae.errors import RunError
from boovae.files import write_file

log = logging.getLogger(__name__)

T = TypeVar("T")
Tensors = dict[str, Tensor]


def digest(tensors: Tensors) -> str:
    """Return the SHA-256 of all names, types, shapes and values."""
    parts = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        parts.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        parts.update(tensor.numpy().tobytes())
    return parts.hexdigest()


def write_cached(path: Path, key: str, tensors: Tensors, loss: str, **about: Any) -> bool:
    """Write tensors and a JSON description to the cache, whole or not at all, and return whether that worked.

    If not, warn of the `loss`: it only costs time.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    head = {"key": key, **about, "digest": digest(tensors)}
    try:
        write_file(path, save(tensors, metadata={"boovae": json.dumps(head)}))
    except RunError as error:
        log.warning("%s: %s", loss, error)
        return False
    return True


def read_cached(path: Path, key: str, restore: Callable[[Tensors, dict[str, Any]], T], problem: str) -> T | None:
    """Return what `restore` makes of cached tensors and their description; None if there are none.

    A damaged file, or one with another key, counts as missing, with the warning `problem`, in which `{path}` stands for
    the file.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["boovae"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if about["key"] != key or about["digest"] != digest(tensors):
            raise ValueError("its key or checksum does not match")
        return restore(tensors, about)
    except Exception as error:  # damaged files fail in too many ways to list
        log.warning("%s: %s", problem.format(path=path), error)
        return None
