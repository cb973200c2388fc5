"""What a bench can be asked for. Imports nothing that is slow: the command line's help shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """A study, what it runs on, where it computes, and where its results go."""

    study: str
    """paper, coreset-size or components."""
    datasets: tuple[str, ...] | None = None
    """Datasets; those of the study in the paper if not given."""
    methods: tuple[str, ...] | None = None
    """Methods; those of the study if not given. A variant of one is NAME=METHOD:setting=value,setting=value."""
    metrics: tuple[str, ...] | None = None
    """Of which metrics tables and figures are made: nll, diversity, for faces frechet; the CSV files have all."""
    features: tuple[str, ...] | None = None
    """Networks for distances; classifier if not given, and for faces efficientnet-lite0 before it."""
    tasks: int = 10
    """Learn only the first N tasks; faces have four."""
    joint_tasks: tuple[int, ...] | None = None
    """After how many tasks joint is trained, a run for each; 2 5 10 and --tasks (faces 1 2 3 4) if not given."""
    replicas: int | None = None
    """Seeds of each cell, trained at once; 5 if not given."""
    seed: int = 0
    """The first seed."""
    quick: bool = False
    """A reduced matrix for a few minutes on two cores: the embedded digits, all methods, three seeds, fewer epochs."""
    config: Path | None = None
    """TOML file with settings that hold in every cell."""
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
    """Run nothing: write tables and figures of the cells that are finished."""
    out: Path = Path("runs/bench")
    """Folder of the cells; all studies can share one."""
    results: Path | None = None
    """Folder for tables, figures and the page; results/STUDY (or results/STUDY-quick) if not given."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the training steps (torch.compile)."""
    quiet: bool = False
    """Show nothing but the result."""
    json: bool = False
    """Print cells, failures, what is missing and findings as JSON."""
    data_dir: Path | None = None
    """Where the datasets lie; else BOOVAE_DATA, then the cache."""
    device: str = "auto"
    """Where to compute."""
