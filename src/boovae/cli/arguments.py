"""The arguments of each command, besides the settings of a run. Imports neither torch nor anything else slow."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from boovae.bench.request import BenchOptions
from boovae.config.section import AtLeastOne, Section, WholeNumber
from boovae.experiments.options import ReplayOptions, ToyOptions

# --- shared arguments -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OnDevice(Section):
    """Commands that compute."""

    device: Annotated[str, tyro.conf.arg(metavar="auto|cpu|cuda")] = "auto"
    """Device to compute on."""


@dataclass(frozen=True, kw_only=True)
class ReadsData(Section):
    """Commands that read datasets."""

    data_dir: Path | None = None
    """Folder of the datasets; if not given, BOOVAE_DATA, then the cache."""


@dataclass(frozen=True, kw_only=True)
class Compiles(Section):
    """Commands that train."""

    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training step (torch.compile): takes some ten seconds, then steps are faster; auto: if worthwhile."""


@dataclass(frozen=True, kw_only=True)
class PrintsNumbers(Section):
    """Commands whose result is numbers."""

    json: bool = False
    """Print the numbers as JSON."""


@dataclass(frozen=True, kw_only=True)
class ShowsProgress(Section):
    """Commands that take a while."""

    quiet: bool = False
    """Print only the result."""


@dataclass(frozen=True, kw_only=True)
class Configured(OnDevice, ReadsData):
    """Commands that take all settings of a run."""

    config: Path | None = None
    """TOML file with settings; flags override it."""
    preset: Literal["paper", "tuned"] | None = None
    """Settings of the paper, or those tuned for its datasets; the file and flags override them. Without a preset, what
    is not given is chosen from the data."""

    #: Defaults that differ for this command; the file and flags override them.
    own_defaults: ClassVar[dict[str, Any]] = {}


@dataclass(frozen=True, kw_only=True)
class Measures(OnDevice, ReadsData, ShowsProgress, PrintsNumbers):
    """Commands that end with an evaluation."""

    metric: tuple[str, ...] = ("nll", "diversity", "frechet")
    """What to measure after each task: nll, diversity, frechet (or fid: distances on the feature networks below), or a
    custom metric."""
    features: tuple[str, ...] = ("classifier",)
    """Feature networks for distances: classifier, efficientnet-lite0, inception, inception:FILE, torchscript:FILE."""


@dataclass(frozen=True, kw_only=True)
class LooksBack(Section):
    """Commands that measure a run on the images it has learned."""

    moved: tuple[Path, Path] | None = None
    """Own data that have moved: the folder or file as the run recorded it, or a folder above it; then its new place."""


@dataclass(frozen=True, kw_only=True)
class Logs(Measures):
    """Commands that train into a run folder."""

    log: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Also send numbers and pictures to these trackers (each an extra, boovae[tensorboard] …)."""


@dataclass(frozen=True, kw_only=True)
class OfRun(Section):
    """Commands about a run."""

    run: tyro.conf.Positional[Path]
    """Run folder."""


@dataclass(frozen=True, kw_only=True)
class OfReplica(OfRun):
    """Commands about one replica of a run."""

    replica: WholeNumber = 0
    """Index of the replica, from 0."""


@dataclass(frozen=True, kw_only=True)
class OfTask(OfReplica):
    """Commands about one replica, or its part for one task."""

    task: str | None = None
    """Only this task's part of the prior: the task's number, from 0, or its name."""


# --- the commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Train(Configured, Logs, Compiles):
    """Learn the tasks of a dataset one after another; writes a run folder with a report."""

    out: Path | None = None
    """Run folder; runs/DATASET-METHOD-HASH if not given."""
    detect_tasks: bool = False
    """Ignore the borders between tasks and detect them from the ELBO; those found are recorded as --borders."""
    detect_first: int = 100
    """With --detect-tasks: number of images to learn the start of a task from, and the shortest task it can find."""
    resume: Literal["auto", "always", "never"] = "auto"
    """Continue a stopped run: if there is one, always (an error without one), or never."""

    advanced: ClassVar = frozenset({"features", "json", "detect_tasks", "detect_first", "compile"})


@dataclass(frozen=True, kw_only=True)
class Extend(OfRun, LooksBack, Logs, Compiles):
    """Learn one more task from a run's checkpoint alone; the old data are not needed."""

    data: str | None = None
    """Images of the new task: folder:PATH, npz:PATH or a dataset; if not given, the next task of the run's dataset."""
    name: str | None = None
    """Name of the task; that of its file, folder or dataset if not given."""


@dataclass(frozen=True, kw_only=True)
class Tune(Configured, PrintsNumbers, Compiles):
    """Choose a method's strength on validation data; all candidates train at once, as replicas."""

    own_defaults: ClassVar = {"samples": 500}
    setting: str | None = None
    """The setting to choose, for example ewc_strength; not needed if the method has only one."""
    values: tuple[float, ...] | None = None
    """Values to try; the method's list if not given."""
    seeds_each: int = 2
    """Number of seeds for each value."""
    recipe: Path | None = None
    """TOML file to write the winner to, in the section of the method."""


@dataclass(frozen=True, kw_only=True)
class Eval(OfRun, LooksBack, Measures):
    """Evaluate a run's model again, for example with more samples."""

    samples: int | None = None
    """Importance samples per test image; as in training if not given."""
    fit_posterior: bool = False
    """Score images that the encoder describes poorly again, with a posterior fitted to each, as own data always are."""
    generated: int | None = None
    """Generated images for diversity and Fréchet distance; as in training if not given."""


@dataclass(frozen=True, kw_only=True)
class Sample(OfTask, OnDevice):
    """Sample images from a run's model into a picture or an array."""

    out: Path = Path("samples.png")
    """A grid of all images (.png), or their pixels (.npy): (n, height, width), colours last."""
    n: AtLeastOne = 64
    """Number of images."""
    seed: int = 0
    """Seed of the sampling."""


@dataclass(frozen=True, kw_only=True)
class Inspect(OfTask, OnDevice, PrintsNumbers):
    """Show every stored component of a run: its pictures, its weight, and the cost of dropping it."""

    out: Path = Path("components.png")
    """The picture to write: per task a row of pseudo-inputs above a row of their decoded images."""
    prune: float | None = None
    """Drop components that cost less than this many nats, in all replicas, and update the run folder."""


@dataclass(frozen=True, kw_only=True)
class Export(OfTask):
    """Export a run's model: encoder, decoder and the sampler of its prior, as files that do not need boovae."""

    format: Literal["safetensors", "torch-export", "onnx"] = "safetensors"
    """Weights alone, programs for torch, or programs for ONNX (which needs the extra boovae[onnx])."""
    out: Path | None = None
    """Folder to write to; RUN/export/FORMAT if not given."""


@dataclass(frozen=True, kw_only=True)
class Toy(ToyOptions, OnDevice, PrintsNumbers):
    """Boost mixtures on twelve Gaussians and on a ring: the literal objective diverges, three safeguards prevent it."""

    out: Path = Path("toy")
    """Folder for toy.png and toy.csv."""


@dataclass(frozen=True, kw_only=True)
class LatentMap(Configured, ShowsProgress, PrintsNumbers, Compiles):
    """Plot prior and aggregated posterior of a 2-D latent space, for a standard normal and for a method's prior."""

    own_defaults: ClassVar = {"latent_dim": 2}
    out: Path = Path("latent-map")
    """Folder for latent_map.png and latent_map.csv."""


@dataclass(frozen=True, kw_only=True)
class Replay(Configured, ReplayOptions, ShowsProgress, PrintsNumbers, Compiles):
    """Train a classifier on tasks one after another, with generated images in place of the old ones."""

    own_defaults: ClassVar = {"classes_per_task": 2}
    out: Path = Path("replay")
    """Folder for replay.png, replay.csv and finished curves; the same command continues from it."""


@dataclass(frozen=True, kw_only=True)
class Report(Section):
    """Write a self-contained HTML report about one run, or about several side by side."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    out: Path | None = None
    """The file to write; RUN/report.html if not given (one run)."""
    csv: Path | None = None
    """Also write the numbers of a run, for every seed, task and metric, to this CSV file."""


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions, Section):
    """Run the paper's experiments cell by cell and compare the numbers with the paper's; skip finished cells."""

    study: tyro.conf.Positional[str]
    """paper (tables of NLL and diversity; for faces, of distances), coreset-size or components."""


@dataclass(frozen=True, kw_only=True)
class Serve(OfReplica, OnDevice):
    """Serve a small local page to play with a run's model."""

    host: str = "127.0.0.1"
    """Address to listen on; the default can be reached from this machine only."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    samples: AtLeastOne = 1000
    """Importance samples for the likelihood of an uploaded image."""


@dataclass(frozen=True, kw_only=True)
class Datasets(ReadsData):
    """List the datasets, their licences and whether they are on this disk; or pack one into a file."""

    pack: str | None = None
    """Instead write this dataset, decoded and split, into one NumPy file."""
    out: Path | None = None
    """The file to write; DATASET.npz if not given."""


@dataclass(frozen=True)
class Methods(Section):
    """List the continual-learning methods."""


def command_line() -> str:
    """Return the command as typed, without the path of the program."""
    return shlex.join(["boovae", *sys.argv[1:]])
