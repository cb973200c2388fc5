"""Settings chosen from the data: by shape, kind and size; what was given stays; later tasks are chosen for too."""

from __future__ import annotations

from typing import Any

import pytest

from boovae.config import Settings
from boovae.config.choose import CHOOSABLE, MODEL, TASK, DataSummary, choose, choose_model, choose_task
from boovae.methods import make_method, resolve

GREY, COLOUR = DataSummary((28, 28), 6000), DataSummary((3, 48, 64), 160)


def chosen_for(data: DataSummary, **given: Any) -> dict[str, Any]:
    settings = choose(resolve(given), data)[0]
    make_method(settings)  # the settings are valid
    return settings.flat()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (DataSummary((8, 8), 150), {"net": "mlp:128", "latent_dim": 10, "likelihood": "bernoulli", "bound_samples": 1}),
        (GREY, {"likelihood": "bernoulli", "components": 15, "bound_samples": 10, "deform": 0.0, "batch_size": 250}),
        (COLOUR, {"net": "res:16", "likelihood": "normal", "noise": "shared", "noise_floor": 0.1, "deform": 0.1}),
        (COLOUR, {"components": 40, "mirror": False}),
        (DataSummary((3, 48, 64), 80), {"components": 20}),
        (DataSummary((3, 32, 32), 5000, mirrored=0.5), {"net": "res:32", "latent_dim": 64, "mirror": True}),
        (DataSummary((64, 64), 5000), {"net": "res:32", "likelihood": "bernoulli", "noise_floor": 0.0}),
        (DataSummary((3, 6, 60), 500), {"net": "mlp:512"}),  # too flat for convolutions
        (DataSummary((13,), 178, pixels=False), {"net": "linear:128", "latent_dim": 8, "likelihood": "normal"}),
        (DataSummary((13,), 178, pixels=False), {"noise": "learned", "components": 11, "decoder_bounds": False}),
        (DataSummary((2,), 40, pixels=False), {"latent_dim": 2, "components": 2, "epochs": 90, "input_noise": 0.2}),
        (DataSummary((100,), 5000, pixels=False), {"latent_dim": 40, "components": 15, "input_noise": 0.0}),
    ],
)
def test_shape_kind_and_size_of_the_data_decide(data: DataSummary, expected: dict[str, Any]) -> None:
    found = chosen_for(data)
    assert {name: found[name] for name in expected} == expected


def test_other_choices_follow_what_was_given() -> None:
    found = chosen_for(COLOUR, net="mlp:64", epochs=70)
    assert (found["net"], found["epochs"], found["kl_warmup"]) == ("mlp:64", 70, 7)
    assert found["samples"] == chosen_for(GREY)["samples"] != chosen_for(COLOUR)["samples"]


def test_small_tasks_get_more_epochs_and_deformed_pictures() -> None:
    small, large = (chosen_for(DataSummary((28, 28), images)) for images in (40, 50_000))
    assert small["epochs"] > large["epochs"]
    assert (small["deform"], large["deform"]) == (0.1, 0.0)


def test_tasks_of_similar_sizes_are_learned_alike() -> None:
    several = [chosen_for(DataSummary((28, 28), images)) for images in (5421, 5923, 6742)]
    assert several[0] == several[1] == several[2]


def test_a_task_changes_only_what_may_differ_between_tasks() -> None:
    settings = choose_model(resolve({}), GREY)[0]
    later, choices = choose_task(settings, DataSummary((28, 28), 40))
    assert settings.model == later.model
    assert settings.evaluation == later.evaluation
    assert {choice.setting for choice in choices} <= set(TASK)
    assert all(choice.reason for choice in choices)


def test_settings_made_in_python_are_not_touched() -> None:
    settings = Settings().changed(net="mlp:7")
    assert choose_task(*choose_model(settings, COLOUR)[:1], COLOUR) == (settings, ())


def test_every_choice_is_a_setting_once() -> None:
    assert len(set(CHOOSABLE)) == len(CHOOSABLE) == len(MODEL) + len(TASK)
