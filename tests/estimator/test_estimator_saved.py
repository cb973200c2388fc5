"""An estimator that is saved, loaded and moved goes on as if it had never left."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from boovae import BooVAE
from boovae.errors import InputError
from boovae.runs.extend import extend
from quick_estimator import Array, grey, quick
from run_folders import write_report


@pytest.fixture(scope="module")
def digits() -> tuple[Array, Array]:
    data = load_digits()
    return data.images / 16, data.target


def test_a_saved_model_continues_as_if_never_saved(tmp_path: Path) -> None:
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
    with pytest.raises(InputError, match="something other"):
        quick().fit(grey()).save(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"
    with pytest.raises(InputError, match="not a run folder"):
        BooVAE.load(tmp_path / "nowhere")


def test_a_run_of_the_command_line_loads_as_an_estimator(tmp_path: Path) -> None:
    from boovae.data import load_stream
    from boovae.runs.train import load_trainer, train
    from boovae.training.sampling import generate
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
    with pytest.raises(InputError, match="something other"):
        model.save(folder)
    several = train(tiny(replicas=2, tasks=1), stream, tmp_path / "several", metrics=())
    with pytest.raises(InputError, match="2 replicas"):
        BooVAE.load(several)


def test_the_command_line_reads_a_saved_model(tmp_path: Path) -> None:
    from boovae.cli.main import main

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


def test_numbers_of_numpy_and_a_device_of_torch_can_be_saved(tmp_path: Path) -> None:
    settings = {"boo_steps": np.int64(2), "distill_weight": np.float32(0.5), "boo_reencode": np.True_}
    model = quick(settings=settings, device=torch.device("cpu")).fit(grey())
    loaded = BooVAE.load(model.save(tmp_path / "model"), device="cpu")
    assert loaded.settings == {"boo_steps": 2, "distill_weight": 0.5, "boo_reencode": True}
    assert np.array_equal(loaded.score_samples(grey(1)), model.score_samples(grey(1)))


def test_a_run_on_black_and_white_pixels_does_not_go_on_with_grey_ones(tmp_path: Path) -> None:
    from boovae.data import load_stream
    from boovae.runs.train import train
    from conftest import tiny

    stream = load_stream("digits", limit=24, binarize="dynamic")
    settings = tiny(replicas=1, tasks=1, method="boo+distill", binarize="dynamic")
    model = BooVAE.load(train(settings, stream, tmp_path / "run", metrics=()), device="cpu")
    assert model.sample(2).shape == (2, 8, 8)
    kept = BooVAE.load(model.save(tmp_path / "model"), device="cpu")
    for same in (model, kept, pickle.loads(pickle.dumps(model)), model.to("cpu")):
        with pytest.raises(InputError, match="binarised pixels; continue it with `boovae extend RUN`"):
            same.partial_fit(stream[1].train.images.view(-1, 8, 8))


def test_the_command_line_says_that_a_saved_model_continues_in_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from boovae.cli.main import main

    folder = quick().fit(grey()).save(tmp_path / "model")
    with pytest.raises(SystemExit):
        main(["eval", str(folder)])
    assert (
        "a model of arrays does not keep its images; measure others in Python: `BooVAE.load(...).score(images)`"
        in capsys.readouterr().err
    )
    with pytest.raises(InputError, match=r"saved estimator.*BooVAE\.load\(.*\.partial_fit"):
        extend(folder, "digits", device="cpu")


def test_a_colour_run_of_the_command_line_takes_and_gives_colours_last(tmp_path: Path) -> None:
    from boovae.cli.main import main

    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (24, 6, 5, 3), dtype=np.uint8)
    np.savez(tmp_path / "colours.npz", images=images, labels=np.zeros(24, np.int64))
    words = f"train --dataset npz:{tmp_path}/colours.npz --net mlp:8 --latent-dim 2 --epochs 1 --components 2"
    words += f" --samples 2 --generated 4 --metric nll --quiet --device cpu --out {tmp_path}/run"
    main(words.split())
    model = BooVAE.load(tmp_path / "run", device="cpu")
    assert model.sample(2).shape == (2, 6, 5, 3)
    first = np.moveaxis(images, -1, 1)
    np.testing.assert_array_equal(model.transform(images), model.transform(first))


def test_the_page_of_a_saved_model_does_not_wait_for_numbers(tmp_path: Path) -> None:
    page = write_report([quick().fit(grey()).save(tmp_path / "model")]).read_text(encoding="utf-8")
    assert "A saved estimator keeps no images, so it is not measured" in page
    assert "unfinished" not in page
    assert "no numbers yet" not in page
    assert "above the learned pseudo-input" not in page  # there are no pictures
