"""Record of what made a run: versions, device, source commit, command."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import boovae


def source_commit() -> str:
    """Return the commit of the source: BOOVAE_COMMIT if set (for copied files), otherwise that of the checkout."""
    root = Path(__file__).parents[3]
    found = os.environ.get("BOOVAE_COMMIT", "")
    if not found and (root / ".git").exists() and shutil.which("git"):
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return found or "unknown"


def environment(device: torch.device, compiled: bool, command: str) -> dict[str, Any]:
    """Return the content of `environment.json`."""
    cpu = f"cpu ({torch.get_num_threads()} threads)"
    return {
        "boovae": boovae.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "compiled": compiled,
        "commit": source_commit(),
        "command": command or " ".join(sys.argv),
    }
