"""An interrupted evaluation continues where it stopped and ends with the same bytes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import boovae.metrics.reference
from boovae.data import Stream
from boovae.errors import InputError, RunError
from boovae.metrics import likelihood
from boovae.metrics.likelihood import log_likelihood_of_tasks
from boovae.metrics.metric import USUAL
from boovae.metrics.partial_results import PartialResult
from boovae.runs.run import Run
from boovae.runs.train import train
from boovae.training import checkpoint
from boovae.training.checkpoint import load_checkpoint, save_checkpoint
from conftest import Killed, tiny, trained
from kills import difference
from run_folders import NLL

Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def die() -> None:
    raise Killed


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Counted:
    """Counts the calls of a function that came to their end; does something in the middle of one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.done, self.at, self.act = 0, -1, die
        function = getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            if self.done == self.at:
                self.at = -1
                self.act()
            result = function(*arguments, **options)
            self.done += 1
            return result

        monkeypatch.setattr(module, name, counted)

    def then(self, at: int, act: Callable[[], None]) -> None:
        """Reset the count, and act in call number `at`; never with -1."""
        self.done, self.at, self.act = 0, at, act


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The steps of likelihoods, each of a few images and samples."""
    monkeypatch.setattr(likelihood, "CHUNK_BYTES", {"cpu": 6000})
    monkeypatch.setattr(likelihood, "IMAGE_CHUNK", 4)
    return Counted(monkeypatch, likelihood, "_weigh")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every step."""
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)


def kept(run: Path) -> dict[str, Any]:
    """Return what the newest checkpoint holds of an evaluation."""
    loaded = load_checkpoint(run / "checkpoint")
    assert loaded is not None
    names = {name.removeprefix("tally/") for name in loaded[0] if name.startswith("tally/")}
    record: dict[str, Any] = loaded[1].get("tally", {})
    assert names == record.keys()
    return record


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("method", "fit"), [("boo+distill", "auto"), ("multihead", "auto"), ("boo+distill", "always")])
def test_killed_in_an_evaluation_a_run_repeats_one_step_and_ends_with_the_same_bytes(
    method: str, fit: str, weighed: Counted, digits: Stream, tmp_path: Path
) -> None:
    settings, killed = tiny(method=method, tasks=2, fit_posterior=fit), tmp_path / "killed"
    whole = train(settings, digits, tmp_path / "whole", metrics=NLL)
    steps = weighed.done
    weighed.then(steps - 3, die)
    with pytest.raises(Killed):
        train(settings, digits, killed, metrics=NLL)
    assert sum(tally["done"] for tally in kept(killed).values()) > 3
    weighed.then(1, die)
    with pytest.raises(Killed):  # and once more
        train(settings, digits, killed, metrics=NLL)
    weighed.then(-1, die)
    train(settings, digits, killed, metrics=NLL)
    assert weighed.done == 2
    assert difference(whole, killed) == ""
    assert kept(killed) == {}


def test_sigterm_keeps_what_an_evaluation_has_done(weighed: Counted, digits: Stream, tmp_path: Path) -> None:
    settings, stopped = tiny(tasks=2), tmp_path / "stopped"
    whole = train(settings, digits, tmp_path / "whole", metrics=NLL)
    steps = weighed.done
    weighed.then(steps - 3, terminate)
    with pytest.raises(RunError, match="stopped; everything is in"):
        train(settings, digits, stopped, metrics=NLL)
    assert weighed.done == steps - 2  # the one in which the signal came was ended
    weighed.then(-1, die)
    train(settings, digits, stopped, metrics=NLL)
    assert weighed.done == 2
    assert difference(whole, stopped) == ""


@pytest.mark.usefixtures("always")
def test_killed_while_samples_are_compared_a_run_keeps_the_replicas_that_were(
    digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, killed = tiny(tasks=2), tmp_path / "killed"
    likelihoods = Counted(monkeypatch, likelihood, "_weigh")
    compared = Counted(monkeypatch, boovae.metrics.reference, "precision_recall")
    whole = train(settings, digits, tmp_path / "whole", metrics=USUAL)
    assert compared.done == 4  # two tasks, two replicas
    compared.then(3, die)
    with pytest.raises(Killed):
        train(settings, digits, killed, metrics=USUAL)
    likelihoods.then(-1, die)
    compared.then(-1, die)
    train(settings, digits, killed, metrics=USUAL)
    assert (likelihoods.done, compared.done) == (0, 1)
    assert difference(whole, killed) == ""


def test_a_step_that_would_end_too_late_is_not_waited_for(
    finished: Callable[..., Path], digits: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may take long: what is kept is never older than 30 s while no step takes more than half of that."""
    trainer, now, written = trained(tiny(tasks=1), digits), 1000.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Run.open(finished()) as run:
        monkeypatch.setattr("boovae.runs.run.save_checkpoint", lambda *content: written.append(now))
        for now in range(1000, 1100, 12):  # noqa: B007 - the clock
            run.block(trainer)
    assert written == [1024, 1048, 1072, 1096]


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.fixture
def broken_off(always: None, weighed: Counted, digits: Stream, tmp_path: Path) -> Path:
    """A run that was killed in the evaluation of its second task."""
    run = tmp_path / "broken"
    train(tiny(tasks=1), digits, run.with_name("short"), metrics=NLL)
    weighed.then(weighed.done + 5, die)
    with pytest.raises(Killed):
        train(tiny(tasks=2), digits, run, metrics=NLL)
    assert [tally["done"] for tally in kept(run).values()] == [5]
    return run


def forge(run: Path, change: Change) -> None:
    """Change the newest checkpoint, with a checksum that says it is whole."""
    loaded = load_checkpoint(run / "checkpoint")
    assert loaded is not None
    tensors, record = loaded
    change(tensors, record)
    save_checkpoint(run / "checkpoint", tensors, record)


def of(record: dict[str, Any]) -> dict[str, Any]:
    (tally,) = record["tally"].values()
    return tally  # type: ignore[no-any-return]


def named(tensors: dict[str, Tensor]) -> str:
    (name,) = (name for name in tensors if name.startswith("tally/"))
    return name


FORGED: dict[str, Change] = {
    "more steps than there are": lambda tensors, record: of(record).update(done=10**9),
    "fewer steps than none": lambda tensors, record: of(record).update(done=-1),
    "no number": lambda tensors, record: of(record).update(done="5"),
    "no plan": lambda tensors, record: of(record).update(plan=None),
    "no tallies": lambda tensors, record: record.update(tally=[3]),
    "other shape": lambda tensors, record: tensors.update({named(tensors): torch.zeros(3, 2, 5)}),
    "other numbers": lambda tensors, record: tensors.update({named(tensors): tensors[named(tensors)].double()}),
    "no sums": lambda tensors, record: tensors.pop(named(tensors)),
}


@pytest.mark.parametrize("forgery", sorted(FORGED))
def test_a_forged_evaluation_is_refused(forgery: str, broken_off: Path, digits: Stream) -> None:
    forge(broken_off, FORGED[forgery])
    with pytest.raises(InputError, match="checkpoint"):
        train(tiny(tasks=2), digits, broken_off, metrics=NLL)


OTHERWISE: dict[str, Change] = {
    "other samples": lambda tensors, record: of(record)["plan"].update(samples=7),
    "cut otherwise": lambda tensors, record: of(record)["plan"].update(at_once=[512, 3]),
    "other images": lambda tensors, record: (
        record.update(tally={"nll 1:12": of(record)}),
        tensors.update({"tally/nll 1:12": tensors.pop(named(tensors))}),
    ),
}


@pytest.mark.parametrize("case", sorted(OTHERWISE))
def test_an_evaluation_begun_otherwise_starts_over(case: str, broken_off: Path, digits: Stream, tmp_path: Path) -> None:
    forge(broken_off, OTHERWISE[case])
    train(tiny(tasks=2), digits, broken_off, metrics=NLL)
    assert difference(train(tiny(tasks=2), digits, tmp_path / "whole", metrics=NLL), broken_off) == ""
    assert kept(broken_off) == {}


def test_a_damaged_evaluation_continues_from_the_previous_checkpoint(
    broken_off: Path, weighed: Counted, digits: Stream, tmp_path: Path
) -> None:
    newest = max((broken_off / "checkpoint").glob("*.safetensors"), key=lambda path: int(path.stem))
    newest.write_bytes(newest.read_bytes()[:-1])
    assert [tally["done"] for tally in kept(broken_off).values()] == [4]
    weighed.then(-1, die)
    train(tiny(tasks=2), digits, broken_off, metrics=NLL)
    resumed = weighed.done
    weighed.then(-1, die)
    whole = train(tiny(tasks=2), digits, tmp_path / "whole", metrics=NLL)
    assert resumed < weighed.done
    assert difference(whole, broken_off) == ""


def test_images_of_other_tasks_are_another_tally(digits: Stream) -> None:
    """As many images of other tasks: the available tasks may change before an evaluation continues."""
    trainer, images = trained(tiny(method="boo", tasks=2), digits), digits[0].test.images[:4]
    tallies: dict[str, PartialResult] = {}

    def own(owners: list[int]) -> Tensor:
        return log_likelihood_of_tasks(trainer, images, torch.tensor(owners), 20, lambda share: None, tallies).own

    assert not torch.equal(own([0, 0, 0, 1]), own([0, 1, 1, 1]))
    assert len(tallies) == 2


@pytest.mark.parametrize("method", ["standard", "multihead"])
def test_progress_is_reported_after_every_step(method: str, weighed: Counted, digits: Stream) -> None:
    trainer, shares = trained(tiny(method=method, tasks=2), digits), list[float]()
    images = torch.cat([task.test.images for task in digits[:2]])
    owners = torch.repeat_interleave(torch.tensor([len(task.test.images) for task in digits[:2]]))
    log_likelihood_of_tasks(trainer, images, owners, 20, shares.append)
    assert len(shares) == weighed.done > 8
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
