"""What has to be installed for what."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import boovae

BARE = """
import sys

for name in ("sklearn", "tyro", "matplotlib", "PIL", "jinja2", "pooch", "requests", "scipy"):
    sys.modules[name] = None  # as if it were not installed

import torch
from boovae.methods import resolve
from boovae.data import Stream
from boovae.methods import METHODS
from boovae.training.trainer import Trainer
import boovae.runs.train

class Nobody:
    def event(self, event): pass
    def block(self, trainer): pass
    def epoch(self, trainer, event): pass

stream = Stream.from_tasks([torch.rand(20, 6, 6), torch.rand(20, 6, 6)])
settings = resolve({"net": "mlp:8", "latent_dim": 2, "epochs": 1, "batch_size": 4})
trainer = Trainer(settings, stream.spec)
for task in stream:
    trainer.learn(task, Nobody())
print("learned", trainer.tasks_done)
"""


def test_training_needs_torch_numpy_rich_safetensors_msgspec_and_tomli_w_alone() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "learned 2", done.stderr


PUBLIC = """
import sys
import boovae

assert not {"torch", "numpy", "sklearn"} & set(sys.modules), "import boovae must stay cheap"
assert set(boovae.__all__) <= set(dir(boovae))
for name in boovae.__all__:
    assert getattr(boovae, name) is not None, name
from boovae import BooVAE, Stream, Trainer
try:
    boovae.BoVAE
except AttributeError as error:
    print(error)
"""


def test_importing_the_package_imports_nothing_heavy_until_a_name_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", PUBLIC], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "module 'boovae' has no attribute 'BoVAE'", done.stderr


HELP = """
import sys
from boovae.cli.main import main

main(["--help"])
print({"torch", "numpy", "sklearn"} & set(sys.modules), file=sys.stderr)
"""


def test_help_answers_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False, timeout=60)
    assert "commands:" in done.stdout
    assert done.stderr.strip() == "set()"


def test_every_file_beside_the_sources_is_installed_with_them() -> None:
    source = Path(boovae.__file__).parent
    project = tomllib.loads((source.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["boovae"]
    others = {path for path in source.rglob("*.*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others
    assert others == {path for pattern in patterns for path in source.glob(pattern)}
    assert all(any(source.glob(pattern)) for pattern in patterns)
