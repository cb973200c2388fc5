"""Settings chosen for each task, and a collapsed task that is learned once more: exact, and replica by replica."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from boovae import BooVAE
from boovae.data import Stream
from boovae.errors import InputError
from boovae.methods import resolve
from boovae.runs.progress import Display, Lines, TimeEstimate, Watch
from boovae.runs.train import train, trainer_for
from boovae.training import trainer as trainer_module
from boovae.training.trainer import Trainer
from conftest import Recorder, same, tiny, trained
from run_folders import NLL

#: Leaves the length of the training to the chooser, as a user does.
OPEN = {"method": "boo+distill", "net": "mlp:16", "latent_dim": 4, "replicas": 2, "components": 3, "boo_steps": 3}


@pytest.fixture
def months() -> Stream:
    """Many pictures, then few."""
    many, few = (np.random.default_rng(seed).random((count, 8, 8)) for seed, count in ((0, 700), (1, 40)))
    return Stream.from_tasks([many, few])


def opened(stream: Stream, **given: object) -> Trainer:
    return trainer_for(resolve({**OPEN, **given}), stream, torch.device("cpu"), "off")


def test_every_task_gets_settings_of_its_own_size(months: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boovae.config.choose.FEW_STEPS", 100)
    monkeypatch.setattr("boovae.config.choose.FEWEST_EPOCHS", 1)
    trainer, seen = opened(months), Recorder()
    epochs = []
    for task in months:
        trainer.learn(task, seen)
        epochs.append(trainer.settings.training.epochs)
    assert epochs[0] < epochs[1]  # about as many steps
    logged = [{each["setting"] for each in event["choices"]} for event in seen.events if event["event"] == "choices"]
    assert len(logged) == 2
    assert {"likelihood", "epochs"} <= logged[0]
    assert "epochs" in logged[1]
    assert "likelihood" not in logged[1]  # the model is chosen once


def test_what_was_learned_stays_when_the_settings_change(months: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boovae.config.choose.FEW_STEPS", 50)
    monkeypatch.setattr("boovae.config.choose.FEWEST_EPOCHS", 1)
    trainer = opened(months, early_stop=9)
    trainer.learn(months[0])
    before = {name: tensor.clone() for name, tensor in trainer.state()[0].items()}
    settings = trainer.settings
    trainer.prepare(months[1])
    assert trainer.settings != settings
    after = trainer.state()[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_given_settings_are_never_chosen(months: Stream) -> None:
    trainer = Trainer(tiny(epochs=2), months.spec)
    trainer.learn(months[1])
    assert trainer.settings == tiny(epochs=2)


def test_a_run_with_chosen_settings_is_resumed_exactly(
    harmless_kills: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boovae.config.choose.MOST_EPOCHS", 2)
    settings = resolve({**OPEN, "tasks": 2, "samples": 5})
    assert "epochs" in settings.chosen
    assert harmless_kills(settings, itertools.cycle([2, 3])) > 2


# --- collapse -------------------------------------------------------------------------------------------------------


def only_second(*arguments: object) -> np.ndarray:
    return np.array([False, True])


@pytest.mark.parametrize("method", ["boo+distill", "joint", "multihead", "vcl", "mog+si", "coreset", "boo+replay"])
def test_a_collapsed_replica_learns_again_and_leaves_the_others_alone(
    method: str, digits: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    vamp = {"prior": "vamp"} if method == "joint" else {}  # its capacity grows with the tasks
    given = {name: value for name, value in OPEN.items() if name != "boo_steps" or "boo" in method}
    settings = resolve({**given, **vamp, "method": method, "epochs": 12})
    monkeypatch.setattr(trainer_module, "collapsed", lambda *arguments: np.array([False, False]))
    once = trained(settings.changed(tasks=2), digits)
    monkeypatch.setattr(trainer_module, "collapsed", only_second)
    seen = Recorder()
    twice = trained(settings.changed(tasks=2), digits, seen)
    assert [event["collapsed"] for event in seen.of("collapse")] == [[False, True]] * 2
    assert same(once, twice, replica=0)
    assert not same(once, twice, replica=1)


def test_a_collapsed_task_is_resumed_exactly(
    harmless_kills: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "collapsed", only_second)
    settings = resolve({**OPEN, "tasks": 2, "samples": 5, "epochs": 10, "batch_size": 12})
    assert harmless_kills(settings, itertools.cycle([3, 5])) > 4


def test_a_weight_that_presses_all_codes_to_the_prior_is_found_out(digits: Stream) -> None:
    """The KL term so heavy that nothing is encoded: learned again, in vain, and reported."""
    trainer, seen = Trainer(resolve({**OPEN, "epochs": 10, "kl_weight": 3000.0}), digits.spec), Recorder()
    trainer.learn(digits[0], seen)
    kinds = [event["event"] for event in seen.events]
    assert kinds.count("collapse") == 1
    assert trainer.collapsed.any()
    assert [event["epoch"] for event in seen.events if event["event"] == "epoch"] == list(range(20))


def test_who_fixes_the_warm_up_is_not_overruled(digits: Stream) -> None:
    settings = resolve({**OPEN, "epochs": 10, "kl_weight": 3000.0, "kl_warmup": 0})
    trainer, seen = Trainer(settings, digits.spec), Recorder()
    trainer.learn(digits[0], seen)
    assert trainer.collapsed.any()
    assert "collapse" not in [event["event"] for event in seen.events]


def test_images_that_are_all_the_same_are_no_collapse() -> None:
    stream = Stream.from_tasks([np.full((40, 8, 8), 0.5)])
    trainer = Trainer(resolve({**OPEN, "epochs": 10}), stream.spec)
    trainer.learn(stream[0])
    assert not trainer.collapsed.any()


# --- across restarts ------------------------------------------------------------------------------------------------


def test_a_run_keeps_what_it_chose_when_the_rules_change(
    digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boovae.config.choose.MOST_EPOCHS", 2)
    settings = resolve({**OPEN, "tasks": 1, "samples": 5})
    train(settings, digits, tmp_path / "run", metrics=NLL)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    monkeypatch.setattr("boovae.config.choose.MOST_EPOCHS", 3)
    train(settings, digits, tmp_path / "run", metrics=NLL)  # finished: nothing to do, and nothing to refuse
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(InputError, match="epochs 2 there, 5 here"):
        train(resolve({**OPEN, "tasks": 1, "samples": 5, "epochs": 5}), digits, tmp_path / "run", metrics=NLL)


def test_a_run_from_before_settings_were_chosen_continues_with_what_it_recorded(digits: Stream, tmp_path: Path) -> None:
    """Its methods had their defaults, which a run folder's settings do not name."""
    given = {**OPEN, "tasks": 1, "samples": 5}
    fixed = replace(resolve({**given, "epochs": 2}), chosen=())
    assert "distill_weight" not in fixed.flat()
    train(fixed, digits, tmp_path / "run", metrics=NLL)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(resolve(given), digits, tmp_path / "run", metrics=NLL)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


# --- what users see -------------------------------------------------------------------------------------------------


def test_the_estimate_follows_from_one_epoch_and_the_sizes_of_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    display = Display()
    monkeypatch.setattr(display, "note", said.append)
    times = iter([100.0, 104.0, 106.0, 110.0, 120.0, 121.0, 122.0])  # the third epochs take two seconds, and one
    monkeypatch.setattr("boovae.runs.progress.time.monotonic", lambda: next(times))
    estimate = TimeEstimate([100, 300, 200], display)
    estimate.task()
    for _ in range(4):
        estimate.epoch(50)
    assert said == ["training 3 tasks takes up to 10 minutes; evaluations come on top"]  # 2 s . 50 epochs . 600 / 100
    estimate.task()
    for _ in range(3):
        estimate.epoch(50)
    assert said[1:] == ["training 2 tasks takes up to 85 seconds; evaluations come on top"]  # 1 s . 50 . 500 / 300


def test_choices_are_shown_once_and_then_what_changes(capsys: pytest.CaptureFixture[str], months: Stream) -> None:
    trainer, watch = opened(months, batch_size=600, early_stop=2, kl_warmup=0), Watch(Lines())
    for task in months:
        trainer.learn(task, watch)
    first, _, rest = capsys.readouterr().err.partition("changed for this task:")
    assert "chosen from the data; what you give holds:" in first
    assert "likelihood" in first
    assert "epochs" in rest
    assert "likelihood" not in rest


def test_the_estimator_warns_of_a_collapse() -> None:
    images = np.random.default_rng(0).random((60, 8, 8))
    model = BooVAE(net="mlp:8", latent_dim=3, epochs=60, random_state=0, settings={"kl_weight": 3000.0, "boo_steps": 1})
    with pytest.warns(ConvergenceWarning, match="posterior has collapsed"):
        model.fit(images)
