"""Tensors in the cache: a file each, which says what it belongs to and whether it is whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from boovae.files import write_file


def digest(tensors: dict[str, Tensor]) -> str:
    """Return the sha256 of all names, kinds and values."""
    parts = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        parts.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        parts.update(tensor.numpy().tobytes())
    return parts.hexdigest()


def write_tensors(path: Path, key: str, tensors: dict[str, Tensor], **about: Any) -> None:
    """Write tensors and what JSON can hold about them, whole or not at all; RunError where that is impossible."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    head = {"key": key, **about, "digest": digest(tensors)}
    write_file(path, save(tensors, metadata={"boovae": json.dumps(head)}))


def read_tensors(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and what was said about them; damaged files, and those of another key, fail in many ways."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["boovae"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    if about["key"] != key or about["digest"] != digest(tensors):
        raise ValueError("its content is not what it says")
    return tensors, about
