"""The paper's numbers, and the methods and datasets that a bench compares."""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from boovae.errors import InputError

if TYPE_CHECKING:
    from boovae.report.findings import PublishedNumber

DATASETS = ("mnist", "notmnist", "fashion_mnist")
FACES = ("celeba", "celeba64")
#: Default networks for comparing faces: one trained on ImageNet, and the dataset's own classifier.
FACES_FEATURES = ("efficientnet-lite0", "classifier")
#: Number of tasks of the face datasets.
FACES_TASKS = 4
#: The methods of the paper's tables, and those of its table of faces (`coreset-80` keeps 80 images per task, not 40).
PAPER_METHODS = ("standard", "ewc", "vcl", "coreset", "mog", "boo", "boo+vcl", "multihead", "multihead+ewc")
FACES_PAPER_METHODS = ("ewc", "multihead+ewc", "vcl", "multihead+vcl", "coreset", "coreset-80", "boo")
#: Columns of the bench: the paper's methods, then those that it does not have; the same for faces.
METHODS = (*PAPER_METHODS, "multihead+vcl", "boo+ewc", "replay", "boo+distill", "joint")
FACES_METHODS = (*FACES_PAPER_METHODS[:5], "coreset-80=coreset:coreset_images=80", "boo", "boo+distill", "joint")
TITLES = {"mnist": "MNIST", "notmnist": "notMNIST", "fashion_mnist": "Fashion-MNIST", "celeba": "CelebA"}
#: Decimals in the paper, by metric; distances have one.
DECIMALS = {"nll": 1, "diversity": 2}


class Printed(NamedTuple):
    """A number as the paper prints it, and its name of the method."""

    mean: float
    std: float
    text: str
    method: str = ""


def dataset_title(dataset: str) -> str:
    """Return the display name of a dataset.

    >>> dataset_title("fashion_mnist"), dataset_title("npz:mine.npz")
    ('Fashion-MNIST', 'npz:mine.npz')
    """
    return TITLES.get(dataset, dataset)


def is_distance(metric: str) -> bool:
    """Whether a metric is a distance on the features of a network, judged by its name.

    Ours cannot be compared with the paper's FIDs, which use other features and more faces.

    >>> is_distance("frechet_classifier"), is_distance("fid"), is_distance("nll")
    (True, True, False)
    """
    return metric == "fid" or metric.startswith("frechet_")


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

    Any distance has the paper's FIDs beside it. The paper's names of methods are ours with capitals.
    """
    path = resources.files("boovae.bench") / "printed" / f"{'fid' if is_distance(metric) else metric}.csv"
    rows = csv.reader(path.read_text(encoding="utf-8").splitlines()[1:] if path.is_file() else ())
    return {
        (dataset, method.lower(), int(seen)): Printed(float(mean), float(std), f"{mean} ({std})", method)
        for dataset, method, seen, mean, std in rows
    }


def for_reports() -> dict[tuple[str, str, str, int], PublishedNumber]:
    """Return the numbers that a report shows beside a run's, by metric, dataset, method and tasks seen."""
    from boovae.report.findings import PublishedNumber  # late: `boovae --help` needs neither reports nor numpy

    return {
        (metric, *key): PublishedNumber(number.mean, number.std, number.method, decimals)
        for metric, decimals in DECIMALS.items()
        for key, number in numbers(metric).items()
    }
