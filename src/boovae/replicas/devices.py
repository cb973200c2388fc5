"""The machine a run is made on: its device and how it computes there, its versions, the commit of the source."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import boovae
from boovae.errors import InputError

if TYPE_CHECKING:
    from boovae.config import Settings

#: Steps from which compiling pays on a GPU.
COMPILE_STEPS = 20_000


def choose_device(name: str) -> torch.device:
    """Return the device called auto, cpu or cuda (or cuda:1 …)."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = named_device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{{device}} {name}: no CUDA device is available here; use {{device=cpu}}")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise InputError(f"{{device}} {name}: there are {count} CUDA devices here, counted from 0")
    return device


def named_device(name: str) -> torch.device:
    """Return the device of a name other than auto; it may be that of another machine."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"{{device}} {name} is unknown; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"{{device}} {name} is not supported; use auto, cpu or cuda")
    return device


@contextmanager
def matmul_precision(device: torch.device) -> Iterator[None]:
    """Let products use TF32 on a GPU, and only while we train; convolutions sum in the same order every time."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=True):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def one_thread(*, when: bool) -> Iterator[None]:
    """Compute on one core: tensors of small networks are not worth dividing, and results do not depend on the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if when else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compiling_pays(images: int, settings: Settings, device: torch.device) -> bool:
    """Whether compiling saves more than it costs, with so many training images in all tasks."""
    return device.type == "cuda" and settings.training.epochs * images / settings.training.batch_size >= COMPILE_STEPS


def compiles(choice: str, images: int, settings: Settings, device: torch.device) -> bool:
    """What `--compile` on, off or auto means for so many training images in all tasks."""
    return choice == "on" or (choice == "auto" and compiling_pays(images, settings, device))


def source_commit() -> str:
    """Return the commit of the source: what BOOVAE_COMMIT says, for copied files, or what its checkout says."""
    root = Path(__file__).parents[2]
    found = os.environ.get("BOOVAE_COMMIT", "")
    if not found and (root / ".git").exists() and shutil.which("git"):
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return found or "unknown"


def environment(device: torch.device, compiled: bool, command: str) -> dict[str, Any]:
    """Return what a run was made with, for `environment.json`."""
    return {
        "boovae": boovae.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({torch.get_num_threads()} threads)",
        "compiled": compiled,
        "commit": source_commit(),
        "command": command or " ".join(sys.argv),
    }
