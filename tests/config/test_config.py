from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from boovae.config.presets import RECIPES
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from boovae.config import Settings, to_toml
from boovae.config.resolve import read_toml
from boovae.errors import InputError
from boovae.errors import as_flag as flag
from boovae.methods import from_mapping, make_method, resolve

positive = st.integers(1, 10**12)
finite = st.floats(allow_nan=False, allow_infinity=False)

PRINTABLE = st.text().filter(str.isprintable)
ANY_SETTINGS = st.builds(
    Settings,
    dataset=PRINTABLE,
    method=PRINTABLE,
    tasks=st.none() | positive,
    classes_per_task=positive,
    class_order=st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(tuple),
    limit=st.none() | positive,
    binarize=st.sampled_from(["none", "dynamic", "threshold"]),
    data_seed=st.integers(0, 2**62),
    net=PRINTABLE,
    latent_dim=positive,
    likelihood=st.sampled_from(["bernoulli", "normal", "logistic"]),
    log_variance_range=st.tuples(finite, finite).filter(lambda pair: pair[0] < pair[1]),
    prior=st.sampled_from(["normal", "vamp"]),
    components=positive,
    replicas=positive,
    seed=st.integers(0, 2**62),
    epochs=positive,
    batch_size=positive,
    learning_rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    plateau_patience=positive,
    early_stop=positive,
    kl_weight=st.floats(min_value=0, allow_infinity=False),
    kl_warmup=st.integers(0, 10**6),
    samples=positive,
    generated=positive,
)


# --- TOML -----------------------------------------------------------------------------------------------------------


@hypothesis_settings(max_examples=60, deadline=None)
@given(ANY_SETTINGS)
def test_settings_survive_toml(settings: Settings) -> None:
    back = from_mapping(tomllib.loads(to_toml(settings)))
    assert back == settings
    assert to_toml(back) == to_toml(settings)


def test_settings_survive_a_file(tmp_path: Path) -> None:
    settings = Settings().changed(dataset='folder:C:\\a "b" ü', class_order=(3, 1, 2), tasks=2, learning_rate=1e-7)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(settings), encoding="utf-8")
    assert resolve({}, path) == settings


@pytest.mark.parametrize("name", ["folder:a\nb", "folder:\x7f", "folder:\udcff"])
def test_names_that_no_terminal_can_show_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"--dataset is .* printable"):
        Settings().changed(dataset=name)


def test_numbers_come_back_with_the_type_of_their_setting() -> None:
    settings = from_mapping({"kl_weight": 1, "log_variance_range": [-6, 2], "class_order": [1, 0]})
    assert isinstance(settings.training.kl_weight, float)
    assert settings.model.log_variance_range == (-6.0, 2.0)
    assert all(isinstance(limit, float) for limit in settings.model.log_variance_range)
    assert settings.data.class_order == (1, 0)


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no-such\.toml \(--config\)"):
        resolve({}, tmp_path / "no-such.toml")


@pytest.mark.parametrize("content", [b"epochs = ", b"\xff\xfe", b"epochs = 1\nepochs = 2\n"])
def test_an_unreadable_configuration_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"broken\.toml \(--config\)"):
        read_toml(path)


def test_a_folder_is_no_configuration_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--config"):
        read_toml(tmp_path)


# --- who wins -------------------------------------------------------------------------------------------------------


def test_flag_beats_file_beats_preset_beats_recipe_beats_default(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('dataset = "fashion_mnist"\nbatch_size = 7\nearly_stop = 8\n')
    settings = resolve({"batch_size": 9}, path, preset="paper")
    assert settings.training.batch_size == 9  # flag; the file has 7, the preset 500, the default is 250
    assert settings.training.early_stop == 8  # file; the preset has 50
    assert settings.training.epochs == 1000  # the preset for this dataset
    assert settings.model.net == "mlp:1024"  # recipe; the default is mlp:300
    assert settings.model.latent_dim == 40  # default
    assert resolve({}, path).batch_size == 7
    assert resolve({"dataset": "fashion_mnist"}, preset="paper").batch_size == 500
    assert resolve({"dataset": "fashion_mnist"}).batch_size == 250


def test_an_unknown_preset_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"--preset.*papr.*paper"):
        resolve({}, preset="papr")


def test_the_recipe_follows_the_dataset_that_wins(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('dataset = "fashion_mnist"\n')
    assert resolve({"dataset": "mnist"}, path).net == "mlp:300"
    assert resolve({}, path).net == "mlp:1024"


def test_without_a_dataset_the_recipe_of_the_default_one_counts() -> None:
    assert Settings().dataset == "digits"
    assert resolve({}) == resolve({"dataset": "digits"})
    assert resolve({}).net == RECIPES["digits"]["net"]


def test_own_data_is_learned_in_batches_that_fit_its_tasks() -> None:
    own = resolve({"dataset": "npz:some.npz"})
    assert own == Settings().changed(dataset="npz:some.npz", epoch_steps=20, learning_rate=1e-3)
    assert [own.batch_of(images) for images in (7, 48, 300, 1000, 9000)] == [7, 24, 30, 50, 250]
    assert resolve({"dataset": "npz:some.npz", "batch_size": 16}).batch_of(300) == 15  # nineteen steps, evenly
    assert resolve({"dataset": "mnist"}).batch_of(300) == 250


def test_a_flag_that_repeats_the_default_still_beats_the_recipe() -> None:
    assert resolve({"dataset": "fashion_mnist", "batch_size": Settings.batch_size}).batch_size == 250


@pytest.mark.parametrize("dataset", sorted(RECIPES))
def test_every_recipe_is_made_of_valid_settings(dataset: str) -> None:
    settings = resolve({"dataset": dataset, "method": "standard"})  # without strengths of its own
    for name, value in RECIPES[dataset].items():
        assert getattr(settings, name) == value


def test_the_preset_is_the_papers_table() -> None:
    mnist, fashion, letters = (
        resolve({"dataset": name, "method": "boo"}, preset="paper") for name in ("mnist", "fashion_mnist", "notmnist")
    )
    assert (mnist.net, fashion.net, letters.net) == ("mlp:300", "mlp:1024", "mlp:1024")
    assert (mnist.batch_size, fashion.batch_size, letters.batch_size) == (250, 500, 250)
    assert (mnist.epochs, fashion.epochs, letters.epochs) == (500, 1000, 500)
    assert (mnist.log_variance_range, fashion.log_variance_range) == ((-6.0, 2.0), (-4.0, 4.0))
    assert {setting.latent_dim for setting in (mnist, fashion, letters)} == {40}
    assert {(setting.schedule, setting.early_stop) for setting in (mnist, fashion, letters)} == {("plateau", 50)}
    assert {setting.learning_rate for setting in (mnist, fashion, letters)} == {5e-4}
    assert {setting.deform for setting in (mnist, fashion, letters)} == {0.0}


def test_the_preset_takes_back_what_the_recipe_of_a_method_changes() -> None:
    given = {"dataset": "notmnist", "method": "boo+distill"}
    ours, paper = resolve(given), resolve(given, preset="paper")
    assert (ours.bound_samples, ours.kl_warmup, ours.batch_size) == (10, 20, 125)
    assert (paper.bound_samples, paper.kl_warmup, paper.batch_size) == (1, 0, 250)
    faces = resolve({"dataset": "celeba", "method": "boo"}, preset="paper")
    assert (faces.kl_warmup, faces.batch_size) == (10, 512)
    assert resolve({"dataset": "digits", "method": "boo"}, preset="paper").batch_size == 32


@pytest.mark.parametrize("method", ["vcl+distill", "boo+distill+vcl"])
def test_the_recipe_asks_nothing_of_vcl_that_it_refuses(method: str) -> None:
    settings = resolve({"dataset": "mnist", "method": method})
    make_method(settings)
    assert settings.training.bound_samples == 1


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("epoch", "epochs"), ("batchsize", "batch_size"), ("learning-rate", "learning_rate"), ("laten_dim", "latent_dim")],
)
def test_an_unknown_setting_is_refused_with_the_nearest_name(wrong: str, right: str) -> None:
    with pytest.raises(InputError, match=f"unknown setting '{wrong}': did you mean '{right}'"):
        from_mapping({wrong: 1})


def test_an_unknown_setting_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[train]\nepochs = 3\n")
    with pytest.raises(InputError, match="unknown setting 'train'"):
        resolve({}, path)


WRONG_VALUES: list[tuple[str, Any]] = [
    *((name, bad) for name in ("replicas", "epochs", "batch_size", "latent_dim", "components") for bad in (0, -1)),
    *((name, 0) for name in ("samples", "generated", "plateau_patience", "early_stop", "classes_per_task")),
    *((name, 0) for name in ("tasks", "limit")),
    *((name, -1) for name in ("kl_warmup", "kl_weight", "seed", "data_seed")),
    *(("learning_rate", bad) for bad in (0.0, -1e-3, math.nan, math.inf)),
    *(("kl_weight", bad) for bad in (math.nan, math.inf)),
    *(("log_variance_range", bad) for bad in ((2.0, -6.0), (1.0, 1.0), (math.nan, 1.0))),
    *((name, "other") for name in ("binarize", "likelihood", "prior")),
]


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_flag(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=flag(name)):
        from_mapping({name: value})
    with pytest.raises(InputError, match=flag(name)):
        Settings(**{name: value})


WRONG_TYPES: list[tuple[str, Any]] = [
    ("replicas", "3"),
    ("replicas", 2.5),
    ("replicas", True),
    ("epochs", [3]),
    ("tasks", "all"),
    ("learning_rate", "fast"),
    ("learning_rate", False),
    ("kl_weight", [1.0]),
    ("dataset", 3),
    ("net", 300),
    ("binarize", 1),
    ("prior", ["vamp"]),
    ("class_order", 3),
    ("class_order", "012"),
    ("class_order", [0.5, 1]),
    ("class_order", [True, 0]),
    ("log_variance_range", -6.0),
    ("log_variance_range", [-6.0]),
    ("log_variance_range", [-6.0, 0.0, 2.0]),
    ("log_variance_range", ["-6", "2"]),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused_by_the_name_of_its_flag(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=flag(name)):
        from_mapping({name: value})


def test_an_unknown_choice_names_the_choices() -> None:
    with pytest.raises(InputError, match=r"--binarize 'dynamc': did you mean 'dynamic'\? Known: dynamic, none, thresh"):
        Settings().changed(binarize="dynamc")  # type: ignore[arg-type]


# --- the rest -------------------------------------------------------------------------------------------------------


def test_seeds_of_the_replicas_follow_by_one() -> None:
    assert Settings().changed(seed=3, replicas=4).seeds == (3, 4, 5, 6)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().epochs = 3  # type: ignore[misc]


def test_reading_the_settings_needs_neither_torch_nor_tyro() -> None:
    code = "import sys, boovae.config; print(sorted({'torch', 'tyro', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
