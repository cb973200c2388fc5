"""The estimator as its users meet it: months of data, old tasks that hold, any kind of array, saving and going on."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

from boovae import BooVAE
from boovae.errors import InputError
from boovae.training.trainer import Trainer

Array = NDArray[Any]

QUICK: dict[str, Any] = {
    "epochs": 2,
    "net": "mlp:8",
    "latent_dim": 3,
    "components": 4,
    "samples": 20,
    "random_state": 0,
    "device": "cpu",
    "settings": {"boo_steps": 2, "boo_until": 1, "distill_latents": 5},
}


def quick(**changes: Any) -> BooVAE:
    return BooVAE(**{**QUICK, **changes})


def grey(seed: int = 0, count: int = 60, shape: tuple[int, ...] = (5, 4)) -> Array:
    return np.random.default_rng(seed).random((count, *shape))


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
    assert not hasattr(model.trainer_.engine, "train")
    assert sum(tensor.numel() for tensor in kept) < images[labels < 2].size  # less than the data were


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
    for same in (pixels, torch.from_numpy(pixels), torch.from_numpy(floats), floats.tolist(), batches(), labelled):
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


def test_colours_stay_where_they_are() -> None:
    images = np.zeros((60, 5, 4, 3))
    images[..., 0] = 0.9  # red
    model = quick(epochs=60, learning_rate=0.02).fit(images)
    red, green, blue = model.sample(20).mean((0, 1, 2))
    assert red > 0.7
    assert max(green, blue) < 0.3


def test_numbers_of_any_range_are_scored_in_their_own_units() -> None:
    x = np.random.default_rng(0).normal(size=(300, 3))
    scale, shift = np.array([1e-3, 1.0, 1e4]), np.array([5.0, 0.0, -1e5])
    longer = {"epochs": 30, "net": "mlp:32", "learning_rate": 1e-2}
    plain, moved = quick(**longer).fit(x), quick(**longer).fit(x * scale + shift)
    assert plain.trainer_.settings.likelihood == "normal"
    expected = plain.score_samples(x) - np.log(scale).sum()
    np.testing.assert_allclose(moved.score_samples(x * scale + shift), expected, atol=2e-2)
    draws = moved.sample(2000, noise=True)
    np.testing.assert_allclose(draws.std(0), (x * scale).std(0), rtol=0.25)
    np.testing.assert_allclose((draws.mean(0) - shift) / scale, 0, atol=0.3)
    assert (moved.sample(2000).std(0) < draws.std(0)).all()


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
    assert model.trainer_.pixel_range[1] > 10  # learned images may go where the new task is


def test_the_likelihood_follows_the_first_task_unless_told() -> None:
    assert quick().fit(grey()).trainer_.settings.likelihood == "bernoulli"
    assert quick(likelihood="normal").fit(grey()).trainer_.settings.likelihood == "normal"
    assert quick().fit(grey() * 2).trainer_.settings.likelihood == "normal"
    with pytest.raises(InputError, match=r"likelihood='normal'"):
        quick(likelihood="bernoulli").fit(grey() * 2)


LARGER = """
import resource, sys
import numpy as np
from boovae import BooVAE

features, batches, rows = 1000, 40, 1000  # 160 MB as float32

def months():
    rng = np.random.default_rng(0)
    for _ in range(batches):
        yield rng.random((rows, features), dtype=np.float32)

model = BooVAE(2, epochs=1, net="mlp:4", components=2, random_state=0, device="cpu", settings={"boo_steps": 1})
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
        ({"likelihood": "gauss"}, "unknown likelihood"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"compile": "yes"}, "compile"),
        ({"device": "tpu"}, "device tpu is unknown"),
        ({"settings": {"epochs": 3}}, "parameter of its own"),
        ({"settings": {"replicas": 3}}, "no meaning"),
        ({"settings": {"boo_stops": 3}}, "did you mean 'boo_steps'"),
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
        (grey(shape=(6, 6)), "36 features"),
        (iter([]), "no batches"),
        (grey(count=0), "no pixels"),
    ):
        with pytest.raises(ValueError, match=words):
            model.partial_fit(data)
    for call, words in (
        (lambda: model.sample(0), "n is 0"),
        (lambda: model.sample(3, task=1), "tasks 0 to 0"),
        (lambda: model.score_samples(grey(), task=-1), "tasks 0 to 0"),
        (lambda: model.inverse_transform(np.zeros((2, 5))), "5 latent dimensions, but the model has 3"),
        (lambda: model.set_params(latent_dim=5).partial_fit(grey()), "latent_dim was 3"),
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


# --- scikit-learn's ways --------------------------------------------------------------------------------------------


def test_fit_starts_anew_and_partial_fit_goes_on() -> None:
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
    assert model.trainer_.settings.distill_weight == 2.0
    assert model.trainer_.settings.epochs == 3


def test_size_of_a_task_decides_what_is_left_open() -> None:
    small = BooVAE(epochs=1, device="cpu").fit(grey(count=200, shape=(8, 8))).trainer_.settings
    assert (small.net, small.latent_dim, small.batch_size) == ("mlp:128", 10, 32)
    large = BooVAE(epochs=1, device="cpu", settings={"boo_steps": 1}).fit(grey(count=6000, shape=(28, 28)))
    settings = large.trainer_.settings
    assert (settings.net, settings.latent_dim, settings.batch_size) == ("mlp:300", 40, 250)


def test_progress_is_shown_when_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    quick().fit(grey())
    assert capfd.readouterr().err == ""
    quick(verbose=1).fit(grey())
    assert "task 1/1" in capfd.readouterr().err


# --- keeping and moving ---------------------------------------------------------------------------------------------


def test_a_saved_model_goes_on_as_if_it_had_never_left(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    numbers = np.random.default_rng(0).normal(size=(60, 3)) * [1, 10, 100]
    model = quick().partial_fit(numbers)
    assert model.save(folder) == folder
    loaded = BooVAE.load(folder, device="cpu")
    assert loaded.get_params() == model.get_params()
    assert np.array_equal(loaded.score_samples(numbers), model.score_samples(numbers))
    assert np.array_equal(loaded.sample(5), model.sample(5))
    loaded.partial_fit(numbers + 5).save(folder)  # next month, in the same place
    model.partial_fit(numbers + 5)
    again = BooVAE.load(folder, device="cpu")
    assert again.n_tasks_ == 2
    assert np.array_equal(again.score_samples(numbers), model.score_samples(numbers))
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()} - {""}
    assert kinds == {".json", ".jsonl", ".safetensors", ".toml"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_saving_replaces_nothing_but_a_saved_model(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="something else"):
        quick().fit(grey()).save(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"
    with pytest.raises(InputError, match="no run folder"):
        BooVAE.load(tmp_path / "nowhere")


def test_a_run_of_the_command_line_loads_as_an_estimator(tmp_path: Path) -> None:
    from boovae.data import load_stream
    from boovae.metrics.evaluation import generate
    from boovae.run import load_trainer, train
    from conftest import tiny

    stream = load_stream("digits", limit=24)
    folder = train(tiny(replicas=1, tasks=2, method="boo+distill"), stream, tmp_path / "run", metrics=())
    model = BooVAE.load(folder, device="cpu")
    assert model.n_tasks_ == 2
    assert model.sample(4).shape == (4, 8, 8)
    run, trainer = load_trainer(folder, "cpu")
    run.close()
    assert torch.equal(generate(trainer, 5), generate(model.trainer_, 5))
    assert model.partial_fit(stream[2].train.images.view(-1, 8, 8)).n_tasks_ == 3
    with pytest.raises(InputError, match="something else"):
        model.save(folder)
    several = train(tiny(replicas=2, tasks=1), stream, tmp_path / "several", metrics=())
    with pytest.raises(InputError, match="2 replicas"):
        BooVAE.load(several)


def test_the_command_line_reads_a_saved_model(tmp_path: Path) -> None:
    from boovae.cli import main

    quick().partial_fit(grey()).partial_fit(grey(1)).save(tmp_path / "model")
    main(["sample", str(tmp_path / "model"), "--out", str(tmp_path / "grid.png"), "--task", "1"])
    main(["inspect", str(tmp_path / "model"), "--out", str(tmp_path / "parts.png")])
    assert (tmp_path / "grid.png").is_file()
    assert (tmp_path / "parts.png").is_file()
    assert BooVAE.load(tmp_path / "model").n_tasks_ == 2


def test_moving_to_the_same_device_changes_nothing() -> None:
    model = quick().fit(grey())
    before = model.score_samples(grey(1))
    assert model.to("cpu") is model
    assert np.array_equal(model.score_samples(grey(1)), before)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="device cuda: no CUDA device"):
            model.to("cuda")


@pytest.mark.gpu
def test_a_model_moves_to_the_gpu_and_back(digits: tuple[Array, Array], tmp_path: Path) -> None:
    images, labels = digits
    some = images[:150]
    model = BooVAE(random_state=0, device="cpu").fit(images[labels == 0])
    on_cpu, latents = model.score_samples(some), model.transform(some)
    model.to("cuda")
    on_gpu = model.score_samples(some)
    np.testing.assert_allclose(model.transform(some), latents, atol=1e-3)
    np.testing.assert_allclose(on_gpu, on_cpu, atol=2.0)  # other random numbers
    for part in (slice(0, 1), slice(17, 18), slice(3, 40), slice(70, 150)):
        assert np.array_equal(model.score_samples(some[part]), on_gpu[part])
    model.partial_fit(images[labels == 1]).save(tmp_path / "model")
    home = BooVAE.load(tmp_path / "model", device="cpu")
    np.testing.assert_allclose(home.transform(some), model.transform(some), atol=1e-3)
    assert np.array_equal(model.to("cpu").score_samples(some), home.score_samples(some))
