"""Choosing a strength: candidates are replicas, validation images decide, the winner becomes a recipe."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from boovae.cli.main import main
from boovae.config.resolve import packaged_toml
from boovae.data import Stream
from boovae.errors import InputError
from boovae.methods import METHODS, REGISTRY, make_method, resolve
from boovae.methods.ewc import EWCSettings
from boovae.metrics.likelihood import log_likelihood_of_tasks
from boovae.runs import tune
from boovae.runs.progress import Display
from boovae.runs.tune import Trial, best, edge, search, write_recipe
from boovae.training.trainer import Trainer
from conftest import Recorder, tiny

CPU = torch.device("cpu")
SEARCHED = [(name, setting) for name, method in METHODS.items() for setting in method.search]


def test_what_is_searched_are_numbers_that_the_method_reads_and_takes() -> None:
    assert {"boo", "distill", "ewc", "mog", "replay", "si", "vcl"} == {name for name, _ in SEARCHED}
    for name, setting in SEARCHED:
        assert setting in {item.name for kind in REGISTRY.sections(name) for item in dataclasses.fields(kind)}
        for value in METHODS[name].search[setting]:
            make_method(resolve({"method": name, setting: value}))


def test_a_method_is_tuned_by_its_main_strength_unless_another_is_named() -> None:
    vcl = tiny(method="vcl")
    assert tune._what(vcl, None, None) == ("vcl_weight", METHODS["vcl"].search["vcl_weight"])
    assert tune._what(vcl, "vcl_log_variance", None)[1] == METHODS["vcl"].search["vcl_log_variance"]
    assert tune._what(vcl, "vcl_log_variance", (-3, -4)) == ("vcl_log_variance", (-3.0, -4.0))
    assert tune._what(tiny(method="boo-flow+distill"), None, None)[0] == "distill_weight"


@pytest.mark.parametrize(("part", "setting"), SEARCHED)
def test_a_candidate_among_others_is_what_it_would_be_alone(part: str, setting: str, digits: Stream) -> None:
    first, second = (-9.0, -4.0) if setting == "vcl_log_variance" else (0.2, 5.0)
    method = f"boo+{part}" if part in ("distill", "replay") else part
    together = Trainer(tiny(method=method), digits.spec, seeds=[0, 0], candidates={setting: [first, second]})
    alone = Trainer(tiny(method=method, replicas=1, **{setting: second}), digits.spec)
    for trainer in (together, alone):
        for task in digits[:2]:
            trainer.learn(task, Recorder())
    for name, tensor in alone.replicas.parameters.items():
        torch.testing.assert_close(together.replicas.parameters[name][1], tensor[0], rtol=0, atol=0)
    assert any(not torch.equal(tensor[0], tensor[1]) for tensor in together.replicas.parameters.values())


def test_a_search_scores_validation_images_and_never_test_images(digits: Stream) -> None:
    spoiled = Stream.from_tasks([task.train.images.view(-1, 8, 8) for task in digits[:2]])
    for task in spoiled:
        task.test.images.fill_(math.nan)
    settings = tiny(method="boo+distill", tasks=2)
    trials = search(settings, spoiled, "distill_weight", (0.1, 1.0), device=CPU, display=Display())
    assert [trial.value for trial in trials] == [0.1, 1.0]
    assert all(math.isfinite(nll) for trial in trials for nll in trial.nll)


def test_the_lowest_mean_wins_and_a_diverged_value_cannot() -> None:
    trials = [Trial("x", 1.0, [3.0, 5.0]), Trial("x", 2.0, [3.5, 3.6]), Trial("x", 3.0, [1.0, math.nan])]
    assert best(trials).value == 2.0


def test_the_winner_is_written_beside_the_others(tmp_path: Path) -> None:
    path = tmp_path / "mnist.toml"
    write_recipe(path, "ewc", Trial("ewc_strength", 100.0, [1.0]))
    write_recipe(path, "boo+distill", Trial("distill_weight", 0.5, [1.0]))
    write_recipe(path, "ewc", Trial("ewc_strength", 10.0, [1.0]))
    sections = tomllib.loads(path.read_text())
    assert sections == {"ewc": {"ewc_strength": 10.0}, "boo+distill": {"distill_weight": 0.5}}


def test_a_recipe_keeps_what_else_it_says(tmp_path: Path) -> None:
    path = tmp_path / "mnist.toml"
    path.write_text('["boo"]\nboo_reencode = true\nboo_start = "noise"\nlog_variance_range = [-6, 1.0]\n')
    write_recipe(path, "ewc", Trial("ewc_strength", 10.0, [1.0]))
    others = {"boo_reencode": True, "boo_start": "noise", "log_variance_range": [-6, 1.0]}
    assert tomllib.loads(path.read_text()) == {"boo": others, "ewc": {"ewc_strength": 10.0}}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("epochs = 3\n", "'epochs' is not a section"),
        ("[ewc\n", "recipe.toml (--recipe): Expected ']'"),
        ("[ewc]\nnothing = 1\n", "nothing"),
    ],
)
def test_a_recipe_that_cannot_take_the_winner_is_refused_before_training(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["tune", "ewc", "--recipe", str(path)])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("method", "setting", "values", "complaint"),
    [
        ("standard", None, None, "standard' has no strength to choose; these have: boo, "),
        ("standard", "ewc_strength", None, "standard' has no strength to choose"),
        ("boo+distill", None, None, "2 strengths"),
        ("ewc", "learning_rate", None, "has no such strength"),
        ("ewc", "ewc_strength", (-1.0,), r"^ewc_strength is -1\.0"),
        ("boo+multihead", "boo_lambda", (0.0, 1.0), "set boo_lambda=0"),
    ],
)
def test_a_search_for_nothing_is_refused_before_training(
    method: str, setting: str | None, values: tuple[float, ...] | None, complaint: str, digits: Stream
) -> None:
    with pytest.raises(InputError, match=complaint):
        search(tiny(method=method), digits, setting, values, device=CPU, display=Display())


def test_more_tasks_than_there_are_and_no_seeds_are_refused_before_training(digits: Stream) -> None:
    with pytest.raises(InputError, match=r"^tasks is 11"):
        search(tiny(method="ewc", tasks=11), digits, device=CPU, display=Display())
    with pytest.raises(InputError, match=r"^seeds_each is 0"):
        search(tiny(method="ewc"), digits, seeds=0, device=CPU, display=Display())


@pytest.mark.parametrize(
    ("winner", "said"),
    [(1, "1 is the smallest value tried; smaller"), (2, ""), (3, "3 is the largest value tried; larger")],
)
def test_a_best_value_at_the_edge_asks_to_look_further(winner: float, said: str) -> None:
    trials = [Trial("ewc_strength", value, [abs(value - winner)]) for value in (3.0, 1.0, 2.0)]
    assert edge(trials, best(trials)).startswith(f"ewc_strength: {said}" if said else "")
    assert bool(edge(trials, best(trials))) == bool(said)
    assert edge(trials[:1], trials[0]) == ""


def test_tune_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--tasks",
        "2",
        "--epochs",
        "1",
        "--net",
        "mlp:8",
        "--limit",
        "20",
        "--batch-size",
        "8",
        "--seeds-each",
        "1",
    ]
    recipe = tmp_path / "digits.toml"
    main(["tune", "ewc", *words, "--values", "1", "1000", "--replicas", "3", "--recipe", str(recipe), "--json"])
    said = capsys.readouterr()
    trials = json.loads(said.out)
    assert "tune ignores --replicas: --seeds-each" in said.err
    assert re.search(r"ewc_strength: (1 is the smallest|1000 is the largest) value tried", said.err)
    assert [len(trial["nll"]) for trial in trials] == [1, 1]
    assert [trial["value"] for trial in trials] == [1.0, 1000.0]
    winner = min(trials, key=lambda trial: float(trial["nll"][0]))
    assert tomllib.loads(recipe.read_text()) == {"ewc": {"ewc_strength": winner["value"]}}


def test_recipes_set_the_strength_of_a_method_and_of_its_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"ewc": {"ewc_strength": 7.0}, "boo+ewc": {"ewc_strength": 9.0}}
    monkeypatch.setitem(packaged_toml("boovae.config", "strengths.toml"), "mnist", chosen)

    def strength(**given: Any) -> float:
        return resolve({"dataset": "mnist", **given}).of(EWCSettings).ewc_strength

    assert strength(method="ewc") == 7
    assert strength(method="multihead+ewc") == 7
    assert strength(method="boo+ewc") == 9
    assert strength(method="ewc", ewc_strength=1.0) == 1


@pytest.mark.parametrize(("words", "samples"), [([], 500), (["--samples", "3"], 3)])
def test_importance_samples_are_as_many_as_asked_for(
    words: list[str], samples: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[int] = []
    score = log_likelihood_of_tasks

    def noting(trainer: Any, images: Any, owners: Any, count: int, *others: Any) -> Any:
        taken.append(count)
        return score(trainer, images, owners, 2, *others)

    monkeypatch.setattr(tune, "log_likelihood_of_tasks", noting)
    main(["tune", "ewc", "--tasks", "1", "--epochs", "1", "--values", "1", "--seeds-each", "1", *words, "--json"])
    assert taken == [samples]
    assert len(json.loads(capsys.readouterr().out)) == 1
