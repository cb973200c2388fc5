"""What has to be installed for what."""

from __future__ import annotations

import subprocess
import sys

BARE = """
import sys

for name in ("sklearn", "tyro", "matplotlib", "PIL", "jinja2", "pooch", "requests", "scipy"):
    sys.modules[name] = None  # as if it were not installed

import torch
from boovae.config import resolve
from boovae.data import Stream
from boovae.methods import METHODS
from boovae.training.trainer import Trainer
import boovae.run

class Nobody:
    def event(self, event): pass
    def block(self, trainer): pass
    def epoch(self, trainer, event): pass

stream = Stream.from_tasks([torch.rand(20, 6, 6), torch.rand(20, 6, 6)])
settings = resolve({"net": "mlp:8", "latent_dim": 2, "epochs": 1, "batch_size": 4})
trainer = Trainer(settings, stream.shape)
for task in stream:
    trainer.learn(task, Nobody())
print("learned", trainer.tasks_done)
"""


def test_training_needs_torch_numpy_rich_and_safetensors_alone() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "learned 2", done.stderr
