"""The options of a bench, and the folders it writes to. Quick to import, for the help of the command line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import boovae
from boovae.bench.published import FACES, FACES_FEATURES, distances
from boovae.errors import InputError, unknown_name
from boovae.files import write_file
from boovae.report.outputs import prepared

#: Format version of a folder of cells or results.
FORMAT = 1
#: The file that holds the version of a folder and the kind of its content.
MARKER = "bench.json"
#: Metrics to choose from; frechet means a distance on each of the networks (`--features`).
METRICS = ("nll", "diversity", "frechet")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """A study, what it runs on, where it computes, and where its results go."""

    study: str
    """paper, coreset-size or components."""
    datasets: tuple[str, ...] | None = None
    """Datasets; those of the study in the paper if not given."""
    methods: tuple[str, ...] | None = None
    """Methods; those of the study if not given. Write a variant as NAME=METHOD:setting=value,setting=value."""
    metrics: tuple[str, ...] | None = None
    """Metrics of tables and figures: nll, diversity, for faces also frechet; the CSV files have all."""
    features: tuple[str, ...] | None = None
    """Networks for distances; classifier if not given, for faces efficientnet-lite0 and classifier."""
    tasks: int = 10
    """Learn only the first N tasks; faces have four."""
    joint_tasks: tuple[int, ...] | None = None
    """Numbers of tasks to train joint on, a run for each; 2 5 10 and --tasks (faces 1 2 3 4) if not given."""
    replicas: int | None = None
    """Seeds of each cell, trained at once; 5 if not given."""
    seed: int = 0
    """The first seed."""
    quick: bool = False
    """A reduced matrix for a few minutes on two cores: the embedded digits, all methods, three seeds, fewer epochs."""
    config: Path | None = None
    """TOML file with settings for every cell."""
    executor: Literal["local", "ray", "slurm"] = "local"
    """Where cells are computed: processes on this machine, a Ray cluster, or Slurm."""
    workers: int | None = None
    """Cells at once; local: one per GPU, or one per core; ray and slurm: all of them, the cluster decides."""
    gpus: float | None = None
    """Share of a GPU for each cell, for example 0.25; 1 if not given and there are GPUs."""
    address: str | None = None
    """Ray: address of the cluster; one is started on this machine if not given."""
    partition: str | None = None
    """Slurm: partition of the jobs."""
    minutes: int | None = None
    """Slurm: time limit of a job, 60 if not given; a cell that needs longer is continued by another job."""
    only_tables: bool = False
    """Run nothing; write tables and figures of the finished cells."""
    out: Path = Path("runs/bench")
    """Folder of the cells; all studies can share one."""
    results: Path | None = None
    """Folder for tables, figures and the page; results/STUDY (or results/STUDY-quick) if not given."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training steps (torch.compile)."""
    quiet: bool = False
    """Print only the result."""
    json: bool = False
    """Print cells, failures, what is missing and findings as JSON."""
    data_dir: Path | None = None
    """Where the datasets lie; else BOOVAE_DATA, then the cache."""
    device: str = "auto"
    """Where to compute."""


@dataclass(frozen=True, kw_only=True)
class Request(BenchOptions):
    """The options of a bench with the defaults of its study filled in."""

    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    results: Path
    given: Mapping[str, Any]
    """The settings of every cell."""
    command: str
    """The command line."""

    def __post_init__(self) -> None:
        named = ", ".join(self.datasets)
        if len(set(self.datasets)) < len(self.datasets):
            raise InputError(f"{{datasets}} names a dataset twice: {named}")
        if len(set(map(file_name, self.datasets))) < len(self.datasets):
            raise InputError(f"{{datasets}}: results of {named} would have the same file name; rename a folder")
        for metric in (name for name in self.metrics or () if name not in METRICS):
            raise unknown_name("metric ({metrics})", metric, METRICS)
        distances(self.features or ())

    @property
    def shown(self) -> list[str]:
        """The metrics of tables and figures, by their names in the CSV files; with faces, distances too."""
        faces = any(dataset in FACES for dataset in self.datasets)
        asked = self.metrics or (METRICS if faces else ("nll", "diversity"))
        networks = list(dict.fromkeys(name for dataset in self.datasets for name in self.features_of(dataset)))
        return [name for metric in asked for name in (distances(networks) if metric == "frechet" else [metric])]

    def features_of(self, dataset: str) -> Sequence[str]:
        """Return the networks whose features are used to compare samples of a dataset."""
        return self.features or (FACES_FEATURES if dataset in FACES else ("classifier",))


def file_name(dataset: str) -> str:
    """Return the stem of the file names of a dataset."""
    return "".join(letter if letter.isalnum() or letter in "_-" else "-" for letter in dataset)


# --- the folders ----------------------------------------------------------------------------------------------------


def open_folder(folder: Path, argument: str, kind: str) -> None:
    """Create a folder for a bench to write to; refuse one of another version or with other content."""
    check_folder(folder, argument, kind)
    prepared(folder, argument)
    if not (folder / MARKER).exists():
        write_file(folder / MARKER, json.dumps(_mine(kind)).encode())


def check_folder(folder: Path, argument: str, kind: str) -> None:
    """Refuse a folder of another version or with other content; write nothing. The folder may be missing."""
    marker = folder / MARKER
    if not marker.exists():
        return
    try:
        found = dict(json.loads(marker.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"cannot read {marker}: {error}; remove only this file; the others are still good") from error
    both = [(name, found.get(name), value) for name, value in _mine(kind).items()]
    different = "; ".join(f"{name} {there} there, {here} here" for name, there, here in both if there != here)
    if different:
        raise InputError(
            f"{folder} ({{{argument}}}) was written by another version or another bench ({different}): "
            "choose another folder, or remove this one"
        )


def _mine(kind: str) -> dict[str, Any]:
    return {"format": FORMAT, "boovae": boovae.__version__, "holds": kind}
