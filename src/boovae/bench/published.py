"""The paper's numbers, its names of methods and datasets, and the methods and datasets that a bench compares."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from boovae.errors import InputError

if TYPE_CHECKING:
    from boovae.report.findings import PublishedNumber

DATASETS = ("mnist", "notmnist", "fashion_mnist")
FACES = ("celeba", "celeba64")
#: Default networks for comparing faces: one trained on ImageNet, and the dataset's own classifier.
FACES_FEATURES = ("efficientnet-lite0", "classifier")
#: Number of tasks of the face datasets.
FACES_TASKS = 4
#: Methods, as the paper names them.
METHOD_NAMES = {
    "standard": "Standard",
    "ewc": "EWC",
    "vcl": "VCL",
    "coreset": "Coreset",
    "mog": "MoG",
    "boo": "Boo",
    "boo+vcl": "Boo+VCL",
    "multihead": "Multihead",
    "multihead+ewc": "Multihead+EWC",
}
#: Methods, as its table of faces names them.
FACES_NAMES = {
    "ewc": "EWC",
    "multihead+ewc": "Multihead+EWC",
    "vcl": "VCL",
    "multihead+vcl": "Multihead+VCL",
    "coreset": "Random Coreset (40)",
    "coreset-80": "Random Coreset (80)",
    "boo": "Boo (40 comp.)",
}
#: Columns of the bench: the paper's methods in its order, then those that it does not have.
METHODS = (*METHOD_NAMES, "multihead+vcl", "boo+ewc", "replay", "boo+distill", "joint")
#: The columns for faces: those of the paper's table of distances, then ours.
FACES_METHODS = (
    *(name.replace("coreset-80", "coreset-80=coreset:coreset_images=80") for name in FACES_NAMES),
    "boo+distill",
    "joint",
)
DATASET_NAMES = {"mnist": "MNIST", "notmnist": "notMNIST", "fashion_mnist": "Fashion-MNIST", "celeba": "CelebA"}
#: Datasets, as the files with its numbers name them.
PRINTED_NAMES = DATASET_NAMES | {"fashion_mnist": "fashionMNIST"}
#: Decimals in the paper, by metric; distances have one.
DECIMALS = {"nll": 1, "diversity": 2}


@dataclass(frozen=True)
class Printed:
    """A number as the paper prints it."""

    mean: float
    std: float
    text: str


def dataset_title(dataset: str) -> str:
    """Return the display name of a dataset.

    >>> dataset_title("fashion_mnist"), dataset_title("npz:mine.npz")
    ('Fashion-MNIST', 'npz:mine.npz')
    """
    return DATASET_NAMES.get(dataset, dataset)


def is_distance(metric: str) -> bool:
    """Whether a metric is a distance on the features of a network, judged by its name.

    >>> is_distance("frechet_classifier"), is_distance("fid"), is_distance("nll")
    (True, True, False)
    """
    return metric == "fid" or metric.startswith("frechet_")


def comparable(metric: str) -> bool:
    """Whether our number can be compared with the paper's: its FIDs use other features and more faces."""
    return not is_distance(metric)


def distances(features: Sequence[str]) -> list[str]:
    """Return the names of the distances on these networks in the CSV files.

    >>> distances(["classifier", "inception:weights.pth"])
    ['frechet_classifier', 'fid']
    """
    kinds = [name.partition(":")[0] for name in features]
    if "torchscript" in kinds:
        raise InputError("{features}: tables of a bench cannot have torchscript:FILE; use `boovae eval` on its runs")
    return ["fid" if kind == "inception" else f"frechet_{kind}" for kind in kinds]


@functools.cache
def numbers(metric: str) -> dict[tuple[str, str, int], Printed]:
    """Return the paper's table of a metric by (dataset, method, tasks seen), in our names; empty if it has none.

    Any distance has the paper's FIDs beside it, although they use other features (`comparable`).
    """
    path = resources.files("boovae.bench") / "printed" / f"{'fid' if is_distance(metric) else metric}.csv"
    if not path.is_file():
        return {}
    datasets = {theirs: ours for ours, theirs in PRINTED_NAMES.items()}
    methods = {theirs: ours for ours, theirs in (FACES_NAMES if is_distance(metric) else METHOD_NAMES).items()}
    rows = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    return {
        (datasets[row["dataset"]], methods[row["method"]], int(row["num_tasks"])): Printed(
            float(row["mean"]), float(row["std"]), f"{row['mean']} ({row['std']})"
        )
        for row in rows
    }


def for_reports() -> dict[tuple[str, str, str, int], PublishedNumber]:
    """Return the numbers that a report shows beside a run's, by metric, dataset, method and tasks seen."""
    from boovae.report.findings import PublishedNumber  # late: `boovae --help` needs neither reports nor numpy

    return {
        (metric, *key): PublishedNumber(number.mean, number.std, METHOD_NAMES[key[1]], decimals)
        for metric, decimals in DECIMALS.items()
        for key, number in numbers(metric).items()
    }
