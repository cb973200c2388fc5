"""What each command of the command line takes. Imports neither torch nor anything else that is slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from boovae.config import Settings

Device = Annotated[str, tyro.conf.arg(metavar="auto|cpu|cuda")]


@dataclass(frozen=True, kw_only=True)
class Computes:
    """What every command takes that reads images and computes."""

    data_dir: Path | None = None
    """Where the datasets lie; else BOOVAE_DATA, then the cache."""
    device: Device = "auto"
    """Where to compute."""


@dataclass(frozen=True, kw_only=True)
class Configured(Computes):
    """What every command takes that is given whole settings."""

    config: Path | None = None
    """TOML file with settings; flags win over it."""
    preset: Literal["paper"] | None = None
    """Settings that reproduce the paper's; the file and flags win over it."""


@dataclass(frozen=True, kw_only=True)
class Measures(Computes):
    """What every command takes that ends with an evaluation."""

    metric: tuple[Literal["nll", "diversity", "frechet", "fid"], ...] = ("nll", "diversity", "frechet")
    """What to measure after each task; frechet and fid both mean distances on the features named below."""
    features: tuple[str, ...] = ("classifier",)
    """Networks for distances: classifier, efficientnet-lite0, inception, inception:FILE, torchscript:FILE."""
    quiet: bool = False
    """Show nothing but the result."""
    json: bool = False
    """Print the last evaluation as JSON."""


@dataclass(frozen=True)
class Train(Configured, Measures, Settings):
    """Learn the tasks of a dataset one after another; writes a run folder with a report."""

    out: Path | None = None
    """Run folder; runs/DATASET-METHOD-HASH if not given."""
    resume: Literal["auto", "always", "never"] = "auto"
    """Continue a run that was stopped: if there is one, in any case, or never."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training step (torch.compile): faster steps after some ten seconds."""


@dataclass(frozen=True)
class Extend(Measures):
    """Learn one more task from a run's checkpoint alone; the old data need not be there."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    data: str | None = None
    """Images of the new task: folder:PATH, npz:PATH or a dataset; if not given, the next task of the run's own."""
    name: str | None = None
    """What to call the task; as its file, folder or dataset if not given."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training step (torch.compile); auto: as the run was trained."""


@dataclass(frozen=True)
class Tune(Configured, Settings):
    """Choose a method's strength on validation data; all candidates train at once, as replicas."""

    setting: str | None = None
    """The setting to choose, for example ewc_strength; the method's own if not given."""
    values: tuple[float, ...] | None = None
    """Values to try; a spread of them if not given."""
    seeds_each: int = 2
    """Seeds for each value."""
    recipe: Path | None = None
    """TOML file into which the winner is written, in the section of the method."""
    compile: bool = False
    """Compile the training step (torch.compile)."""
    json: bool = False
    """Print the scores as JSON."""


@dataclass(frozen=True)
class Eval(Measures):
    """Measure a run's model again, for example with more samples."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    samples: int | None = None
    """Importance samples per test image; as in training if not given."""
    generated: int | None = None
    """Generated images for diversity and Fréchet distance; as in training if not given."""


@dataclass(frozen=True)
class Sample:
    """Draw images from a run's model into a PNG file."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    out: Path = Path("samples.png")
    """The picture to write."""
    n: int = 64
    """How many images."""
    task: int | None = None
    """Only from this task's part of the prior (counting from 0)."""
    replica: int = 0
    """Which replica draws."""
    device: Device = "auto"
    """Where to compute."""


@dataclass(frozen=True)
class Inspect:
    """Show every stored component of a run: its pictures, its weight, and what dropping it would cost."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    out: Path = Path("components.png")
    """The picture to write: a row of pseudo-inputs per task, beneath it what the decoder makes of them."""
    replica: int = 0
    """Which replica to look at."""
    task: int | None = None
    """Only the components of this task (counting from 0)."""
    prune: float | None = None
    """Drop components that cost less than this many nats to drop, in all replicas, and keep the run without them."""
    device: Device = "auto"
    """Where to compute."""
    json: bool = False
    """Print the numbers as JSON."""


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about one run, or about several side by side."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    out: Path | None = None
    """The page to write; RUN/report.html if not given (one run)."""
    csv: Path | None = None
    """Also write the numbers of a run, every seed, task and metric, to this file."""


@dataclass(frozen=True)
class Datasets:
    """List the datasets: what they are, where they come from, whether they are on this disk; or pack one."""

    data_dir: Path | None = None
    """Where the datasets lie; else BOOVAE_DATA, then the cache."""
    pack: str | None = None
    """Write this dataset, decoded and split, into one NumPy file instead."""
    out: Path | None = None
    """The file to write; DATASET.npz if not given."""


@dataclass(frozen=True)
class Methods:
    """List the continual-learning methods."""
