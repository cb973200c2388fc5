"""What all tests share: a private cache, one thread, a tiny stream of real digits and a tiny model."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, distributions

from boovae.config import Settings
from boovae.data import Stream, Task, load_stream
from boovae.methods import resolve
from boovae.model.distributions import DiagonalMixture
from boovae.replicas import stacked as replicas_module
from boovae.runs.run import Run
from boovae.runs.train import train
from boovae.training import checkpoint
from boovae.training.events import Event, Interrupted
from boovae.training.trainer import Observer, Trainer
from run_folders import NLL, write_npz

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from served_run import Served

TINY: dict[str, Any] = {
    "method": "standard",
    "net": "mlp:16",
    "latent_dim": 4,
    "limit": 24,
    "tasks": 3,
    "epochs": 4,
    "batch_size": 8,
    "replicas": 2,
    "components": 3,
    "samples": 20,
    "generated": 60,
    "boo_steps": 3,
    "boo_until": 2,
    "distill_latents": 10,
}


@pytest.fixture(autouse=True, scope="session")
def _quiet_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's cache out of the tests; tiny tensors run faster on one thread."""
    os.environ["BOOVAE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands that tests start
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def digits() -> Stream:
    """Ten tasks of a few real handwritten digits each."""
    return load_stream("digits", limit=TINY["limit"])


@pytest.fixture
def float64() -> Iterator[None]:
    """Double precision everywhere, so that only a different formula makes a difference."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=["stacked", "looped"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replicas computed at once, and one after another."""
    if request.param == "looped":
        monkeypatch.setattr(replicas_module, "STACK_LIMIT", 0)
    return str(request.param)


@pytest.fixture
def shared_data() -> Path:
    """Where the real datasets lie; skips where they do not."""
    folder = Path(os.environ.get("BOOVAE_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not (folder / "mnist").is_dir():
        pytest.skip("the real datasets are not here")
    return folder


@pytest.fixture(scope="module")
def finished(digits: Stream, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return copies of finished runs of two tasks; each is trained once."""
    home, made = tmp_path_factory.mktemp("finished"), itertools.count()
    runs: dict[Settings, Path] = {}

    def copy(settings: Settings | None = None) -> Path:
        settings = settings or tiny(tasks=2)
        if settings not in runs:
            stream = digits if settings.data.dataset == "digits" else load_stream(settings.data.dataset)
            runs[settings] = train(settings, stream, home / str(next(made)), metrics=NLL)
        return Path(shutil.copytree(runs[settings], home / str(next(made))))

    return copy


@pytest.fixture(scope="module")
def served(finished: Callable[..., Path]) -> Callable[[str], Served]:
    """Return a served run of two tasks; each method is loaded once."""
    from served_run import Served

    made: dict[str, Served] = {}

    def get(method: str) -> Served:
        changes = {"boo_lambda": 0.0, "boo_reencode": False} if "+boo" in method else {}
        if method not in made:
            made[method] = Served(finished(tiny(tasks=2, epochs=2, method=method, **changes)))
        return made[method]

    return get


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return a real browser; skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install 'boovae[test]'")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium on this machine: install the package chromium")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def third(digits: Stream, tmp_path: Path) -> str:
    """The digits' third task as somebody else's file."""
    return write_npz(tmp_path / "elsewhere" / "march.npz", digits, [2])


def tiny(**changes: Any) -> Settings:
    """Return the settings of a run that takes a moment, those tuned for the digits whatever its dataset."""
    values = {**TINY, "dataset": "digits", **changes}
    chosen = resolve({"dataset": "digits", "method": values["method"]}, preset="tuned", common=values)
    return chosen.changed(dataset=values["dataset"])


def watched(page: Page) -> tuple[list[str], list[str]]:
    """Return what goes wrong on a page and which addresses it asks for; both grow while the page is used."""
    troubles: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("requestfailed", lambda request: troubles.append(f"failed: {request.url}"))
    page.on("request", lambda request: requests.append(request.url))
    return troubles, requests


class Recorder(Observer):
    """An observer that keeps the events and may act after an epoch."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind."""
        return [event for event in self.events if event["event"] == kind]


def trained(settings: Settings, stream: Stream, recorder: Recorder | None = None) -> Trainer:
    """Return a trainer that has learned the planned tasks of the stream."""
    trainer = Trainer(settings, stream.spec)
    for task in stream[: settings.data.tasks]:
        trainer.learn(task, recorder or Recorder())
    return trainer


def same(one: Trainer, other: Trainer, replica: int | None = None) -> bool:
    """Whether two trainers hold the same model bit for bit (one replica of it, or all)."""
    chosen = slice(None) if replica is None else replica
    tensors = one.replicas.tensors(), other.replicas.tensors()
    return all(torch.equal(tensor[chosen], tensors[1][name][chosen]) for name, tensor in tensors[0].items())


def finite(trainer: Trainer) -> bool:
    """Whether all that a trainer holds are numbers: the model and the memory."""
    tensors = {**trainer.replicas.tensors(), **trainer.method.memory()}
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def in_torch(mixture: DiagonalMixture) -> distributions.MixtureSameFamily:
    """The same mixture in torch's own words."""
    parts = distributions.Normal(mixture.mean, (0.5 * mixture.log_variance).exp())
    weights = distributions.Categorical(logits=mixture.log_weights)
    return distributions.MixtureSameFamily(weights, distributions.Independent(parts, 1))


# --- one step -------------------------------------------------------------------------------------------------------


class Halt(Recorder):
    """Stops before the first step of a task."""

    def block(self, trainer: Trainer) -> None:
        raise Interrupted


def begun(trainer: Trainer, task: Task) -> Trainer:
    """Let the trainer begin a task and stop there."""
    with pytest.raises(Interrupted):
        trainer.learn(task, Halt())
    return trainer


def step(trainer: Trainer, images: Tensor, *, training: bool = True, kl_weight: float = 1.0) -> dict[str, Any]:
    """Return the batch of a step on the same images (B, D) for all replicas."""
    count = len(trainer.replicas)
    draws = trainer.generators.draw_all(trainer.objective.draws(len(images), training=training), "a step")
    return {
        "x": images.expand(count, *images.shape),
        "weight": torch.full((count, len(images)), 1 / len(images)),
        "kl_weight": torch.full((count,), kl_weight),
        "state": trainer.engine.state,
        **draws,
    }


# --- a process that dies --------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a process that dies without a word."""


def train_with_kills(
    settings: Settings,
    stream: Stream,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    lives: Iterator[int],
    **options: Any,
) -> int:
    """Train to the end although the process dies, again and again after so many blocks; return how often it died."""
    return with_kills(lambda: train(settings, stream, folder, **options), monkeypatch, lives)


@pytest.fixture
def harmless_kills(digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Check that a run ends with the same bytes although it dies again and again; return how often it died."""

    def compare(settings: Settings, lives: Iterator[int]) -> int:
        whole = train(settings, digits, tmp_path / "whole", metrics=NLL)
        killed = tmp_path / "killed"
        kills = train_with_kills(settings, digits, killed, monkeypatch, lives, metrics=NLL)
        assert (whole / "metrics.jsonl").read_bytes() == (killed / "metrics.jsonl").read_bytes()
        one, other = (max((run / "checkpoint").glob("*.safetensors")) for run in (whole, killed))
        assert one.read_bytes() == other.read_bytes()
        return kills

    return compare


def with_kills(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch, lives: Iterator[int]) -> int:
    """Do some work to the end although the process dies after so many blocks; return how often it died."""
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)
    checkpointing, kills = Run.block, 0
    while True:
        left = next(lives)

        def block(run: Run, trainer: Trainer) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            checkpointing(run, trainer)

        monkeypatch.setattr(Run, "block", block)
        try:
            work()
            return kills
        except Killed:
            kills += 1
