from __future__ import annotations

import math

import pytest
import torch

from boovae.errors import InputError
from boovae.metrics.forgetting import forgetting, summary, task_time_matrix

# Three tasks, two replicas: HISTORY[time][task][replica].
OWN = [
    [[100.0, 110.0]],
    [[103.0, 110.5], [80.0, 81.0]],
    [[107.0, 112.0], [79.0, 90.0], [60.0, 61.0]],
]
POOLED = [[[x + 0.5 * t for x in row] for row in after] for t, after in enumerate(OWN)]


def test_change_is_the_last_row_minus_the_diagonal() -> None:
    change = forgetting(OWN, POOLED, sizes=[10, 20, 30], shared_mass=True)
    assert change.own.tolist() == [[7.0, 2.0], [-1.0, 9.0], [0.0, 0.0]]
    # Task 0 was learned at time 0 and task 1 at time 1: half a nat per time step more.
    assert change.pooled.tolist() == [[8.0, 3.0], [-0.5, 9.5], [0.0, 0.0]]


def test_dilution_is_the_log_of_the_lost_share_of_the_prior() -> None:
    change = forgetting(OWN, POOLED, sizes=[10, 20, 30], shared_mass=True)
    # Task 0 held all of the mass, now 10/60; task 1 held 20/30, now 20/60.
    assert change.dilution.tolist() == pytest.approx([math.log(6), math.log((20 / 30) / (20 / 60)), 0.0])


def test_a_model_that_only_shares_its_prior_forgets_exactly_the_dilution() -> None:
    sizes = [10, 20, 30]
    frozen = [[[50.0]] * (t + 1) for t in range(3)]
    diluted = [[[50.0 - math.log(sizes[s] / sum(sizes[: t + 1]))] for s in range(t + 1)] for t in range(3)]
    change = forgetting(frozen, diluted, sizes, shared_mass=True)
    assert change.own.abs().max().item() == 0.0
    assert change.pooled[:, 0].tolist() == pytest.approx(change.dilution.tolist(), abs=1e-12)


def test_priors_that_share_nothing_have_no_dilution() -> None:
    assert forgetting(OWN, POOLED, [10, 20, 30], shared_mass=False).dilution.tolist() == [0.0, 0.0, 0.0]


def test_the_first_task_has_forgotten_nothing() -> None:
    change = forgetting(OWN[:1], POOLED[:1], [10], shared_mass=True)
    assert change.own.tolist() == [[0.0, 0.0]]
    assert change.dilution.tolist() == [0.0]
    result = summary(change.own)
    assert result.mean.isnan().all()
    assert result.worst.isnan().all()
    assert result.worst_task.tolist() == [-1, -1]


def test_summary_leaves_the_newest_task_out() -> None:
    result = summary(forgetting(OWN, POOLED, [1, 1, 1], shared_mass=True).own)
    assert result.mean.tolist() == [3.0, 5.5]
    assert result.worst.tolist() == [7.0, 9.0]
    assert result.worst_task.tolist() == [0, 1]


def test_a_diverged_replica_is_nan_and_leaves_the_other_alone() -> None:
    own: list[list[list[float | None]]] = [[[1.0, 1.0]], [[None, 3.0], [5.0, 5.0]]]
    change = forgetting(own, own, [1, 1], shared_mass=True)
    assert change.own.isnan().tolist() == [[True, False], [False, False]]
    result = summary(change.own)
    assert result.mean.isnan().tolist() == [True, False]
    assert result.worst_task.tolist() == [-1, 0]
    assert result.worst[1].item() == 2.0


def test_matrix_marks_tasks_not_yet_seen() -> None:
    matrix = task_time_matrix(OWN)
    assert matrix.shape == (3, 3, 2)
    assert matrix[2, 1].tolist() == [79.0, 90.0]
    assert matrix.isnan().any(-1).tolist() == [
        [False, True, True],
        [False, False, True],
        [False, False, False],
    ]


@pytest.mark.parametrize(
    ("own", "sizes", "message"),
    [
        ([], [10, 20, 30], "own is empty"),
        (OWN[1:], [10, 20], r"own has \[2, 3\] tasks over time"),
        ([[[1.0]], [[1.0], [2.0, 3.0]]], [10, 20], r"own has .* \[1, 2\] replicas"),
        ([[row[:1] for row in after] for after in OWN], [10, 20, 30], "own covers"),
        (OWN, [10, 20], "sizes"),
        (OWN, [10, 0, 30], "sizes"),
    ],
)
def test_unusable_histories_are_named(own: list[list[list[float]]], sizes: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        forgetting(own, POOLED, sizes, shared_mass=True)


def test_summary_wants_tasks_by_replicas() -> None:
    with pytest.raises(InputError, match="change"):
        summary(torch.zeros(3))
