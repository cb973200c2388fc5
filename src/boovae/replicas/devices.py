"""The device of a run and its numerical settings."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from boovae.config import Settings
from boovae.errors import InputError

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
        raise InputError(f"{{device}} {name}: there are {count} CUDA devices here, numbered from 0")
    return device


def named_device(name: str) -> torch.device:
    """Return the device of a name other than auto; it may belong to another machine."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"{{device}} {name} is unknown; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"{{device}} {name} is not supported; use auto, cpu or cuda")
    return device


@contextmanager
def matmul_precision(device: torch.device) -> Iterator[None]:
    """Use TF32 for matrix products on a GPU within this context; make convolutions deterministic."""
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
    """Compute on one core: small tensors are not worth splitting, and results do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if when else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compiles(choice: str | bool, images: int, settings: Settings, device: torch.device) -> bool:
    """Return whether to compile: as chosen (on, off), or with auto if it saves more time than it costs.

    `images` is the number of training images in all tasks.
    """
    if choice != "auto":
        return choice in ("on", True)
    return device.type == "cuda" and settings.training.epochs * images / settings.training.batch_size >= COMPILE_STEPS
