"""What each command takes beside the settings of a run. Imports neither torch nor anything else that is slow."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from boovae.bench.request import BenchOptions
from boovae.config.section import AtLeastOne, Section, WholeNumber
from boovae.experiments.options import ReplayOptions, ToyOptions

# --- what several commands take -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OnDevice(Section):
    """Commands that compute."""

    device: Annotated[str, tyro.conf.arg(metavar="auto|cpu|cuda")] = "auto"
    """Where to compute."""


@dataclass(frozen=True, kw_only=True)
class ReadsData(Section):
    """Commands that read datasets."""

    data_dir: Path | None = None
    """Where the datasets lie; else BOOVAE_DATA, then the cache."""


@dataclass(frozen=True, kw_only=True)
class Compiles(Section):
    """Commands that train."""

    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training step (torch.compile): faster steps after some ten seconds; auto: where that pays."""


@dataclass(frozen=True, kw_only=True)
class PrintsNumbers(Section):
    """Commands whose result is numbers."""

    json: bool = False
    """Print the numbers as JSON."""


@dataclass(frozen=True, kw_only=True)
class ShowsProgress(Section):
    """Commands that take a while."""

    quiet: bool = False
    """Show nothing but the result."""


@dataclass(frozen=True, kw_only=True)
class Configured(OnDevice, ReadsData):
    """Commands that are given whole settings."""

    config: Path | None = None
    """TOML file with settings; flags win over it."""
    preset: Literal["paper"] | None = None
    """Settings that reproduce the paper's; the file and flags win over it."""

    #: Settings that a command has by itself, unless the file or a flag says otherwise.
    own_defaults: ClassVar[dict[str, Any]] = {}


@dataclass(frozen=True, kw_only=True)
class Measures(OnDevice, ReadsData, ShowsProgress, PrintsNumbers):
    """Commands that end with an evaluation."""

    metric: tuple[str, ...] = ("nll", "diversity", "frechet")
    """What to measure after each task: nll, diversity, frechet (or fid: distances on the features named below), or a
    metric of your own."""
    features: tuple[str, ...] = ("classifier",)
    """Networks for distances: classifier, efficientnet-lite0, inception, inception:FILE, torchscript:FILE."""


@dataclass(frozen=True, kw_only=True)
class Logs(Measures):
    """Commands that learn into a run folder."""

    log: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Also send numbers and pictures to these trackers (each an extra, boovae[tensorboard] …)."""


@dataclass(frozen=True, kw_only=True)
class OfRun(Section):
    """Commands about a run."""

    run: tyro.conf.Positional[Path]
    """Run folder."""


@dataclass(frozen=True, kw_only=True)
class OfReplica(OfRun):
    """Commands about one model of a run."""

    replica: WholeNumber = 0
    """Which replica, counting from 0."""


@dataclass(frozen=True, kw_only=True)
class OfTask(OfReplica):
    """Commands about one model, or what it knows of one task."""

    task: str | None = None
    """Only this task's part of the prior: its number, counting from 0, or its name."""


# --- the commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Train(Configured, Logs, Compiles):
    """Learn the tasks of a dataset one after another; writes a run folder with a report."""

    out: Path | None = None
    """Run folder; runs/DATASET-METHOD-HASH if not given."""
    detect_tasks: bool = False
    """Take the borders between tasks away and find them from the ELBO; what was found is kept as --borders."""
    detect_first: int = 100
    """With --detect-tasks: images from which the beginning of a task is learned; no shorter task is found."""
    resume: Literal["auto", "always", "never"] = "auto"
    """Continue a run that was stopped: if there is one, in any case, or never."""

    advanced: ClassVar = frozenset({"features", "json", "detect_tasks", "detect_first", "compile"})


@dataclass(frozen=True, kw_only=True)
class Extend(OfRun, Logs, Compiles):
    """Learn one more task from a run's checkpoint alone; the old data need not be there."""

    data: str | None = None
    """Images of the new task: folder:PATH, npz:PATH or a dataset; if not given, the next task of the run's own."""
    name: str | None = None
    """What to call the task; as its file, folder or dataset if not given."""


@dataclass(frozen=True, kw_only=True)
class Tune(Configured, PrintsNumbers, Compiles):
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


@dataclass(frozen=True, kw_only=True)
class Eval(OfRun, Measures):
    """Measure a run's model again, for example with more samples."""

    samples: int | None = None
    """Importance samples per test image; as in training if not given."""
    generated: int | None = None
    """Generated images for diversity and Fréchet distance; as in training if not given."""


@dataclass(frozen=True, kw_only=True)
class Sample(OfTask, OnDevice):
    """Draw images from a run's model into a picture or an array."""

    out: Path = Path("samples.png")
    """A picture of all of them (.png), or their pixels (.npy): (n, height, width), colours last."""
    n: AtLeastOne = 64
    """How many images."""
    seed: int = 0
    """Another number draws other images."""


@dataclass(frozen=True, kw_only=True)
class Inspect(OfTask, OnDevice, PrintsNumbers):
    """Show every stored component of a run: its pictures, its weight, and what dropping it would cost."""

    out: Path = Path("components.png")
    """The picture to write: a row of pseudo-inputs per task, beneath it what the decoder makes of them."""
    prune: float | None = None
    """Drop components that cost less than this many nats to drop, in all replicas, and keep the run without them."""


@dataclass(frozen=True, kw_only=True)
class Export(OfTask):
    """Take a run's model elsewhere: encoder, decoder and the sampler of its prior as files that need no boovae."""

    format: Literal["safetensors", "torch-export", "onnx"] = "safetensors"
    """Weights alone, programs for torch, or programs for ONNX (which needs the extra boovae[onnx])."""
    out: Path | None = None
    """Folder to write to; RUN/export/FORMAT if not given."""


@dataclass(frozen=True, kw_only=True)
class Toy(ToyOptions, OnDevice, PrintsNumbers):
    """Boosting on twelve Gaussians and on a ring: the literal objective runs away, three safeguards hold it."""

    out: Path = Path("toy")
    """Folder for toy.png and toy.csv."""


@dataclass(frozen=True, kw_only=True)
class LatentMap(Configured, ShowsProgress, PrintsNumbers, Compiles):
    """Show prior and aggregated posterior of a plane of latents, for a standard normal and for a method's prior."""

    own_defaults: ClassVar = {"latent_dim": 2}
    out: Path = Path("latent-map")
    """Folder for latent_map.png and latent_map.csv."""


@dataclass(frozen=True, kw_only=True)
class Replay(Configured, ReplayOptions, ShowsProgress, PrintsNumbers, Compiles):
    """Teach a classifier tasks one after another while generators stand in for the old images."""

    own_defaults: ClassVar = {"classes_per_task": 2}
    out: Path = Path("replay")
    """Folder for replay.png and replay.csv, and for what is kept of the curves: the same command continues there."""


@dataclass(frozen=True, kw_only=True)
class Report(Section):
    """Write one self-contained HTML page about one run, or about several side by side."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    out: Path | None = None
    """The page to write; RUN/report.html if not given (one run)."""
    csv: Path | None = None
    """Also write the numbers of a run, every seed, task and metric, to this file."""


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions, Section):
    """Run the paper's experiments cell by cell and put the numbers beside the paper's; finished cells are skipped."""

    study: tyro.conf.Positional[str]
    """paper (the NLL and diversity tables; of faces, distances), coreset-size or components."""


@dataclass(frozen=True, kw_only=True)
class Serve(OfReplica, OnDevice):
    """Open a small page on this machine to play with a run's model."""

    host: str = "127.0.0.1"
    """Address to listen on; this one is reached from this machine alone."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    samples: AtLeastOne = 1000
    """Importance samples for the likelihood of an own image."""


@dataclass(frozen=True, kw_only=True)
class Datasets(ReadsData):
    """List the datasets: what they are, where they come from, whether they are on this disk; or pack one."""

    pack: str | None = None
    """Write this dataset, decoded and split, into one NumPy file instead."""
    out: Path | None = None
    """The file to write; DATASET.npz if not given."""


@dataclass(frozen=True)
class Methods(Section):
    """List the continual-learning methods."""


def command_line() -> str:
    """Return what was typed, without the path of the program on this machine."""
    return shlex.join(["boovae", *sys.argv[1:]])
