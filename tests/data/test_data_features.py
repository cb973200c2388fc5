"""Numbers of any range as rows of a model: scaling, spooling, dividing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from boovae.data import scaling as features
from boovae.data.batches import is_batches, spooled
from boovae.data.scaling import Scaling, divided
from boovae.errors import InputError


def test_scaling_is_scikit_learns_standard_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "BLOCK", 7)  # several blocks, the last one short
    rows = np.random.default_rng(0).normal([3, 3, 1e3], [1, 5, 1e-3], size=(40, 3))
    scaling, truth = Scaling.learned(rows, "auto"), StandardScaler().fit(rows)
    np.testing.assert_allclose(scaling.centre, truth.mean_, rtol=1e-12)
    np.testing.assert_allclose(scaling.scale, truth.scale_, rtol=1e-9)
    np.testing.assert_allclose(scaling.forward(rows), truth.transform(rows), atol=1e-5)
    np.testing.assert_allclose(scaling.back(scaling.forward(rows)), rows, rtol=1e-6)
    assert scaling.log_scale == pytest.approx(np.log(truth.scale_).sum())


def test_a_constant_feature_is_left_in_its_units() -> None:
    rows = np.column_stack([np.full(9, 1e6), np.arange(9.0)])
    assert Scaling.learned(rows, "auto").scale[0] == 1.0


def test_grey_values_are_left_alone_and_others_refused() -> None:
    rows = np.random.default_rng(0).random((9, 4))
    scaling = Scaling.learned(rows, "auto")
    assert scaling.grey
    np.testing.assert_array_equal(scaling.forward(rows), rows.astype(np.float32))
    assert scaling.forward(rows + 5e-7).max() <= 1.0
    with pytest.raises(InputError, match="grey values"):
        scaling.forward(rows + 0.5)
    with pytest.raises(InputError, match="grey values"):
        Scaling.learned(rows * 2, "logistic")


def test_numbers_beyond_all_proportion_are_refused() -> None:
    scaling = Scaling.learned(np.random.default_rng(0).normal(size=(9, 4)), "auto")
    with pytest.raises(InputError, match="out of all proportion"):
        scaling.forward(np.full((1, 4), 1e30))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.floats(0, 0.9), st.integers(0, 5))
def test_dividing_keeps_every_row_once(count: int, share: float, seed: int) -> None:
    rows = np.arange(2.0 * count).reshape(count, 2)
    train, valid = divided(rows, share, np.random.default_rng(seed))
    assert np.shares_memory(train, rows)  # nothing is copied
    if count < features.LEAST_SPLIT or share == 0:
        assert len(train) == count
        return
    together = np.concatenate([train, valid])
    np.testing.assert_array_equal(together[together[:, 0].argsort()], np.arange(2.0 * count).reshape(count, 2))
    assert len(valid) >= features.LEAST_VALID


def test_validation_rows_are_drawn_from_everywhere() -> None:
    rows = np.arange(1000.0).reshape(-1, 1)
    _, valid = divided(rows, 0.2, np.random.default_rng(0))
    assert len(valid) == 200
    assert abs(valid.mean() - 499.5) < 60


def test_spooled_batches_leave_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    batches = [np.full((n, 3), n, np.float32) for n in (4, 1, 7)]
    rows = spooled(iter(batches))
    np.testing.assert_array_equal(rows, np.concatenate(batches))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="no batches"):
        spooled(iter([]))


def test_only_iterables_that_are_not_arrays_are_batches() -> None:
    frame = type("Frame", (), {"__array__": lambda self: np.zeros((2, 2)), "__iter__": lambda self: iter([])})()
    arrays: list[Any] = [np.zeros((2, 2)), torch.zeros(2, 2), [[0.0]], ((0.0,),), "text", {"a": 1}, frame, 5]
    assert not any(is_batches(array) for array in arrays)
    assert is_batches(np.zeros((2, 2)) for _ in range(2))
    assert is_batches(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2))))
