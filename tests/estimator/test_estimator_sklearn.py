"""All of scikit-learn's own checks of an estimator; none is excused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from boovae import BooVAE


@pytest.mark.filterwarnings("ignore:SCIPY_ARRAY_API")
@parametrize_with_checks([BooVAE(epochs=2, samples=50, device="cpu", settings={"boo_steps": 2})])  # type: ignore[untyped-decorator]
def test_scikit_learns_checks_pass(estimator: BooVAE, check: Callable[[BooVAE], None]) -> None:
    check(estimator)
