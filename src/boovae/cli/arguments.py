"""What each command takes beside the settings of a run. Imports neither torch nor anything else that is slow."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from boovae.bench.options import BenchOptions
from boovae.experiments.options import ReplayOptions, ToyOptions

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

    #: Settings that a command has by itself, unless the file or a flag says otherwise.
    own_defaults: ClassVar[dict[str, Any]] = {}
    #: What the help shows only when it is asked for all.
    advanced: ClassVar[frozenset[str]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Measures(Computes):
    """What every command takes that ends with an evaluation."""

    metric: tuple[str, ...] = ("nll", "diversity", "frechet")
    """What to measure after each task: nll, diversity, frechet (or fid: distances on the features named below), or a
    metric of your own."""
    features: tuple[str, ...] = ("classifier",)
    """Networks for distances: classifier, efficientnet-lite0, inception, inception:FILE, torchscript:FILE."""
    quiet: bool = False
    """Show nothing but the result."""
    json: bool = False
    """Print the last evaluation as JSON."""


@dataclass(frozen=True, kw_only=True)
class Logs(Measures):
    """What every command takes that learns."""

    log: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Also send numbers and pictures to these trackers (each an extra, boovae[tensorboard] …)."""


@dataclass(frozen=True)
class Train(Configured, Logs):
    """Learn the tasks of a dataset one after another; writes a run folder with a report."""

    out: Path | None = None
    """Run folder; runs/DATASET-METHOD-HASH if not given."""
    detect_tasks: bool = False
    """Take the borders between tasks away and find them from the ELBO; what was found is kept as --borders."""
    detect_first: int = 100
    """With --detect-tasks: images from which the beginning of a task is learned; no shorter task is found."""
    resume: Literal["auto", "always", "never"] = "auto"
    """Continue a run that was stopped: if there is one, in any case, or never."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training step (torch.compile): faster steps after some ten seconds."""

    advanced: ClassVar = frozenset({"features", "json", "detect_tasks", "detect_first", "compile"})


@dataclass(frozen=True)
class Extend(Logs):
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
class Tune(Configured):
    """Choose a method's strength on validation data; all candidates train at once, as replicas."""

    own_defaults: ClassVar = {"samples": 500}
    setting: str | None = None
    """The setting to choose, for example ewc_strength; the method's own if not given."""
    values: tuple[float, ...] | None = None
    """Values to try; a spread of them if not given."""
    seeds_each: int = 2
    """Seeds for each value."""
    recipe: Path | None = None
    """TOML file into which the winner is written, in the section of the method."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training step (torch.compile): faster steps after some ten seconds."""
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
    """Draw images from a run's model into a picture or an array."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    out: Path = Path("samples.png")
    """A picture of all of them (.png), or their pixels (.npy): (n, height, width), colours last."""
    n: int = 64
    """How many images."""
    seed: int = 0
    """Another number draws other images."""
    task: str | None = None
    """Only from this task's part of the prior: its number, counting from 0, or its name."""
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
    task: str | None = None
    """Only the components of this task: its number, counting from 0, or its name."""
    prune: float | None = None
    """Drop components that cost less than this many nats to drop, in all replicas, and keep the run without them."""
    device: Device = "auto"
    """Where to compute."""
    json: bool = False
    """Print the numbers as JSON."""


@dataclass(frozen=True)
class Export:
    """Take a run's model elsewhere: encoder, decoder and the sampler of its prior as files that need no boovae."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    format: Literal["safetensors", "torch-export", "onnx"] = "safetensors"
    """Weights alone, programs for torch, or programs for ONNX (which needs the extra boovae[onnx])."""
    out: Path | None = None
    """Folder to write to; RUN/export/FORMAT if not given."""
    task: str | None = None
    """Sample only from this task's part of the prior: its number, counting from 0, or its name."""
    replica: int = 0
    """Which replica to take."""


@dataclass(frozen=True)
class Toy(ToyOptions):
    """Boosting on twelve Gaussians and on a ring: the literal objective runs away, three safeguards hold it."""

    out: Path = Path("toy")
    """Folder for toy.png and toy.csv."""
    device: Device = "auto"
    """Where to compute."""
    json: bool = False
    """Print the numbers as JSON."""


@dataclass(frozen=True)
class LatentMap(Configured):
    """Show prior and aggregated posterior of a plane of latents, for a standard normal and for a method's prior."""

    own_defaults: ClassVar = {"latent_dim": 2}
    out: Path = Path("latent-map")
    """Folder for latent_map.png and latent_map.csv."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training step (torch.compile): faster steps after some ten seconds."""
    quiet: bool = False
    """Show nothing but the result."""
    json: bool = False
    """Print the numbers as JSON."""


@dataclass(frozen=True)
class Replay(Configured, ReplayOptions):
    """Teach a classifier tasks one after another while generators stand in for the old images."""

    own_defaults: ClassVar = {"classes_per_task": 2}
    out: Path = Path("replay")
    """Folder for replay.png and replay.csv, and for what is kept of the curves: the same command goes on from there."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training step (torch.compile): faster steps after some ten seconds."""
    quiet: bool = False
    """Show nothing but the result."""
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


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions):
    """Run the paper's experiments cell by cell and put the numbers beside the paper's; finished cells are skipped."""

    study: tyro.conf.Positional[str]
    """paper (the NLL and diversity tables; of faces, distances), coreset-size or components."""


@dataclass(frozen=True)
class Serve:
    """Open a small page on this machine to play with a run's model."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    host: str = "127.0.0.1"
    """Address to listen on; this one is reached from this machine alone."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    replica: int = 0
    """Which replica to play with."""
    samples: int = 1000
    """Importance samples for the likelihood of an own image."""
    device: Device = "auto"
    """Where to compute."""


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


def command_line() -> str:
    """Return what was typed, without the path of the program on this machine."""
    return shlex.join(["boovae", *sys.argv[1:]])
