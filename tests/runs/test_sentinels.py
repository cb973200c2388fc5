"""Sentinels: each trouble is named once, in plain words, with the flag that helps; a healthy run has none."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boovae.cli.main import main
from boovae.config import CORE_NAMES
from boovae.data import Stream
from boovae.errors import as_flag as flag
from boovae.methods import REGISTRY
from boovae.metrics import Context
from boovae.metrics.posterior import PosteriorHealth
from boovae.model.vae import VAE
from boovae.replicas.stacked import replica_of
from boovae.runs.progress import Display
from boovae.runs.reading import read_record
from boovae.runs.run import Run
from boovae.runs.train import train, warn
from boovae.runs.warnings import HELP, find_warnings
from conftest import tiny, trained
from made_up_run import make_run
from run_folders import events


def kinds(run: Path) -> dict[str, str]:
    return {found.kind: found.text for found in find_warnings(read_record(run))}


def classes(run: Path) -> list[str]:
    record = read_record(run)
    return record.classes(record.evaluations[-1])


def changed(run: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the last evaluation of a run."""
    lines = events(run)
    change(lines[-1])
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_healthy_run_has_none(tmp_path: Path) -> None:
    assert kinds(make_run(tmp_path / "run")) == {}


def test_every_flag_that_is_said_to_help_exists(tmp_path: Path) -> None:
    names = {flag(name) for name in CORE_NAMES | REGISTRY.owners().keys()}
    said = " ".join(HELP.values()).replace(",", " ").replace(";", " ").split()
    assert {word for word in said if word.startswith("--")} <= names


def test_a_collapsed_posterior(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    few = changed(run, lambda e: e["posterior"].update(active_units=[[3] * 5, [1, 0, 2, 0, 1]]))
    text = kinds(few)["collapse"]
    assert "learned nothing about the images of task “digit 1” but their average" in text
    assert "--kl-warmup 50 or a --kl-weight below 1 helps" in text
    config = (few / "config.toml").read_text()
    warmer = config.replace("kl_warmup = 0", "kl_warmup = 50").replace("kl_weight = 1.0", "kl_weight = 0.5")
    (few / "config.toml").write_text(warmer)
    assert "--kl-warmup 100 or a --kl-weight below 0.5 helps" in kinds(few)["collapse"]


def test_exploding_log_variance(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    text = kinds(changed(run, lambda e: e["posterior"].update(at_upper_limit=[[0.5] * 5, [0.2] * 5])))["log-variance"]
    assert "up to 50.0 % of its values for task “digit 0” are at the upper limit of --log-variance-range" in text
    assert "--learning-rate" in text


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"kl_weight": 100.0}, "collapse"),
        ({"log_variance_range": (-6.0, -2.0)}, "log-variance"),
        ({"method": "boo", "components": 8, "boo_prune": 0.24}, "idle"),
        ({"method": "boo+distill", "components": 5, "epochs": 4, "boo_objective": "forward"}, "cut short"),
    ],
)
def test_models_that_went_wrong_on_purpose(digits: Stream, tmp_path: Path, changes: dict[str, Any], kind: str) -> None:
    settings = tiny(**{"tasks": 1, "replicas": 1, "epochs": 15, "learning_rate": 1e-2, **changes})
    assert kind in kinds(train(settings, digits, tmp_path / "run", metrics=("nll",)))


def test_components_that_were_never_learned_are_not_said_to_have_no_weight(digits: Stream, tmp_path: Path) -> None:
    settings = tiny(method="boo", components=8, epochs=3, boo_objective="forward", boo_prune=0.0, tasks=1, replicas=1)
    found = kinds(train(settings, digits, tmp_path / "run", metrics=("nll",)))
    assert "cut short" in found
    assert "idle" not in found


@pytest.mark.parametrize("enough", [{"components": 4}, {"boo_objective": "corrective"}, {"method": "standard"}])
def test_enough_epochs_for_the_components(digits: Stream, tmp_path: Path, enough: dict[str, Any]) -> None:
    cut = {"method": "boo", "components": 5, "epochs": 4, "boo_objective": "forward", "tasks": 1, "replicas": 1}
    assert "cut short" not in kinds(train(tiny(**{**cut, **enough}), digits, tmp_path / "run", metrics=("nll",)))


def test_active_units_are_counted_as_defined(digits: Stream) -> None:
    trainer = trained(tiny(method="multihead", tasks=2, epochs=3), digits)
    health = PosteriorHealth().measure(Context(trainer, [digits[0], None]))
    view = trainer.method.view(trainer.replicas, 0)
    for replica in range(2):
        posterior = view.call(replica_of(view.tensors(), replica), VAE.posterior, digits[0].test.images)
        varying = posterior.mean.detach().double().numpy().var(axis=0) > 0.01
        assert health.active_units[0][replica] == varying.sum()
        assert health.at_upper_limit[0][replica] == float((posterior.log_variance > 2 - 1e-3).double().mean())
    assert np.isnan(health.active_units[1]).all()
    assert health.active_units[0].max() > 0


@pytest.mark.parametrize(
    ("method", "help"),
    [("standard", "--method boo+distill"), ("boo+ewc", "--ewc-strength"), ("boo", "a larger --boo-lambda")],
)
def test_a_task_that_is_being_forgotten(tmp_path: Path, method: str, help: str) -> None:
    text = kinds(make_run(tmp_path / "run", method=method, forget=4.0))["forgotten"]
    assert text.startswith("Tasks “digit 0”, “digit 1”, “digit 2”, “digit 3” and 1 more are being forgotten")
    assert "at worst, “digit 0”" in text
    assert help in text


def test_of_small_images_fewer_nats_are_much(tmp_path: Path) -> None:
    def small(event: dict[str, Any]) -> None:  # 20 nats an image, 5 of them lost
        event["nll"]["own"] = [[20.0] * 5, [20.0] * 5]
        event["forgetting"]["own"] = [[5.0] * 5, [0.0] * 5]

    text = kinds(changed(make_run(tmp_path / "run", tasks=2), small))["forgotten"]
    assert "Task “digit 0” is being forgotten" in text
    assert "an image costs 5.00 nats more than when it was learned (15.0)" in text


def test_a_class_that_samples_rarely_show_any_more(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    run = changed(run, lambda e: e["diversity"].update(proportions=[[0.01, 0.99]] * 5))
    text = kinds(run)["missing"]
    assert "rarely show “digit 0” any more: under 5.0 % of them each, where 50.0 % would be fair" in text
    assert "--boo-lambda" in text
    new = kinds(changed(run, lambda e: e["diversity"].update(proportions=[[0.99, 0.01]] * 5)))["missing"]
    assert "rarely show “digit 1”, of the newest task" in new
    assert "--boo-lambda" not in new  # which would hold it down
    weak = changed(run, lambda e: e["classifier"].update(accuracy=0.5))
    assert set(kinds(weak)) == {"classifier"}  # a weak classifier does not know who is missing


@pytest.mark.parametrize(
    ("kind", "change"),
    [("run", {"split": {"borders": [5000], "digest": "", "binarize": "none"}}), ("task_start", {"classes": [0, 1]})],
)
def test_classes_have_the_names_of_tasks_only_where_each_task_is_one(
    kind: str, change: dict[str, Any], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    assert classes(run) == ["digit 0", "digit 1"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [event | (change if event["event"] == kind else {}) for event in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    assert classes(run) == ["0", "1"]


def test_a_classifier_too_weak_to_trust(tmp_path: Path) -> None:
    text = kinds(make_run(tmp_path / "run", accuracy=0.81))["classifier"]
    assert "right on only 81.0 % of the test images" in text
    assert "--limit" in text


def test_dead_and_duplicate_components(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    picture = (run / "samples" / "task_00.png").read_bytes()
    image = base64.b64encode(picture).decode()
    costs = {0: [0.5, 0.4, 0.3, 0.0001], 1: [0.5, 0.4, 0.0002, 0.0001]}
    listed = [
        {"task": task, "component": place, "weight": 0.25, "cost": cost, "pseudo_input": image, "decoded": image}
        for task, row in costs.items()
        for place, cost in enumerate(row)
    ]
    (run / "components.json").write_text(json.dumps({"components": listed}))
    text = kinds(run)["dead"]
    assert "2 components of task “digit 1” are dead weight" in text  # one of four is normal
    assert "boovae inspect RUN --prune 0.001" in text
    with (run / "metrics.jsonl").open("a") as file:
        for task, kept in ((0, 14), (1, 4)):
            event = {"event": "components", "task": task, "kept": [kept] * 5, "twins": [15 - kept] * 5}
            file.write(json.dumps(event) + "\n")
    text = kinds(run)["idle"]
    assert "Of 15 components only 4 were left to task “digit 1”: up to 11 were duplicates of others" in text
    assert "--components" in text


def test_few_effective_samples_and_a_replica_that_was_given_up(tmp_path: Path) -> None:
    found = kinds(make_run(tmp_path / "run", effective=3.2, frozen=1))
    assert "down to 3.2 of 5,000" in found["samples"]
    assert "boovae eval RUN --samples 50000 --fit-posterior is more exact" in found["samples"]
    assert "Replica 2 (seed 1) diverged in task “digit 4” and was frozen there" in found["divergence"]


def test_the_terminal_says_each_kind_of_trouble_once_while_the_run_goes_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", forget=4.0, accuracy=0.81)
    (folder / "config.toml").write_text("")
    heard: list[str] = []

    class Ear(Display):
        def note(self, text: str) -> None:
            heard.append(text)

    with Run.open(folder, Ear()) as run:
        said: set[str] = set()
        warn(run, said)
        warn(run, said)
    assert [text.split(":")[0] for text in heard] == ["warning", "warning"]
    assert said == {"forgotten", "classifier"}


def test_a_run_says_on_the_terminal_what_the_report_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "train --method standard --tasks 2 --net mlp:16 --latent-dim 4 --limit 24 --epochs 30 --batch-size 8"
    words += f" --learning-rate 0.005 --samples 500 --metric nll --out {tmp_path / 'run'}"
    main(words.split())
    said = capsys.readouterr().err
    assert said.count("warning: Task “0” is being forgotten") == 1  # after the last task: at the end alone
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Task “0” is being forgotten" in page
    assert "Latent space</h2>" in page
    main([*words.split(), "--quiet"])
    assert "warning" not in capsys.readouterr().err


def test_settings_that_are_no_numbers_do_not_stop_the_page(tmp_path: Path) -> None:
    run = changed(make_run(tmp_path / "run", tasks=2), lambda e: e["posterior"].update(active_units=[[0] * 5] * 2))
    config = (run / "config.toml").read_text()
    damaged = config.replace("kl_warmup = 0", 'kl_warmup = "soon"').replace("kl_weight = 1.0", "kl_weight = []")
    (run / "config.toml").write_text(damaged)
    assert "--kl-warmup 50 or a --kl-weight below 1 helps" in kinds(run)["collapse"]
