"""Settings: their limits, who wins where several name one, files old and new, and the names of folders."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from boovae.boosting.fit import FitSettings
from boovae.config import CORE, CORE_NAMES, Section, Settings, folder_name, to_toml
from boovae.config.resolve import packaged_toml, read_settings, read_toml
from boovae.config.section import NotNegative
from boovae.errors import InputError, SettingError, as_flag
from boovae.methods import METHODS, REGISTRY, Method, from_mapping, make_method, register, resolve
from boovae.methods.distill import DistillSettings
from boovae.methods.ewc import EWCSettings

positive = st.integers(1, 10**12)
finite = st.floats(allow_nan=False, allow_infinity=False)
not_negative = st.floats(min_value=0, allow_infinity=False)

PRINTABLE = st.text().filter(str.isprintable)
CORE_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "dataset": PRINTABLE,
    "tasks": positive,
    "classes_per_task": positive,
    "class_order": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(tuple),
    "borders": st.lists(positive, max_size=5).map(tuple),
    "resize": st.just("auto") | st.tuples(positive, positive),
    "limit": positive,
    "binarize": st.sampled_from(["none", "dynamic", "threshold"]),
    "data_seed": st.integers(0, 2**62),
    "net": PRINTABLE,
    "decoder_bounds": st.booleans(),
    "latent_dim": positive,
    "likelihood": st.sampled_from(["bernoulli", "normal", "logistic"]),
    "log_variance_range": st.tuples(finite, finite).filter(lambda pair: pair[0] < pair[1]),
    "prior": st.sampled_from(["normal", "vamp"]),
    "components": positive,
    "replicas": positive,
    "seed": st.integers(0, 2**62),
    "epochs": positive,
    "batch_size": positive,
    "learning_rate": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    "plateau_patience": positive,
    "early_stop": positive,
    "kl_weight": not_negative,
    "kl_warmup": st.integers(0, 10**6),
    "samples": positive,
    "generated": positive,
}
#: A combination that reads sections of several files, and some of their settings.
METHOD = "boo+distill+ewc"
METHOD_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boo_objective": st.sampled_from(["corrective", "forward", "literal"]),
    "boo_reencode": st.booleans(),
    "boo_lambda": not_negative,
    "boo_steps": st.integers(0, 10**6),
    "distill_latents": positive,
    "ewc_decay": st.floats(0, 1),
}


def settings_with(core: dict[str, Any], own: dict[str, Any]) -> Settings:
    return from_mapping({"method": METHOD, **core, **own})


ANY_SETTINGS = st.builds(
    settings_with,
    st.fixed_dictionaries({}, optional=CORE_VALUES),
    st.fixed_dictionaries({}, optional=METHOD_VALUES),
)


def written(settings: Settings) -> str:
    """Return the settings as a run folder has them."""
    return to_toml(settings, REGISTRY.sections(settings.method))


# --- TOML -----------------------------------------------------------------------------------------------------------


@hypothesis_settings(max_examples=60, deadline=None)
@given(ANY_SETTINGS)
def test_settings_survive_toml(settings: Settings) -> None:
    back = from_mapping(tomllib.loads(written(settings)))
    assert back == settings
    assert written(back) == written(settings)
    assert from_mapping(settings.flat()) == settings
    assert folder_name(back) == folder_name(settings)


def test_settings_survive_a_file(tmp_path: Path) -> None:
    settings = Settings().changed(dataset='folder:C:\\a "b" ü', class_order=(3, 1, 2), tasks=2, learning_rate=1e-7)
    path = tmp_path / "config.toml"
    path.write_text(written(settings), encoding="utf-8")
    assert resolve({}, path) == settings


def test_a_file_has_a_table_for_each_section_and_every_setting_of_the_method() -> None:
    settings = resolve({"dataset": "mnist", "method": "boo+ewc", "ewc_strength": 3, "epochs": 5})
    tables = tomllib.loads(written(settings))
    assert list(tables) == ["method", "chosen", *CORE, "method_settings"]
    assert tables["training"]["epochs"] == 5
    own = {item.name for kind in REGISTRY.sections("boo+ewc") for item in dataclasses.fields(kind)}
    assert set(tables["method_settings"]) == own
    assert tables["method_settings"]["ewc_strength"] == 3.0
    assert tables["method_settings"]["boo_steps"] == 100  # a default that changes later does not change this run


def test_a_file_may_be_flat_or_in_tables(tmp_path: Path) -> None:
    flat, tables = tmp_path / "flat.toml", tmp_path / "tables.toml"
    flat.write_text('method = "ewc"\nepochs = 3\ntasks = 2\newc_strength = 5\n')
    tables.write_text(
        'method = "ewc"\n[training]\nepochs = 3\n[data]\ntasks = 2\n[method_settings]\newc_strength = 5\n'
    )
    assert resolve({}, flat) == resolve({}, tables)
    assert resolve({}, flat).of(EWCSettings).ewc_strength == 5.0
    assert read_settings(flat) == read_settings(tables)


def test_numbers_come_back_with_the_type_of_their_setting() -> None:
    settings = from_mapping({"kl_weight": 1, "log_variance_range": [-6, 2], "class_order": [1, 0]})
    assert isinstance(settings.training.kl_weight, float)
    assert settings.model.log_variance_range == (-6.0, 2.0)
    assert all(isinstance(limit, float) for limit in settings.model.log_variance_range)
    assert settings.data.class_order == (1, 0)


def test_numbers_of_numpy_are_numbers() -> None:
    settings = from_mapping(
        {
            "method": "ewc",
            "epochs": np.int64(3),
            "kl_weight": np.float32(0.5),
            "mirror": np.bool_(True),
            "log_variance_range": (np.float64(-5), np.int32(1)),
            "class_order": np.array([2, 0, 1]),
            "ewc_strength": np.float64(7),
        }
    )
    plain = {"epochs": 3, "kl_weight": 0.5, "mirror": True, "log_variance_range": [-5, 1], "class_order": [2, 0, 1]}
    assert settings == from_mapping({"method": "ewc", "ewc_strength": 7, **plain})
    assert from_mapping(tomllib.loads(written(settings))) == settings
    with pytest.raises(SettingError, match=r"epochs is 2\.5; it must be a whole number of at least 1"):
        from_mapping({"epochs": np.float64(2.5)})


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no-such\.toml \(config\)"):
        resolve({}, tmp_path / "no-such.toml")


@pytest.mark.parametrize("content", [b"epochs = ", b"\xff\xfe", b"epochs = 1\nepochs = 2\n"])
def test_an_unreadable_configuration_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"broken\.toml \(config\)"):
        read_toml(path)
    with pytest.raises(InputError, match=r"broken\.toml \(recipe\)"):
        read_toml(path, "recipe")


def test_a_folder_is_no_configuration_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\(config\)"):
        read_toml(tmp_path)


# --- version 0.1.0 --------------------------------------------------------------------------------------------------

#: All 79 settings of version 0.1.0, written by it; none is its default, but for `method` and `distill_encoder`.
OLD = Path(__file__).with_name("config-0.1.0.toml")


@dataclasses.dataclass(frozen=True)
class AnchorSettings(Section):
    """What a method of a user's own had as a strength."""

    anchor_pull: NotNegative = 100.0
    """How firmly it holds."""


@pytest.fixture
def anchor() -> Iterator[type[Method]]:
    """A method from outside the package, known for as long as a test."""
    yield register(type("Anchor", (Method,), {"name": "anchor", "sections": (AnchorSettings,)}))
    del METHODS["anchor"]


def test_a_file_of_version_0_1_0_is_read_to_the_last_setting(anchor: type[Method]) -> None:
    old = tomllib.loads(OLD.read_text())
    assert len(old) == 79
    read = {name for name in old if name != "strengths"}
    since = {"noise", "noise_floor", "input_noise", "resize", "fit_posterior"}  # came later
    assert read == CORE_NAMES - since | (REGISTRY.owners().keys() - {"anchor_pull"})
    settings = resolve({}, OLD)
    core = {name: tuple(v) if isinstance(v, list) else v for name, v in old.items() if name in CORE_NAMES}
    assert {name: settings.flat()[name] for name in core} == core
    for kind in REGISTRY.sections("boo+distill"):
        assert dataclasses.asdict(settings.of(kind)) == {item.name: old[item.name] for item in dataclasses.fields(kind)}
    assert (
        dict(settings.own).keys().isdisjoint({"ewc_strength", "anchor_pull", "flow_layers"})
    )  # not boo's, nor distill's
    own = from_mapping({**old, "method": "anchor+ewc"})
    assert own.of(AnchorSettings).anchor_pull == 3.0
    assert own.of(EWCSettings) == EWCSettings(ewc_strength=3.0, ewc_decay=0.5, ewc_images=10)


@pytest.mark.parametrize("strengths", ["3", '["a"]', '["ewc_strength=much"]', "[3]"])
def test_damaged_strengths_of_version_0_1_0_are_refused(strengths: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"strengths = {strengths}\n")
    with pytest.raises(InputError, match=r"strengths is .* it must be a list of texts, each NAME=NUMBER"):
        resolve({}, path)


#: Names that version 0.1.0 gave, as a bench asks for them: by what the method reads.
FOLDERS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("digits-boo+distill-b23bf3536b", "tuned", {"dataset": "digits"}),
    ("digits-ewc-b8d93cee78", "tuned", {"dataset": "digits", "method": "ewc"}),
    ("mnist-boo+distill-8d66ff3f53", "tuned", {"dataset": "mnist"}),
    ("mnist-boo-77efec84c4", "paper", {"dataset": "mnist", "method": "boo"}),
    ("mnist-standard-0e75f3ec79", "paper", {"dataset": "mnist", "method": "standard", "tasks": 5, "replicas": 5}),
    ("fashion_mnist-multihead+ewc-10c39d69c3", "paper", {"dataset": "fashion_mnist", "method": "multihead+ewc"}),
    ("notmnist-boo+distill-60ebf045cc", "tuned", {"dataset": "notmnist", "method": "boo+distill", "seed": 7}),
    ("celeba-coreset-02a2a62178", "tuned", {"dataset": "celeba", "method": "coreset"}),
    ("celeba64-boo+vcl-6dd337bdb3", "paper", {"dataset": "celeba64", "method": "boo+vcl"}),
    (
        "npz-january-npz-boo+distill-3c2c35bec4",
        None,
        {"dataset": "npz:january.npz", "epoch_steps": 20, "learning_rate": 1e-3},
    ),
    (
        "mnist-boo-539c8b8f1a",
        "tuned",
        {"dataset": "mnist", "method": "boo", "class_order": [3, 1, 2], "tasks": 2, "learning_rate": 1e-7}
        | {"boo_reencode": True},
    ),
    (
        "mnist-ewc-a0017a3288",
        "tuned",
        {"dataset": "mnist", "method": "ewc", "ewc_strength": 3, "log_variance_range": [-5, 1.5], "mirror": True}
        | {"net": "conv:4"},
    ),
    (
        "folder--a-ü--b--joint-3b38d17f9c",
        None,
        {"dataset": 'folder:/a/ü "b"', "method": "joint", "prior": "vamp", "borders": [5, 9]}
        | {"epoch_steps": 20, "learning_rate": 1e-3},
    ),
    (
        "mnist-boo-flow+distill-969c18f16e",
        "tuned",
        {"dataset": "mnist", "method": "boo-flow+distill", "flow_width": 64, "kl_weight": 2, "distill_encoder": False},
    ),
]


@pytest.mark.parametrize(("name", "preset", "given"), FOLDERS, ids=[name for name, _, _ in FOLDERS])
def test_a_folder_keeps_the_name_it_had(name: str, preset: str | None, given: dict[str, Any]) -> None:
    assert folder_name(resolve(given, preset=preset)) == name


def test_a_default_that_is_written_out_does_not_change_the_name_of_a_folder() -> None:
    usual = resolve({"method": "ewc"})
    written_out = resolve({"method": "ewc", "ewc_decay": 1, "kl_weight": 1})
    assert folder_name(written_out) == folder_name(usual)
    assert folder_name(resolve({"method": "ewc", "ewc_decay": 0.5})) != folder_name(usual)


# --- who wins -------------------------------------------------------------------------------------------------------


def test_flag_beats_file_beats_preset_beats_strength_beats_default(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('dataset = "fashion_mnist"\nbatch_size = 7\nearly_stop = 8\n')
    settings = resolve({"batch_size": 9}, path, preset="paper")
    assert settings.training.batch_size == 9  # flag; the file has 7, the preset 500, the default is 250
    assert settings.training.early_stop == 8  # file; the preset has 50
    assert settings.training.epochs == 1000  # the preset for this dataset
    assert settings.model.net == "mlp:1024"  # the preset for this dataset; the default is mlp:300
    assert settings.model.latent_dim == 40  # default
    assert resolve({}, path).training.batch_size == 7
    assert resolve({"dataset": "fashion_mnist"}, preset="paper").training.batch_size == 500
    tuned = resolve({"dataset": "mnist"}, preset="tuned").training
    assert (tuned.bound_samples, tuned.learning_rate) == (10, 0.002)  # of boo+distill on this dataset
    assert resolve({"dataset": "mnist", "method": "boo"}, preset="tuned").training.learning_rate == 0.001


def test_what_nobody_gives_is_left_to_the_chooser(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('chosen = ["deform"]\ndeform = 0.1\nbatch_size = 7\n')
    usual, given = resolve({}).chosen, resolve({"epochs": 3}, path).chosen
    assert {"net", "epochs", "deform", "batch_size", "distill_latents"} <= set(usual)
    assert set(usual) - set(given) == {"epochs", "deform", "batch_size"}  # also what was chosen for the file's own run
    assert not {"distill_latents", "boo_steps"} & set(resolve({"method": "ewc"}).chosen)  # which do not have them
    assert "bound_samples" not in resolve({"method": "boo+vcl"}).chosen  # vcl refuses more than one
    assert resolve({}, preset="paper").chosen == resolve({}, preset="tuned").chosen == Settings().chosen == ()


def test_a_preset_for_other_datasets_is_refused() -> None:
    with pytest.raises(InputError, match=r"is for digits, mnist.*not for npz:own\.npz; leave it out"):
        resolve({"dataset": "npz:own.npz"}, preset="tuned")


def test_what_several_methods_share_beats_the_preset_and_yields_to_what_is_named() -> None:
    common = {"method": "boo", "batch_size": 7, "early_stop": 8, "boo_steps": 3}
    settings = resolve({"early_stop": 9}, preset="paper", common=common)
    assert (settings.training.batch_size, settings.training.early_stop) == (7, 9)
    assert settings.of(FitSettings).boo_steps == 3  # the preset has 500
    assert resolve({"method": "ewc"}, common=common).own == resolve({"method": "ewc"}).own


def test_what_was_tuned_holds_for_a_method_and_its_combinations() -> None:
    def strength(method: str) -> float:
        return resolve({"dataset": "mnist", "method": method}).of(EWCSettings).ewc_strength

    assert strength("ewc") == 100.0
    assert strength("multihead+ewc") == 100.0
    assert strength("boo+ewc") == 1.0
    assert resolve({"dataset": "mnist", "method": "boo+ewc", "ewc_strength": 5}).of(EWCSettings).ewc_strength == 5.0
    tuned = resolve({"dataset": "celeba", "method": "boo+distill"}, preset="tuned")
    assert tuned.of(DistillSettings).distill_weight == 1.0


def test_an_unknown_preset_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"preset \(preset\).*papr.*paper"):
        resolve({}, preset="papr")


def test_the_preset_follows_the_dataset_that_wins(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('dataset = "fashion_mnist"\n')
    assert resolve({"dataset": "mnist"}, path, preset="tuned").model.net == "mlp:300"
    assert resolve({}, path, preset="tuned").model.net == "mlp:1024"


def test_without_a_dataset_the_preset_of_the_default_one_counts() -> None:
    assert Settings().data.dataset == "digits"
    assert resolve({}, preset="tuned") == resolve({"dataset": "digits"}, preset="tuned")
    assert resolve({}, preset="tuned").model.net == "mlp:128"


def test_small_tasks_are_learned_in_even_batches() -> None:
    own = Settings().changed(epoch_steps=20).training
    assert [own.batch_of(images) for images in (7, 48, 300, 1000, 9000)] == [7, 24, 30, 50, 250]
    assert Settings().changed(epoch_steps=20, batch_size=16).training.batch_of(300) == 15  # twenty steps, evenly
    assert Settings().training.batch_of(300) == 250


def test_a_flag_that_repeats_the_default_still_beats_the_preset() -> None:
    usual = Settings().training.learning_rate
    settings = resolve({"dataset": "fashion_mnist", "learning_rate": usual}, preset="tuned")
    assert settings.training.learning_rate == usual != 1e-3


DATASETS = ["digits", "mnist", "notmnist", "fashion_mnist", "celeba", "celeba64"]


@pytest.mark.parametrize("preset", ["paper", "tuned"])
@pytest.mark.parametrize("dataset", DATASETS)
def test_every_preset_is_made_of_valid_settings(dataset: str, preset: str) -> None:
    section = packaged_toml("boovae.config", "presets.toml")[preset][dataset]
    values = {name: value for name, value in section.items() if not isinstance(value, dict)}
    assert values.keys() <= CORE_NAMES | REGISTRY.owners().keys()
    settings = from_mapping({"method": METHOD, "dataset": dataset, **values})
    for name, value in values.items():
        if name in settings.flat():
            assert settings.flat()[name] == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("preset", [None, "paper", "tuned"])
def test_every_method_has_valid_settings_on_every_dataset(dataset: str, preset: str | None) -> None:
    alone = METHODS.keys() - (
        {"boo-flow"} if preset == "paper" else set()
    )  # its components are fitted together, not as the paper's
    for method in (*alone, "boo+distill", "boo+ewc", "boo+vcl", "multihead+ewc", "multihead+vcl"):
        make_method(resolve({"dataset": dataset, "method": method}, preset=preset))


def test_the_preset_is_the_papers_table() -> None:
    mnist, fashion, letters = (
        resolve({"dataset": name, "method": "boo"}, preset="paper") for name in ("mnist", "fashion_mnist", "notmnist")
    )
    assert (mnist.model.net, fashion.model.net, letters.model.net) == ("mlp:300", "mlp:1024", "mlp:1024")
    all_three = [each.training for each in (mnist, fashion, letters)]
    assert [each.batch_size for each in all_three] == [250, 500, 250]
    assert [each.epochs for each in all_three] == [500, 1000, 500]
    assert (mnist.model.log_variance_range, fashion.model.log_variance_range) == ((-6.0, 2.0), (-4.0, 4.0))
    assert {each.model.latent_dim for each in (mnist, fashion, letters)} == {40}
    assert {(each.schedule, each.early_stop) for each in all_three} == {("plateau", 50)}
    assert {each.learning_rate for each in all_three} == {5e-4}
    assert {each.deform for each in all_three} == {0.0}
    assert {each.of(FitSettings).boo_objective for each in (mnist, fashion, letters)} == {"literal"}


def test_what_is_tuned_for_a_method_is_not_the_papers() -> None:
    given = {"dataset": "notmnist", "method": "boo+distill"}
    ours, paper = (resolve(given, preset=preset).training for preset in ("tuned", "paper"))
    assert (ours.bound_samples, ours.kl_warmup, ours.batch_size) == (10, 20, 125)
    assert (paper.bound_samples, paper.kl_warmup, paper.batch_size) == (1, 0, 250)
    faces = resolve({"dataset": "celeba", "method": "boo"}, preset="paper").training
    assert (faces.kl_warmup, faces.batch_size) == (10, 512)
    assert resolve({"dataset": "digits", "method": "boo"}, preset="paper").training.batch_size == 32


@pytest.mark.parametrize("method", ["vcl+distill", "boo+distill+vcl"])
@pytest.mark.parametrize("preset", [None, "tuned"])
def test_no_preset_asks_nothing_of_vcl_that_it_refuses(method: str, preset: str | None) -> None:
    settings = resolve({"dataset": "mnist", "method": method}, preset=preset)
    make_method(settings)
    assert settings.training.bound_samples == 1


# --- settings of methods --------------------------------------------------------------------------------------------


def test_a_setting_of_another_method_is_refused_where_somebody_names_it() -> None:
    with pytest.raises(InputError) as refused:
        resolve({"method": "ewc", "boo_steps": 3})
    said = "is a setting of method 'boo', and 'ewc' does not read it; leave it out"
    assert str(refused.value) == f"boo_steps {said}"
    assert refused.value.spelled(as_flag) == f"--boo-steps {said}"


def test_a_setting_of_another_method_is_left_out_of_files_and_presets(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("boo_steps = 3\newc_strength = 7\n")
    assert resolve({"method": "ewc"}, path, preset="paper").own == (("ewc_strength", 7.0),)
    assert resolve({"method": "boo"}, path).own == (("boo_steps", 3),)
    assert resolve({"method": "standard"}, path, preset="paper").own == ()


def test_a_combination_reads_what_its_parts_read() -> None:
    read = REGISTRY.sections("boo+ewc")
    assert {*REGISTRY.sections("boo"), EWCSettings} == set(read)
    assert len(read) == len(set(read))
    assert REGISTRY.sections("standard") == []
    assert len(REGISTRY.all_sections()) == len(set(REGISTRY.all_sections()))
    settings = resolve({"method": "boo+ewc", "boo_steps": 3, "ewc_decay": 0.5})
    assert (settings.of(FitSettings).boo_steps, settings.of(EWCSettings).ewc_decay) == (3, 0.5)


def test_only_what_differs_from_the_defaults_is_kept() -> None:
    assert from_mapping({"method": "ewc", "ewc_strength": 100, "ewc_decay": 1.0}) == Settings().changed(method="ewc")
    assert from_mapping({"method": "ewc"}).of(EWCSettings) == EWCSettings()


def test_changed_takes_settings_of_all_sections_by_name_alone() -> None:
    settings = Settings().changed(method="ewc", tasks=2, latent_dim=3, epochs=4, samples=5, ewc_strength=6.0)
    assert (settings.data.tasks, settings.model.latent_dim, settings.training.epochs) == (2, 3, 4)
    assert (settings.evaluation.samples, settings.of(EWCSettings).ewc_strength) == (5, 6.0)
    assert settings.changed(tasks=None) == settings.changed(tasks=None, epochs=4)
    assert hash(settings) == hash(settings.changed(epochs=4))
    with pytest.raises(InputError, match="unknown setting of ewc 'boo_steps'"):
        make_method(settings.changed(boo_steps=3))


# --- limits ---------------------------------------------------------------------------------------------------------

AT_LEAST_ONE = {
    *("tasks", "limit", "classes_per_task", "replicas", "epochs", "epoch_steps", "batch_size", "latent_dim"),
    *("components", "samples", "generated", "plateau_patience", "early_stop", "bound_samples", "distill_latents"),
    *("boo_until", "boo_samples", "flow_width", "ewc_images", "coreset_images", "replay_images"),
}
AT_LEAST_ZERO = {"kl_warmup", "seed", "data_seed", "boo_steps", "flow_layers"}
NOT_NEGATIVE = {
    *("kl_weight", "distill_weight", "boo_rate", "boo_lambda", "boo_tolerance", "flow_drift", "ewc_strength"),
    *("si_strength", "vcl_weight", "mog_lambda", "replay_weight", "input_noise"),
}
ABOVE_ZERO = {"learning_rate", "si_damping"}
SHARES = {"boo_floor", "boo_prune", "jitter", "deform", "noise_floor"}
NUMBERS = {*NOT_NEGATIVE, *ABOVE_ZERO, *SHARES, "ewc_decay", "vcl_log_variance"}
SWITCHES = {"mirror", "decoder_bounds", "boo_reencode", "distill_decoder", "distill_encoder"}
TEXTS = {"dataset", "net", "method"}
LISTS = {"class_order", "borders"}
#: Each with a mistyped choice and the nearest one.
CHOICES = {
    "fit_posterior": ("alway", "always"),
    "binarize": ("dynamc", "dynamic"),
    "normalisation": ("grup", "group"),
    "likelihood": ("bernouli", "bernoulli"),
    "noise": ("learnd", "learned"),
    "prior": ("vampp", "vamp"),
    "schedule": ("cosin", "cosine"),
    "stop_by": ("los", "loss"),
    "boo_objective": ("forwards", "forward"),
    "boo_start": ("nois", "noise"),
    "boo_first": ("learnt", "learned"),
    "boo_weights": ("bisect", "bisection"),
    "boo_elbo": ("ful", "full"),
    "boo_target": ("ful", "full"),
    "boo_mixture": ("ful", "full"),
    "boo_masses": ("size", "sizes"),
    "boo_lambda_schedule": ("task", "tasks"),
    "boo_reduction": ("sums", "sum"),
    "boo_decoder": ("teachr", "teacher"),
    "boo_divergence": ("symetric", "symmetric"),
    "distill_divergence": ("revers", "reverse"),
    "coreset_mode": ("apend", "append"),
    "coreset_choice": ("kcentre", "kcenter"),
    "mog_fit": ("gradien", "gradient"),
}
WRONG: list[tuple[str, Any]] = [
    *((name, bad) for name in AT_LEAST_ONE for bad in (0, -1)),
    *((name, -1) for name in AT_LEAST_ZERO),
    *((name, bad) for name in AT_LEAST_ONE | AT_LEAST_ZERO for bad in ("3", 2.5, 2.0, True, [3], 2**63)),
    *((name, bad) for name in NOT_NEGATIVE | SHARES | {"ewc_decay"} for bad in (-0.1, -1)),
    *((name, bad) for name in NUMBERS for bad in ("fast", False, [1.0], math.nan, math.inf, -math.inf)),
    *((name, bad) for name in ABOVE_ZERO for bad in (0, 0.0, -1e-3)),
    *((name, bad) for name in SHARES for bad in (1, 1.0)),
    ("ewc_decay", 1.001),
    *((name, bad) for name in SWITCHES for bad in (1, "true", [True])),
    *((name, bad) for name in TEXTS for bad in (3, ["digits"], True)),
    *((name, bad) for name in CHOICES for bad in (1, ["mean"])),
    *((name, bad) for name in LISTS for bad in (3, "012", [0.5, 1], [True, 0], {"0": 1})),
    *(("resize", bad) for bad in (32, "32", "median", [32], [0, 32], [32.5, 32], [32, 32, 3], [True, 32])),
    *(("log_variance_range", bad) for bad in (-6.0, "-6", [-6.0], [-6.0, 0.0, 2.0], ["-6", "2"])),
    *(("log_variance_range", bad) for bad in ((2.0, -6.0), (1.0, 1.0), (math.nan, 1.0), (0.0, math.inf))),
]


def method_of(name: str) -> dict[str, str]:
    """Return a method that reads a setting."""
    return {} if name in CORE_NAMES else {"method": REGISTRY.owners()[name]}


def test_all_settings_are_in_the_lists_above() -> None:
    listed = AT_LEAST_ONE | AT_LEAST_ZERO | NUMBERS | SWITCHES | TEXTS | LISTS | CHOICES.keys()
    assert listed | {"log_variance_range", "resize"} == CORE_NAMES | REGISTRY.owners().keys()


@pytest.mark.parametrize(("name", "value"), sorted(WRONG, key=repr))
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError) as refused:
        from_mapping({**method_of(name), name: value})
    assert str(refused.value).startswith(f"{name} is ")
    assert refused.value.spelled(as_flag).startswith(f"{as_flag(name)} is ")
    with pytest.raises(InputError, match=f"^{name} is "):
        resolve({**method_of(name), name: value})


@pytest.mark.parametrize("name", sorted(AT_LEAST_ONE | AT_LEAST_ZERO | NUMBERS))
def test_the_smallest_good_values_are_taken(name: str) -> None:
    value = 1 if name in AT_LEAST_ONE else 1e-300 if name in ABOVE_ZERO else 0
    assert from_mapping({**method_of(name), name: value}).flat().get(name, value) == value


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_a_mistyped_choice_names_the_nearest(name: str) -> None:
    wrong, right = CHOICES[name]
    with pytest.raises(InputError) as refused:
        from_mapping({**method_of(name), name: wrong})
    assert str(refused.value).startswith(f"unknown value for {name} '{wrong}': did you mean '{right}'? Known: ")
    assert refused.value.spelled(as_flag).startswith(f"unknown value for {as_flag(name)} '{wrong}'")
    assert from_mapping({**method_of(name), name: right}).flat().get(name, right) == right


def test_an_error_says_what_is_wanted() -> None:
    def complaint(**values: Any) -> str:
        with pytest.raises(InputError) as refused:
            from_mapping(values)
        return str(refused.value)

    assert complaint(tasks=0) == "tasks is 0; it must be a whole number of at least 1, or leave it out"
    assert complaint(jitter=1.0) == "jitter is 1.0; it must be a number of at least 0 and under 1"
    assert complaint(learning_rate=math.nan) == "learning_rate is nan; it must be finite"
    assert complaint(mirror="yes") == "mirror is 'yes'; it must be true or false"
    assert complaint(seed=2**70) == "seed is too large; it must fit into 64 bits"
    assert complaint(net=300) == "net is 300; it must be a text"
    assert complaint(class_order="012").endswith("a list of values, each a whole number, or leave it out")
    assert complaint(log_variance_range=[1]) == "log_variance_range is [1]; it must be 2 numbers"
    assert complaint(log_variance_range=[2, 1]).endswith("it must be a lower and a higher number")
    known = complaint(binarize="dynamc").partition("Known: ")[2]
    assert known == "dynamic, none, threshold"


@pytest.mark.parametrize("name", ["folder:a\nb", "folder:\x7f", "folder:\udcff"])
def test_names_that_no_terminal_can_show_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"dataset is .* printable"):
        Settings().changed(dataset=name)


# --- unknown names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        *(("epoch", "epochs"), ("batchsize", "batch_size"), ("learning-rate", "learning_rate")),
        *(("laten_dim", "latent_dim"), ("boo_step", "boo_steps"), ("ewc_strenght", "ewc_strength")),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_name(wrong: str, right: str) -> None:
    for values in ({wrong: 1}, {"training": {wrong: 1}}, {"method_settings": {wrong: 1}}):
        with pytest.raises(InputError, match=f"unknown setting '{wrong}': did you mean '{right}'"):
            from_mapping(values)
    with pytest.raises(InputError, match=f"did you mean '{right}'"):
        resolve({wrong: 1})


def test_an_unknown_setting_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[train]\nepochs = 3\n")
    with pytest.raises(InputError, match="unknown setting 'train'"):
        resolve({}, path)


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="unknown setting '3'"):
        from_mapping({3: 4})  # type: ignore[dict-item]


# --- the rest -------------------------------------------------------------------------------------------------------


def test_an_error_within_another_is_spelled_with_it() -> None:
    inner = InputError("{kl_warmup=20} and {normalisation=group} clash")
    outer = InputError(f"{{config}} run.toml: {inner.text}")
    assert str(outer) == "config run.toml: kl_warmup=20 and normalisation='group' clash"
    assert outer.spelled(as_flag) == "--config run.toml: --kl-warmup 20 and --normalisation group clash"


def test_seeds_of_the_replicas_follow_by_one() -> None:
    assert Settings().changed(seed=3, replicas=4).training.seeds == (3, 4, 5, 6)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().training.epochs = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().method = "ewc"  # type: ignore[misc]


def test_reading_the_settings_needs_neither_torch_nor_tyro() -> None:
    code = "import sys, boovae.config.resolve; print(sorted({'torch', 'tyro', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
