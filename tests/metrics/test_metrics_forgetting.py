from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from boovae.data import Stream
from boovae.errors import InputError
from boovae.metrics.evaluation import FEW, NLL, Evaluation, Forgetting
from boovae.metrics.forgetting import ChangeOfNLL, forgetting, judged, not_judged, of_earlier
from boovae.metrics.measure import evaluate
from conftest import tiny, trained

# Three tasks, two replicas: HISTORY[time][task][replica].
OWN = [
    [[100.0, 110.0]],
    [[103.0, 110.5], [80.0, 81.0]],
    [[107.0, 112.0], [79.0, 90.0], [60.0, 61.0]],
]
POOLED = [[[x + 0.5 * t for x in row] for row in after] for t, after in enumerate(OWN)]


def history(own: list[Any], pooled: list[Any]) -> list[NLL]:
    """Return the NLL after each task."""
    return [
        NLL(np.zeros(len(row[0])), np.array(other, dtype=float), np.array(row, dtype=float))
        for row, other in zip(own, pooled, strict=True)
    ]


HISTORY = history(OWN, POOLED)


def test_change_is_the_last_row_minus_the_diagonal() -> None:
    change = forgetting(HISTORY, sizes=[10, 20, 30], shared_mass=True)
    assert change.own.tolist() == [[7.0, 2.0], [-1.0, 9.0], [0.0, 0.0]]
    # Task 0 was learned at time 0 and task 1 at time 1: half a nat per time step more.
    assert change.pooled.tolist() == [[8.0, 3.0], [-0.5, 9.5], [0.0, 0.0]]


def test_dilution_is_the_log_of_the_lost_share_of_the_prior() -> None:
    change = forgetting(HISTORY, sizes=[10, 20, 30], shared_mass=True)
    # Task 0 held all of the mass, now 10/60; task 1 held 20/30, now 20/60.
    assert change.dilution.tolist() == pytest.approx([math.log(6), math.log((20 / 30) / (20 / 60)), 0.0])


def test_a_model_that_only_shares_its_prior_forgets_exactly_the_dilution() -> None:
    sizes = [10, 20, 30]
    frozen = [[[50.0]] * (t + 1) for t in range(3)]
    diluted = [[[50.0 - math.log(sizes[s] / sum(sizes[: t + 1]))] for s in range(t + 1)] for t in range(3)]
    change = forgetting(history(frozen, diluted), sizes, shared_mass=True)
    assert np.abs(change.own).max() == 0.0
    assert change.pooled[:, 0].tolist() == pytest.approx(change.dilution.tolist(), abs=1e-12)


def test_priors_that_share_nothing_have_no_dilution() -> None:
    assert forgetting(HISTORY, [10, 20, 30], shared_mass=False).dilution.tolist() == [0.0, 0.0, 0.0]


def test_the_first_task_has_forgotten_nothing() -> None:
    change = forgetting(HISTORY[:1], [10], shared_mass=True)
    assert change.own.tolist() == [[0.0, 0.0]]
    assert change.dilution.tolist() == [0.0]
    assert not [number for number in ChangeOfNLL().numbers(change) if number.column]  # nothing to show yet


def test_the_newest_task_is_left_out_of_the_mean() -> None:
    change = forgetting(HISTORY, [1, 1, 1], shared_mass=True)
    (mean,) = (number.values for number in ChangeOfNLL().numbers(change) if number.column)
    assert mean.tolist() == [3.0, 5.5]


def test_methods_without_components_per_task_are_judged_under_the_whole_prior() -> None:
    without = history([[[np.nan] * 2] * (t + 1) for t in range(3)], POOLED)
    assert of_earlier(forgetting(without, [1, 1, 1], shared_mass=False)).tolist() == [[8.0, 3.0], [-0.5, 9.5]]


def test_a_moment_that_was_not_measured_leaves_its_task_open() -> None:
    change = forgetting([None, *HISTORY[1:]], [1, 1, 1], shared_mass=True)
    assert np.isnan(change.own).tolist() == [[True, True], [False, False], [False, False]]


def test_a_diverged_replica_is_nan_and_leaves_the_other_alone() -> None:
    own = [[[1.0, 1.0]], [[math.nan, 3.0], [5.0, 5.0]]]
    change = forgetting(history(own, own), [1, 1], shared_mass=True)
    assert np.isnan(change.own).tolist() == [[True, False], [False, False]]
    assert change.own[0, 1] == 2.0


def resting_on(*effective: float, samples: int = 200) -> list[NLL]:
    """Return the NLL of a task when it was learned and later, with the median effective samples of each."""
    found = []
    for seen, here in enumerate(effective, start=1):
        rows, typical = np.full((seen, 2), 90.0 + seen), np.full((seen, 2), 50.0)
        typical[0] = [here, 50.0]
        found.append(NLL(rows[0], rows, rows, typical + 400, typical, samples=samples))  # the mean tells less
    return found


@pytest.mark.parametrize("effective", [(1.6, 50.0), (50.0, 1.6)])
def test_a_change_between_numbers_of_which_one_rests_on_few_samples_is_not_claimed(
    effective: tuple[float, ...],
) -> None:
    change = forgetting(resting_on(*effective), [1, 1], shared_mass=True)
    assert change.judged is not None
    assert change.judged.tolist() == [[0.0, 1.0], [1.0, 1.0]]
    assert change.own[0].tolist() == [1.0, 1.0]  # what was computed stays in the log
    assert of_earlier(change)[0].tolist() == pytest.approx([math.nan, 1.0], nan_ok=True)
    assert not_judged(change) == "cannot be judged: effective samples 1.6 of 200"
    shown = {number.column or number.tag or number.curve: number for number in ChangeOfNLL().numbers(change)}
    assert shown["forgotten"].remark == "(cannot be judged: effective samples 1.6 of 200)"
    for name in ("forgotten", "Forgetting: mean of the earlier tasks, nats"):
        assert shown[name].values.tolist() == pytest.approx([math.nan, 1.0], nan_ok=True)
    assert shown["forgetting"].values.tolist() == [pytest.approx([math.nan, 1.0], nan_ok=True)]


def test_a_change_that_rests_on_enough_samples_is_claimed_without_remark() -> None:
    change = forgetting(resting_on(FEW, 50.0), [1, 1], shared_mass=True)
    assert of_earlier(change).tolist() == [[1.0, 1.0]]
    assert not_judged(change) == ""


def test_an_older_log_is_judged_by_its_mean_effective_samples() -> None:
    """It has no median; what it says nothing of is taken for enough."""
    old = [msgspec.structs.replace(nll, effective_samples=nll.typical_effective, effective_median=None)
           for nll in resting_on(50.0, 3.0)]  # fmt: skip
    recorded = Forgetting(np.ones((2, 2)), np.ones((2, 2)), np.zeros(2))
    assert judged(recorded, old).own_claimed.tolist() == [pytest.approx([math.nan, 1.0], nan_ok=True), [1.0, 1.0]]
    assert recorded.own_claimed.tolist() == [[1.0, 1.0]] * 2
    assert judged(recorded, [None, old[0]]).judged is not None


def test_numbers_estimated_in_different_ways_are_not_compared(digits: Stream) -> None:
    trainer = trained(tiny(tasks=2), digits)
    tasks, events = list(digits[:2]), []
    for fit in (False, True):
        trainer.settings = trainer.settings.changed(fit_posterior="always" if fit else "never")
        events.append(evaluate(trainer, tasks, None, [], metrics=["nll"]))
    plain, fitted = (event.nll for event in events)
    assert plain is not None
    assert fitted is not None
    assert (plain.fitted, plain.samples) == (None, fitted.samples)
    assert fitted.fitted is not None
    first = Evaluation(task=0, nll=NLL(plain.pooled, plain.per_task[:1], plain.own[:1], samples=plain.samples))
    for fit, compared in ((False, True), (True, False)):
        trainer.settings = trainer.settings.changed(fit_posterior="always" if fit else "never")
        found = evaluate(trainer, tasks, None, [first], metrics=["nll"]).forgetting
        assert found is not None
        assert np.isfinite(found.own[0]).all() == compared


@pytest.mark.parametrize("sizes", [[10, 20], [10, 0, 30]])
def test_sizes_that_cannot_be_are_named(sizes: list[int]) -> None:
    with pytest.raises(InputError, match="sizes"):
        forgetting(HISTORY, sizes, shared_mass=True)
