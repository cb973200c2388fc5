"""What an estimator takes: any kind of array, any numbers, batches larger than memory; and what it refuses."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from boovae import BooVAE
from boovae.errors import InputError
from boovae.training.trainer import Trainer
from quick_estimator import Array, grey, quick

# --- what comes in --------------------------------------------------------------------------------------------------


def test_arrays_tensors_lists_bytes_and_batches_are_the_same_data() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 5, 4), dtype=np.uint8)
    floats = pixels / np.float32(255)
    truth = quick().fit(floats).score_samples(floats)

    def batches() -> Iterator[Array]:
        for start in range(0, 60, 17):
            yield pixels[start : start + 17]

    labelled = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(pixels), torch.zeros(60)), batch_size=16
    )
    lists = (list(batch) for batch in batches())
    tensors = torch.from_numpy(pixels)
    for same in (pixels, tensors, torch.from_numpy(floats), floats.tolist(), batches(), labelled, lists):
        model = quick().fit(same)
        np.testing.assert_array_equal(model.score_samples(floats), truth)
    np.testing.assert_array_equal(model.score_samples(batches()), truth)
    np.testing.assert_array_equal(model.transform(labelled), model.transform(pixels))


@pytest.mark.parametrize("shape", [(7,), (5, 4), (5, 4, 1), (1, 5, 4), (5, 4, 3), (3, 5, 4)])
def test_images_come_back_in_the_shape_they_came_in(shape: tuple[int, ...]) -> None:
    model = quick().fit(grey(shape=shape))
    assert model.sample(6).shape == (6, *shape)
    assert model.reconstruct(grey(1, 9, shape)).shape == (9, *shape)
    assert model.components_.shape[1:] == shape
    assert model.transform(grey(1, 9, shape)).shape == (9, 3)


@pytest.mark.filterwarnings("error")
def test_latents_that_may_not_be_changed_are_decoded_without_a_warning() -> None:
    model = quick().fit(grey())
    latents = model.transform(grey(1))
    latents.flags.writeable = False  # as those of a table are, and those of a file in memory
    assert np.array_equal(model.inverse_transform(latents), model.reconstruct(grey(1)))


def test_colours_stay_where_they_are() -> None:
    images = np.zeros((60, 5, 4, 3))
    images[..., 0] = 0.9  # red
    model = quick(epochs=60, learning_rate=0.02).fit(images)
    red, green, blue = model.sample(20).mean((0, 1, 2))
    assert red > 0.7
    assert max(green, blue) < 0.3


@pytest.mark.parametrize(
    "parameters", [{"net": "conv:4"}, {"settings": {"jitter": 0.1}}, {"settings": {"deform": 0.1}}]
)
def test_what_needs_pictures_takes_pictures_and_refuses_rows(parameters: dict[str, Any]) -> None:
    pictures = np.random.default_rng(0).random((24, 32, 32, 3))
    assert quick(epochs=1, **parameters).fit(pictures).sample(2).shape == (2, 32, 32, 3)
    with pytest.raises(InputError, match=r"these (have shape \(64,\)|are 64 features)"):
        quick(epochs=1, **parameters).fit(grey(shape=(64,)))


@pytest.mark.parametrize("settings", [{"mirror": True}, {"deform": 0.1}, {"jitter": 0.1}, {"decoder_bounds": True}])
def test_what_is_for_grey_values_is_refused_for_numbers_that_are_standardised(settings: dict[str, Any]) -> None:
    pictures = np.random.default_rng(0).random((24, 8, 8, 3))
    parameters = {"epochs": 1, "settings": settings, "net": "conv:2"}
    quick(**parameters).fit(pictures)
    with pytest.raises(InputError, match=f"settings: {next(iter(settings))} is for grey values"):
        quick(**parameters).fit(255 * pictures)


def test_the_bounds_of_a_decoder_cannot_change_between_tasks() -> None:
    pictures = np.random.default_rng(0).random((24, 8, 8))
    model = quick(epochs=1, net="conv:2", likelihood="logistic").fit(pictures)
    with pytest.raises(InputError, match="decoder_bounds was True when this model began"):
        model.set_params(settings={"decoder_bounds": False}).partial_fit(pictures)


def test_noise_is_given_without_a_likelihood_and_cannot_change_between_tasks() -> None:
    rows = np.random.default_rng(0).normal(size=(60, 5))
    model = quick(epochs=1, settings={"noise": "learned"}).fit(rows)
    assert np.isfinite(model.score(rows))
    with pytest.raises(InputError, match="noise was 'learned' when this model began"):
        model.set_params(settings={"noise": "fixed"}).partial_fit(rows)


def test_few_first_images_of_a_stream_are_enough_for_batch_normalisation() -> None:
    settings = {"boo_steps": 1, "normalisation": "batch"}
    model = quick(net="conv:2", detect_tasks=True, detect_first=16, settings=settings)
    assert model.fit(grey(count=20, shape=(8, 8))).n_tasks_ == 1


def test_what_training_refuses_speaks_of_parameters_not_of_flags() -> None:
    one = np.random.default_rng(0).random((1, 32, 32, 3))
    with pytest.raises(InputError, match=r"use normalisation='group', or a larger batch_size"):
        quick(net="conv:4", settings={"normalisation": "batch"}, validation_fraction=0.0).fit(one)


def test_numbers_of_any_range_are_scored_in_their_own_units() -> None:
    x = np.random.default_rng(0).normal(size=(300, 3))
    scale, shift = np.array([1e-3, 1.0, 1e4]), np.array([5.0, 0.0, -1e5])
    longer = {"epochs": 30, "net": "mlp:32", "learning_rate": 1e-2}
    plain, moved = quick(**longer).fit(x), quick(**longer).fit(x * scale + shift)
    assert plain.trainer_.settings.model.likelihood == "normal"
    expected = plain.score_samples(x) - np.log(scale).sum()
    np.testing.assert_allclose(moved.score_samples(x * scale + shift), expected, atol=2e-2)
    draws = moved.sample(2000, noise=True)
    np.testing.assert_allclose(draws.std(0), (x * scale).std(0), rtol=0.25)
    np.testing.assert_allclose((draws.mean(0) - shift) / scale, 0, atol=0.3)
    assert (moved.sample(2000).std(0) < draws.std(0)).all()


def test_numbers_far_from_zero_score_the_same_as_rows_and_as_pictures() -> None:
    far = np.random.default_rng(0).normal(size=(60, 4, 2)) + 1.7e9  # float32 has steps of 128 there
    rows = far.reshape(60, 8)
    np.testing.assert_array_equal(quick().fit(far).score_samples(far), quick().fit(rows).score_samples(rows))


def test_a_density_integrates_to_one() -> None:
    """Independent truth: one feature, all of its line; p(x) by importance sampling must add up to one."""
    x = np.random.default_rng(0).normal(2.0, 3.0, size=(200, 1))
    model = quick(latent_dim=2, epochs=30, samples=300).fit(x)
    line = np.linspace(-25, 30, 2000)[:, None]
    assert np.trapezoid(np.exp(model.score_samples(line)), line[:, 0]) == pytest.approx(1, abs=0.02)


def test_scaling_is_learned_on_the_first_task_and_kept() -> None:
    first = np.random.default_rng(0).normal(size=(60, 3))
    model = quick().partial_fit(first)
    before = model.scaling_
    model.partial_fit(first * 3 + 10)
    assert model.scaling_ is before
    assert model.trainer_.spec.pixel_range[1] > 10  # learned images may go where the new task is


def test_the_likelihood_follows_the_first_task_unless_given() -> None:
    assert quick().fit(grey()).trainer_.settings.model.likelihood == "bernoulli"
    assert quick(likelihood="normal").fit(grey()).trainer_.settings.model.likelihood == "normal"
    assert quick().fit(grey() * 2).trainer_.settings.model.likelihood == "normal"
    assert quick().fit(grey() - 1e-7).trainer_.settings.model.likelihood == "bernoulli"  # rounded
    assert quick().fit((grey() - 0.5) * 1e-6).trainer_.settings.model.likelihood == "normal"  # small, not rounded
    with pytest.raises(InputError, match=r"likelihood='normal'"):
        quick(likelihood="bernoulli").fit(grey() * 2)


@pytest.mark.parametrize("net", ["mlp:8", "conv:4"])
def test_a_wider_range_of_numbers_leaves_what_was_learned_where_it_is(net: str) -> None:
    first = np.random.default_rng(0).normal(size=(60, 8, 8))
    wider = first.copy()
    wider[0] = 50.0
    model = quick(net=net).fit(first)
    model.set_params(learning_rate=1e-9, settings={"boo_steps": 0})
    before = model.reconstruct(first)
    np.testing.assert_allclose(model.partial_fit(wider).reconstruct(first), before, atol=1e-4)
    assert model.trainer_.spec.pixel_range[1] > 40


def test_a_wider_range_of_numbers_leaves_a_vampprior_where_it_is() -> None:
    first = 100 * grey()
    model = quick(method="standard", learning_rate=1e-8, settings={"prior": "vamp"}).partial_fit(first)
    before = model.score_samples(first)
    wider = first.copy()
    wider[0] *= 50.0
    np.testing.assert_allclose(model.partial_fit(wider).score_samples(first), before, rtol=1e-3)


LARGER = """
import resource, sys
import numpy as np
from boovae import BooVAE

features, batches, rows = 1000, 40, 1000  # 160 MB as float32

def months():
    rng = np.random.default_rng(0)
    for _ in range(batches):
        yield rng.random((rows, features), dtype=np.float32)

model = BooVAE(2, epochs=1, net="mlp:4", components=2, random_state=0, device="cpu",
               settings={"boo_steps": 1, "bound_samples": 1})
model.fit(np.random.default_rng(1).random((2000, features), dtype=np.float32))  # everything is imported and warm
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 100_000_000,) * 2)
try:
    np.ones(batches * rows * features, np.float32)
except MemoryError:
    print("too large for memory,", end=" ")
model.partial_fit(months())
print("learned", model.trainer_.sizes[1])
"""


def test_a_task_larger_than_memory_is_learned_from_batches() -> None:
    done = subprocess.run([sys.executable, "-c", LARGER], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "too large for memory, learned 36000", done.stderr


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"method": "boo+distil"}, "did you mean 'distill'"),
        ({"net": "cnn"}, r"unknown net 'cnn' \(net\)"),
        ({"latent_dim": 0}, "latent_dim is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"likelihood": "gauss"}, "unknown value for likelihood"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"validation_fraction": None}, "validation_fraction is None"),
        ({"compile": "yes"}, "compile"),
        ({"device": "tpu"}, "device tpu is unknown"),
        ({"random_state": "x"}, "random_state is 'x'; it must be a whole number"),
        ({"random_state": -1}, "random_state is -1"),
        ({"settings": ["epochs"]}, "settings is .* must be a dictionary"),
        ({"settings": {"epochs": 3}}, "parameter of its own"),
        ({"settings": {"replicas": 3}}, "no meaning"),
        ({"settings": {"borders": [20]}}, "no meaning"),
        ({"settings": {"boo_stops": 3}}, "did you mean 'boo_steps'"),
        ({"settings": {3: 4}}, "unknown setting '3'"),
    ],
)
def test_bad_parameters_are_named_before_any_work(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        quick(**parameters).fit(grey())


def test_bad_data_are_named_and_leave_the_model_as_it_was() -> None:
    model = quick().fit(grey())
    before = model.score_samples(grey(1))
    bad = grey()
    bad[3, 1, 1] = np.nan
    for data, words in (
        (bad, "NaN"),
        (grey() * 255, "divide"),
        (grey(shape=(4, 5)), r"shape \(4, 5\), but the model has learned \(5, 4\)"),
        (grey(shape=(6, 6)), r"shape \(6, 6\), but the model has learned"),
        (grey(shape=(6, 6)).reshape(-1, 36), "36 features"),
        ([grey(), grey()], r"1 or 3 colours.* pass a list of batches as iter\(X\)"),
        ([grey(), grey(count=7)], r"different sizes.* pass a list of batches as iter\(X\)"),
        ("pictures", "X is a str; pass an array or tensor"),
        (None, "X is a NoneType; pass an array"),
        (iter([]), "no batches"),
        (grey(count=0), "no pixels"),
    ):
        with pytest.raises(ValueError, match=words):
            model.partial_fit(data)
    for call, words in (
        (lambda: model.sample(0), "n is 0"),
        (lambda: model.sample(3, task=1), "tasks 0 to 0"),
        (lambda: model.score_samples(grey(), task=-1), "tasks 0 to 0"),
        (lambda: model.sample(3, task="first"), "task is 'first'; the model has learned tasks 0 to 0"),  # type: ignore[arg-type]
        (lambda: model.transform({"images": grey()}), "X is a dict"),
        (lambda: BooVAE.load("nowhere"), "`boovae train --out nowhere` makes one"),
        (lambda: model.inverse_transform(np.zeros((2, 5))), "5 latent dimensions, but the model has 3"),
        (lambda: model.set_params(latent_dim=5).partial_fit(grey()), "latent_dim was 3"),
        (lambda: model.score(iter([])), "no batches; a generator can be read only once"),
        (lambda: copy.copy(model).fit_transform(iter([grey()])), "no batches; a generator can be read only once"),
        (lambda: copy.copy(model).set_params(samples=0).score(grey()), "samples is 0"),
        (lambda: copy.copy(model).set_params(samples=2.5).score(grey()), "samples is 2.5"),
    ):
        with pytest.raises(InputError, match=words):
            call()
    assert model.n_tasks_ == 1
    assert np.array_equal(model.score_samples(grey(1)), before)


def test_bad_parameters_are_named_before_a_long_read() -> None:
    def endless() -> Iterator[Array]:
        raise AssertionError("read too early")
        yield grey()

    for parameters in ({"method": "bo"}, {"net": "cnn"}, {"learning_rate": -1.0}):
        with pytest.raises(InputError):
            quick(**parameters).fit(endless())
    with pytest.raises(InputError, match="components was 4"):
        quick().fit(grey()).set_params(components=5).partial_fit(endless())
    for name, value in (("normalisation", "batch"), ("flow_layers", 2), ("flow_width", 16)):
        flow = quick(method="boo-flow").fit(grey())
        with pytest.raises(InputError, match=f"{name} was .*; it cannot change between tasks"):
            flow.set_params(settings={name: value}).partial_fit(endless())


def test_a_fit_that_fails_leaves_the_model_as_it_was() -> None:
    model = quick().fit(grey())
    before = model.score_samples(grey(1))
    with pytest.raises(ValueError, match="NaN"):
        model.fit(np.full((60, 7, 7), np.nan))
    assert np.array_equal(model.score_samples(grey(1)), before)


def test_nothing_works_before_fit() -> None:
    model = quick()
    for call in (model.sample, lambda: model.transform(grey()), lambda: model.score(grey()), lambda: model.save("x")):
        with pytest.raises(NotFittedError):
            call()
    assert not hasattr(model, "n_tasks_")
    assert not hasattr(model, "components_")


def test_an_interrupted_task_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quick().fit(grey())
    before = model.score_samples(grey(1))

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.partial_fit(grey(2))
    assert np.array_equal(model.score_samples(grey(1)), before)
    once = quick().fit(grey()).partial_fit(grey(2))
    assert np.array_equal(model.partial_fit(grey(2)).score_samples(grey(1)), once.score_samples(grey(1)))
