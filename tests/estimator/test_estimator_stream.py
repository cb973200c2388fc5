"""The estimator on streams without borders: tasks are found, images wait no longer than they must, nothing is lost."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from boovae import BooVAE
from boovae.errors import InputError
from boovae.estimator import detection as detect
from quick_estimator import Array, grey, quick


def stripes(task: int, count: int, seed: int = 0) -> Array:
    """Pictures (count, 5, 4) with a bright row, another one for each task."""
    images = 0.2 * np.random.default_rng([task, seed]).random((count, 5, 4))
    images[:, task] += 0.7
    return images


def stream(*counts: int) -> Array:
    return np.concatenate([stripes(task, count) for task, count in enumerate(counts)])


def finding(**changes: Any) -> BooVAE:
    """No image is held back, so that the sizes of the tasks can be seen."""
    return quick(detect_tasks=True, detect_first=40, validation_fraction=0.0, **changes)


@pytest.fixture(scope="module", autouse=True)
def short_trials() -> Iterator[None]:
    """These pictures are learned in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detect, "EPOCHS", 10)
        patch.setattr(detect, "STEPS", 6)
        yield


@pytest.fixture(scope="module")
def fed(short_trials: None) -> BooVAE:
    """Three kinds of pictures, in parts that know nothing of the borders."""
    model = finding(epochs=40, learning_rate=0.02)
    for part in np.array_split(stream(90, 70, 80), 7):
        model.partial_fit(part)
    return model


def test_tasks_are_found_wherever_the_parts_end(fed: BooVAE) -> None:
    assert fed.n_tasks_ == 2  # the third has not ended
    assert np.abs(np.array(fed.trainer_.sizes) - [90, 70]).max() <= 3
    assert 77 <= fed.n_waiting_ <= 83
    for task in range(2):
        assert fed.sample(20, task=task).mean((0, 2)).argmax() == task


def test_finish_learns_the_rest_and_a_new_part_begins_a_new_task() -> None:
    model = finding()
    for part in np.array_split(stream(90, 70), 3):
        model.partial_fit(part)
    assert model.finish() is model
    assert (model.n_tasks_, model.n_waiting_) == (2, 0)
    assert model.finish().n_tasks_ == 2  # nothing more to learn
    model.partial_fit(stripes(2, 30))
    assert (model.n_tasks_, model.n_waiting_) == (2, 30)
    assert model.finish().n_tasks_ == 3


def test_fit_learns_a_whole_stream_and_forgets_what_was() -> None:
    model = finding().partial_fit(stripes(4, 60))  # these wait, and are forgotten
    model.fit(stream(90, 70, 80))
    assert (model.n_tasks_, model.n_waiting_) == (3, 0)
    assert np.abs(np.array(model.trainer_.sizes) - [90, 70, 80]).max() <= 3
    batches = finding().fit(iter(np.array_split(stream(90, 70, 80), 7)))
    assert batches.n_tasks_ == 3


def test_before_the_first_task_has_ended_nothing_can_be_asked(tmp_path: Path) -> None:
    model = finding().partial_fit(stripes(0, 30))
    for ask in (model.sample, lambda: model.score(stripes(0, 3)), lambda: model.save(tmp_path / "model")):
        with pytest.raises(NotFittedError, match=r"30 images wait .* call finish\(\)"):
            ask()
    with pytest.raises(NotFittedError, match="not fitted yet"):
        finding().sample()
    with pytest.raises(NotFittedError):
        finding().n_waiting_  # noqa: B018
    assert model.finish().sample().shape == (1, 5, 4)


def test_images_that_wait_are_not_stored(fed: BooVAE, tmp_path: Path) -> None:
    for store in (lambda: fed.save(tmp_path / "model"), lambda: pickle.dumps(fed)):
        with pytest.raises(InputError, match=r"keeps no images: call finish\(\) first"):
            store()
    model = finding().fit(stream(60, 60))
    loaded = BooVAE.load(model.save(tmp_path / "model"), device="cpu")
    assert loaded.detect_tasks
    assert loaded.detect_first == 40
    assert pickle.loads(pickle.dumps(model)).n_tasks_ == loaded.n_tasks_ == 2
    loaded.partial_fit(stripes(2, 50)).partial_fit(stripes(3, 50))  # next month
    assert loaded.n_tasks_ == 3


def test_no_more_than_a_given_number_waits() -> None:
    model = finding(detect_most=50)
    for part in np.array_split(stripes(0, 130), 13):
        assert model.partial_fit(part).n_waiting_ < 50
    assert model.n_tasks_ == 2
    assert model.finish().n_tasks_ == 3
    assert model.trainer_.sizes == [50, 50, 30]


def test_a_part_that_cannot_be_read_changes_nothing(fed: BooVAE) -> None:
    before, weights = fed.n_waiting_, fed.component_weights_
    for wrong, message in (
        (stripes(2, 20) * 300, "grey values"),
        (np.zeros((3, 7)), "features"),
        (np.zeros((0, 5, 4)), "no pixels"),
    ):
        with pytest.raises(ValueError, match=message):
            fed.partial_fit(wrong)
    with pytest.raises(ValueError, match="grey values"):  # after a batch that would have ended a task
        fed.partial_fit(iter([stripes(4, 60), stripes(4, 20) * 300]))
    assert (fed.n_tasks_, fed.n_waiting_) == (2, before)
    np.testing.assert_array_equal(fed.component_weights_, weights)


def test_numbers_of_any_range_are_standardised_by_the_first_that_came() -> None:
    rng = np.random.default_rng(0)
    numbers = 1000 + 50 * rng.standard_normal((160, 6))
    numbers[80:, :3] += 600
    model = finding()
    for part in np.array_split(numbers, 32):
        model.partial_fit(part)
    model.finish()
    assert model.n_tasks_ == 2
    assert abs(model.sample(50, task=0, noise=True).mean() - 1000) < 60


def test_turning_it_off_ends_the_task() -> None:
    model = finding().partial_fit(stripes(0, 60)).set_params(detect_tasks=False)
    model.partial_fit(stripes(1, 30))
    assert (model.n_tasks_, model.n_waiting_) == (2, 0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"detect_first": 3}, r"first \(detect_first\) is 3; a trial needs at least 8 images"),
        ({"detect_first": 2.5}, "detect_first is 2.5; it must be a whole number"),
        ({"detect_first": 50, "detect_most": 20}, "it must be at least detect_first, 50"),
        ({"method": "multihead"}, "'multihead' needs to know the task"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_learned(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        quick(**{"detect_tasks": True, **parameters}).partial_fit(stripes(0, 60))


def test_a_stream_without_images_is_refused_and_nothing_is_lost() -> None:
    model = quick(detect_tasks=True)
    with pytest.raises(InputError, match="X holds no images"):
        model.fit(iter([]))
    model.fit(grey())
    before = model.score_samples(grey(1))
    with pytest.raises(InputError, match="X holds no images"):
        model.fit(iter([]))
    np.testing.assert_array_equal(model.score_samples(grey(1)), before)
