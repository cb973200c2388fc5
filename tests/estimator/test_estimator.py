"""The estimator as its users meet it: months of data, old tasks that hold, scikit-learn's ways."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

from boovae import BooVAE
from boovae.errors import InputError
from boovae.methods.distill import DistillSettings
from quick_estimator import QUICK, Array, grey, quick


@pytest.fixture(scope="module")
def digits() -> tuple[Array, Array]:
    data = load_digits()
    return data.images / 16, data.target


@pytest.fixture(scope="module")
def learned(digits: tuple[Array, Array]) -> tuple[BooVAE, list[float]]:
    """The digits 0, 1 and 2, one after another, with default settings; and the score of each when it was learned."""
    images, labels = digits
    model, scores = BooVAE(random_state=0, device="cpu", samples=100), []
    for task in range(3):
        model.partial_fit(images[labels == task][40:])
        scores.append(model.score_samples(images[labels == task][:40], task=task).mean())
    return model, scores


# --- old tasks hold -------------------------------------------------------------------------------------------------


def test_old_tasks_keep_their_scores(learned: tuple[BooVAE, list[float]], digits: tuple[Array, Array]) -> None:
    model, before = learned
    images, labels = digits
    now = [model.score_samples(images[labels == task][:40], task=task).mean() for task in range(3)]
    assert model.n_tasks_ == 3
    assert np.all(np.array(before) - now < 2.0)  # nats
    assert np.all(np.array(now) > -30)


def test_samples_of_each_task_look_like_it(learned: tuple[BooVAE, list[float]], digits: tuple[Array, Array]) -> None:
    model, _ = learned
    images, labels = digits
    judge = LogisticRegression(max_iter=1000).fit(images.reshape(-1, 64), labels)
    for task in range(3):
        assert (judge.predict(model.sample(50, task=task).reshape(-1, 64)) == task).mean() > 0.9
    together = judge.predict(model.sample(300).reshape(-1, 64))
    shares = np.bincount(together, minlength=10)[:3] / 300
    assert np.abs(shares - 1 / 3).max() < 0.12


def test_scores_say_which_task_an_image_belongs_to(
    learned: tuple[BooVAE, list[float]], digits: tuple[Array, Array]
) -> None:
    model, _ = learned
    images, labels = digits
    some, truth = images[labels < 3][:120], labels[labels < 3][:120]
    own = np.stack([model.score_samples(some, task=task) for task in range(3)])
    assert (own.argmax(0) == truth).mean() > 0.95
    assert (model.score_samples(some) < own.max(0)).all()  # the whole prior gives a task a third of its mass


def test_reconstructions_are_near(learned: tuple[BooVAE, list[float]], digits: tuple[Array, Array]) -> None:
    model, _ = learned
    images, labels = digits
    some = images[labels < 3]
    error = np.square(model.reconstruct(some) - some).mean()
    assert error < 0.5 * some.var(0).mean()
    np.testing.assert_array_equal(model.reconstruct(some[:7]), model.inverse_transform(model.transform(some[:7])))


def test_components_are_images_with_weights(learned: tuple[BooVAE, list[float]], digits: tuple[Array, Array]) -> None:
    model, _ = learned
    images, labels = digits
    assert model.components_.shape[1:] == (8, 8)
    assert model.component_weights_.sum() == pytest.approx(1, abs=1e-4)
    judge = LogisticRegression(max_iter=1000).fit(images.reshape(-1, 64), labels)
    assert (judge.predict(model.components_.reshape(-1, 64)) == model.component_tasks_).mean() > 0.9
    with pytest.raises(AttributeError, match="stores no components"):
        _ = quick(method="standard").fit(grey()).components_


def test_a_part_is_scored_as_in_the_whole_bit_for_bit(
    learned: tuple[BooVAE, list[float]], digits: tuple[Array, Array]
) -> None:
    model, _ = learned
    some = digits[0][:150]
    whole, latents = model.score_samples(some), model.transform(some)
    order = np.random.default_rng(0).permutation(150)
    assert np.array_equal(model.score_samples(some[order]), whole[order])
    for part in (slice(0, 1), slice(17, 18), slice(3, 40), slice(31, 33), slice(70, 150)):
        assert np.array_equal(model.score_samples(some[part]), whole[part])
        assert np.array_equal(model.transform(some[part]), latents[part])
    assert model.score(some) == pytest.approx(whole.mean())


def test_what_the_model_learned_is_not_kept(digits: tuple[Array, Array]) -> None:
    images, labels = digits
    model = quick().partial_fit(images[labels == 0]).partial_fit(images[labels == 1])
    kept = [tensor for tensors in model.trainer_.state()[:1] for tensor in tensors.values()]
    assert not hasattr(model.trainer_, "engine")
    assert sum(tensor.numel() for tensor in kept) < images[labels < 2].size  # less than the data were


# --- scikit-learn's ways --------------------------------------------------------------------------------------------


def test_fit_starts_again_and_partial_fit_continues() -> None:
    model = quick().fit(grey()).partial_fit(grey(1))
    assert model.n_tasks_ == 2
    again = model.fit(grey(2))
    assert again.n_tasks_ == 1
    assert np.array_equal(again.score_samples(grey()), quick().partial_fit(grey(2)).score_samples(grey()))


def test_clone_has_the_parameters_and_nothing_learned() -> None:
    model = quick().fit(grey())
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    assert not hasattr(twin, "trainer_")


def test_copies_and_pickles_score_alike_and_go_on_alike() -> None:
    model = quick().fit(grey())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert np.array_equal(other.score_samples(grey(1)), model.score_samples(grey(1)))
        other.partial_fit(grey(2))
    assert np.array_equal(model.partial_fit(grey(2)).score_samples(grey(1)), other.score_samples(grey(1)))


def test_random_state_decides_everything() -> None:
    one, same, other = quick().fit(grey()), quick().fit(grey()), quick(random_state=1).fit(grey())
    assert np.array_equal(one.sample(5), same.sample(5))
    assert np.array_equal(one.sample(5), one.sample(5))
    assert not np.array_equal(one.sample(5), one.sample(5, random_state=3))
    assert not np.array_equal(one.sample(5), other.sample(5))
    free = quick(random_state=None).fit(grey())
    assert not np.array_equal(free.sample(5), free.sample(5))
    first, second = (quick(random_state=np.random.RandomState(7)).fit(grey()) for _ in range(2))
    assert np.array_equal(first.transform(grey()), second.transform(grey()))


def test_pipelines_scale_before_and_classify_behind(digits: tuple[Array, Array]) -> None:
    images, labels = digits
    chosen = labels < 2
    features, target = images[chosen].reshape(-1, 64) * 16, labels[chosen]
    codes = make_pipeline(MinMaxScaler(), quick(epochs=30, net="mlp:32"), LogisticRegression())
    assert codes.fit(features, target).score(features, target) > 0.95
    density = make_pipeline(MinMaxScaler(), quick())
    assert np.isfinite(density.fit(features).score_samples(features)).all()
    names = quick().fit(features).get_feature_names_out()
    assert list(names) == ["boovae0", "boovae1", "boovae2"]


@pytest.mark.parametrize("method", ["standard", "boo", "mog", "ewc+boo", "coreset", "replay", "vcl", "joint"])
def test_every_kind_of_method_runs_behind_the_front(method: str) -> None:
    model = quick(method=method).partial_fit(grey()).partial_fit(grey(1))
    assert np.isfinite(model.score_samples(grey(2))).all()
    assert model.sample(3, task=1).shape == (3, 5, 4)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).sample(3), model.sample(3))


def test_a_method_with_a_network_per_task_wants_to_know_the_task() -> None:
    model = quick(method="multihead").partial_fit(grey()).partial_fit(grey(1))
    with pytest.raises(InputError, match="task=0 … 1"):
        model.score_samples(grey())
    assert not np.array_equal(model.transform(grey(), task=0), model.transform(grey(), task=1))
    assert model.sample(4).shape == (4, 5, 4)


def test_settings_reach_the_trainer() -> None:
    model = quick(settings={**QUICK["settings"], "distill_weight": 2}, epochs=np.int64(3)).fit(grey())
    assert model.trainer_.settings.of(DistillSettings).distill_weight == 2.0
    assert model.trainer_.settings.training.epochs == 3


def test_size_of_a_task_decides_what_is_left_open() -> None:
    small = BooVAE(epochs=1, device="cpu").fit(grey(count=200, shape=(8, 8))).trainer_.settings
    assert (small.model.net, small.model.latent_dim, small.training.deform) == ("mlp:128", 10, 0.0)
    large = BooVAE(epochs=1, device="cpu", settings={"boo_steps": 1}).fit(grey(count=6000, shape=(28, 28)))
    settings = large.trainer_.settings
    assert (settings.model.net, settings.model.latent_dim, settings.training.bound_samples) == ("mlp:1024", 40, 10)


def test_progress_is_shown_when_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    quick().fit(grey())
    assert capfd.readouterr().err == ""
    quick(verbose=1).fit(grey())
    assert "task 1/1" in capfd.readouterr().err


def test_after_a_task_that_diverged_a_lower_learning_rate_learns() -> None:
    data = np.repeat(grey()[:, :1], 5, axis=1) * 50  # columns that say a lot about each other
    with pytest.warns(ConvergenceWarning, match="lower learning_rate"):
        model = quick(epochs=12, learning_rate=1e8).fit(data)
    before = model.score(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_params(learning_rate=1e-2).partial_fit(data)
    assert model.score(data) > before + 1


def test_a_score_that_rests_on_few_samples_is_known_by_them(
    learned: tuple[BooVAE, list[float]], digits: tuple[Array, Array]
) -> None:
    model, some = learned[0], digits[0][:60]
    effective, odd = model.effective_samples(some), model.effective_samples(some.max() - some)
    assert effective.shape == (60,)
    assert ((effective > 0.999) & (effective < 1.001 * model.samples)).all()
    assert np.median(odd) < np.median(effective)  # the encoder was never trained on the negatives
    np.testing.assert_array_equal(model.effective_samples(iter([some[:3], some[3:]])), effective)
