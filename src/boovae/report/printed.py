"""The paper's numbers, as it prints them; they are shown beside ours. Imports nothing heavy."""

import csv
import functools
from importlib import resources
from typing import NamedTuple

#: Decimals in the paper, by metric; distances have one.
DECIMALS = {"nll": 1, "diversity": 2}


class Printed(NamedTuple):
    """A number as the paper prints it, and its name of the method."""

    mean: float
    std: float
    text: str
    method: str = ""


def is_distance(metric: str) -> bool:
    """Whether a metric is a distance on the features of a network, judged by its name.

    Ours cannot be compared with the paper's FIDs, which use other features and more faces.

    >>> is_distance("frechet_classifier"), is_distance("fid"), is_distance("nll")
    (True, True, False)
    """
    return metric == "fid" or metric.startswith("frechet_")


@functools.cache
def numbers(metric: str) -> dict[tuple[str, str, int], Printed]:
    """Return the paper's table of a metric by (dataset, method, tasks seen), in our names; empty if it has none.

    Any distance has the paper's FIDs beside it. The paper's names of methods are ours with capitals.
    """
    path = resources.files("boovae.report") / "printed" / f"{'fid' if is_distance(metric) else metric}.csv"
    rows = csv.reader(path.read_text(encoding="utf-8").splitlines()[1:] if path.is_file() else ())
    return {
        (dataset, method.lower(), int(seen)): Printed(float(mean), float(std), f"{mean} ({std})", method)
        for dataset, method, seen, mean, std in rows
    }
