"""The paper's numbers, what its methods and datasets are called there, and the bench that puts ours beside them."""

from __future__ import annotations

import csv
import functools
import io
from dataclasses import dataclass
from importlib import resources

#: Columns of the bench, in the paper's order, then those the paper does not have.
METHODS = (
    "standard",
    "ewc",
    "vcl",
    "coreset",
    "mog",
    "boo",
    "boo+vcl",
    "multihead",
    "multihead+ewc",
    "multihead+vcl",
    "boo+ewc",
    "replay",
    "boo+distill",
    "joint",
)
DATASETS = ("mnist", "notmnist", "fashion_mnist")
#: What the paper calls them.
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
DATASET_NAMES = {"mnist": "MNIST", "notmnist": "notMNIST", "fashion_mnist": "fashionMNIST"}
#: Decimals the paper prints, by metric.
DECIMALS = {"nll": 1, "diversity": 2, "frechet": 1}


@dataclass(frozen=True)
class Printed:
    """A number as the paper prints it."""

    mean: float
    std: float
    text: str


@functools.cache
def numbers(metric: str) -> dict[tuple[str, str, int], Printed]:
    """Return the paper's table of a metric by (dataset, method, tasks seen), in our names; empty if it has none."""
    path = resources.files("boovae.experiments") / "printed" / f"{metric}.csv"
    if not path.is_file():
        return {}
    datasets = {theirs: ours for ours, theirs in DATASET_NAMES.items()}
    methods = {theirs: ours for ours, theirs in METHOD_NAMES.items()}
    rows = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    return {
        (datasets[row["dataset"]], methods[row["method"]], int(row["num_tasks"])): Printed(
            float(row["mean"]), float(row["std"]), f"{row['mean']} ({row['std']})"
        )
        for row in rows
    }
