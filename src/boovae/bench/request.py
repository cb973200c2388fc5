"""What a study is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boovae.bench.cells import file_name
from boovae.bench.published import FACES, FACES_FEATURES, distances
from boovae.errors import InputError, unknown_name

#: What can be asked for; frechet stands for a distance on each of the networks (`--features`).
METRICS = ("nll", "diversity", "frechet")


@dataclass(frozen=True)
class Request:
    """A study, its lists, the settings that hold in every cell, and where cells and results lie."""

    study: str
    datasets: Sequence[str]
    methods: Sequence[str]
    tasks: int
    given: Mapping[str, Any]
    cells: Path
    results: Path
    command: str
    asked: Sequence[str] | None = None
    """Metrics; where there are faces, distances too, if not given."""
    features: Sequence[str] | None = None
    """Networks for distances; those of the dataset if not given."""
    joint_tasks: Sequence[int] | None = None
    """After how many tasks `joint` is trained; some of them if not given."""

    def __post_init__(self) -> None:
        if len(set(self.datasets)) < len(self.datasets):
            raise InputError(f"{{datasets}} names a dataset twice: {', '.join(self.datasets)}")
        if len(set(map(file_name, self.datasets))) < len(self.datasets):
            raise InputError(
                f"{{datasets}}: results of {', '.join(self.datasets)} would have one name; rename a folder"
            )
        for metric in self.asked or ():
            if metric not in METRICS:
                raise unknown_name("metric ({metrics})", metric, METRICS)
        if self.features is not None:
            distances(self.features)

    @property
    def metrics(self) -> list[str]:
        """What tables are made of, as the CSV files call it."""
        faces = any(dataset in FACES for dataset in self.datasets)
        asked = self.asked or (("nll", "diversity", "frechet") if faces else ("nll", "diversity"))
        networks = list(dict.fromkeys(name for dataset in self.datasets for name in self.features_of(dataset)))
        return [name for metric in asked for name in (distances(networks) if metric == "frechet" else [metric])]

    def features_of(self, dataset: str) -> Sequence[str]:
        """Return the networks on whose features a dataset is compared."""
        return self.features or (FACES_FEATURES if dataset in FACES else ("classifier",))
