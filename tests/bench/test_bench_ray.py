"""A bench on a Ray cluster: one of two simulated machines dies in the middle (make test-slow), or none is there."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_parts import GIVEN, job_of, request
from boovae.bench.cells import Cell, plan
from boovae.bench.executors import CONNECT, Ray
from boovae.bench.results import Measured, read_summary
from boovae.bench.scheduler import Board, Matrix
from boovae.errors import InputError

pytest.importorskip("ray")


@pytest.fixture
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "not-an-address"])
def test_an_address_without_a_cluster_is_refused_with_what_to_do(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match=f"--address {address}: no Ray cluster answers .*leave --address out"):
        Ray(request(Path(), address=address), 1)
    assert time.monotonic() - began < 2 * CONNECT


@pytest.mark.slow
def test_all_cells_finish_and_none_counts_twice_although_a_machine_dies(tmp_path: Path, cluster: Any) -> None:
    machine = cluster.add_node(num_cpus=1)
    cells = plan(["digits"], ["standard", "ewc", "boo"], GIVEN, 2)
    finished: list[str] = []
    lost: list[str] = []

    class Watching(Board):
        def show(self, running: list[Cell]) -> None:  # type: ignore[override]
            super().show(running)
            begun = [cell for cell in running if (tmp_path / cell.name / "config.toml").exists()]
            if len(begun) == 2 and not killed:  # both machines work
                killed.append(True)
                cluster.remove_node(machine, allow_graceful=False)

        def note(self, text: str) -> None:
            if "worker was lost" in text:
                lost.append(text)

        def finished(self, cell: Cell) -> None:
            finished.append(cell.label)

    killed: list[bool] = []
    executor = Ray(request(tmp_path, address=cluster.address, device="cpu"), len(cells))
    try:
        matrix = Matrix(cells, tmp_path, executor, lambda cell: job_of(cell, tmp_path), Watching(tmp_path))
        matrix.run()
    finally:
        executor.close()
    assert killed
    assert lost
    assert matrix.failed == {}
    assert Counter(finished) == {"standard": 1, "ewc": 1, "boo": 1}
    measured = Measured("digits")
    for cell in cells:
        summary = read_summary(tmp_path, cell)
        assert summary is not None
        assert [event.seen for event in summary["evaluations"]] == [1, 2]
        measured.add(cell, summary)
    assert measured.labels == ["standard", "ewc", "boo"]
