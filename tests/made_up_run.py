"""A run folder with numbers as a real run has them, and what the tags of a page say."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import torch

from boovae.config import Settings, to_toml
from boovae.data import ImageSpec
from boovae.methods import REGISTRY, is_method, resolve
from boovae.metrics.evaluation import read_evaluation
from boovae.metrics.schema import to_json
from boovae.report.pictures import save_grid
from boovae.runs.environment import environment
from boovae.runs.folder import RunFolder
from boovae.runs.train import run_event
from boovae.training.events import divergence, epoch_end


def make_run(
    folder: Path,
    tasks: int = 10,
    done: int | None = None,
    replicas: int = 5,
    method: str = "boo",
    names: list[str] | None = None,
    epochs: int = 16,
    forget: float = 0.7,
    accuracy: float = 0.989,
    effective: float = 180.0,
    frozen: int | None = None,
) -> Path:
    """Write a run folder as docs/run-folder.md describes it, with numbers as a real run has them."""
    done = tasks if done is None else done
    names = names or [f"digit {t}" for t in range(tasks)]
    rng = np.random.default_rng(3)
    known = method if is_method(method) else "boo"  # a hostile log may name anything
    given = {"dataset": "mnist", "method": known, "replicas": replicas, "epochs": 500, "learning_rate": 5e-4}
    settings = resolve(given)
    split = {"how": "by class", "digest": "5f1c", "binarize": "none"}
    events: list[dict[str, Any]] = [run_event(settings, ImageSpec((28, 28)), names, split) | {"method": method}]
    learned: list[np.ndarray[Any, Any]] = []
    for task in range(min(done + 1, tasks)):
        images = {"train": 5000, "valid": 1000, "test": 1000}
        events.append({"event": "task_start", "task": task, "name": names[task], "classes": [task], "images": images})
        events += _epoch_events(rng, task, epochs, replicas)
        if task == done:
            break  # a run stopped in the middle of a task
        if frozen is not None and task == 4:
            events += [divergence(task, 7, frozen, retry) for retry in (1, 2, "frozen")]
        per_replica = [[epochs] * replicas, [epochs - 9] * replicas, [101.5] * replicas]
        events.append(
            {"event": "task_end", "task": task}
            | dict(zip(("epochs", "best_epoch", "best_loss"), per_replica, strict=True))
        )
        learned.append(75 + 20 * rng.random() + rng.normal(0, 0.6, replicas))
        events.append(_evaluation(rng, learned, forget, accuracy, effective, frozen if task >= 4 else None))
    return _written(folder, settings, events, rng, done)


def _written(
    folder: Path, settings: Settings, events: list[dict[str, Any]], rng: np.random.Generator, done: int
) -> Path:
    """Write the files of a run that has learned `done` tasks."""
    places = RunFolder(folder)
    places.samples.mkdir(parents=True)
    places.config.write_text(to_toml(settings, REGISTRY.sections(settings.method)))
    made_with = environment(torch.device("cpu"), False, "boovae train")
    places.environment.write_text(json.dumps(made_with))
    places.log.write_text("".join(json.dumps(event) + "\n" for event in events))
    times = [
        {"event": "task", "task": t, "train_seconds": 31.5 + t, "evaluate_seconds": 4.2 + t, "steps": 800}
        for t in range(done)
    ]
    places.timing.write_text("".join(json.dumps(line) + "\n" for line in times))
    for task in range(done):
        save_grid(places.sample_grid(task), rng.random((36, 784)), (28, 28), scale=1)
    return folder


def _epoch_events(rng: np.random.Generator, task: int, epochs: int, replicas: int) -> list[dict[str, Any]]:
    events = []
    for epoch in range(epochs):
        kl = 25 - 8 * np.exp(-epoch / 6) + rng.normal(0, 0.2, replicas)
        reconstruction = 72 + (400 if task == 0 else 90) * np.exp(-epoch / 4) + rng.normal(0, 0.6, replicas)
        valid = {"loss": kl + reconstruction + 2, "reconstruction": reconstruction + 2, "kl": kl}
        train = {"loss": kl + reconstruction, "reconstruction": reconstruction, "kl": kl}
        active = np.array([epoch < epochs - r for r in range(replicas)])
        numbers = {"train": train, "valid": valid}
        events.append(epoch_end(task, epoch, numbers, np.full(replicas, 5e-4), active))
    return events


def _evaluation(
    rng: np.random.Generator,
    learned: list[np.ndarray[Any, Any]],
    forget: float,
    accuracy: float,
    effective: float,
    frozen: int | None,
) -> dict[str, Any]:
    seen, replicas = len(learned), len(learned[0])
    age = np.arange(seen)[::-1, None]
    lost = forget * age + rng.normal(0, 0.3, (seen, replicas)) * (age > 0)
    own = np.array(learned) + lost
    dilution = np.log(seen / np.arange(1, seen + 1))
    pooled = own + np.log(seen)
    shares = rng.dirichlet(np.full(seen, 60 / (1 + 8 * forget)), replicas)
    entropy = -(shares * np.log(np.maximum(shares, 1e-12))).sum(axis=1)
    nll = pooled.mean(axis=0)
    if frozen is not None:
        nll[frozen] = np.nan
    memory = {"pseudo_inputs": 15 * seen * 784 * 4, "component_weights": 15 * seen * 4}
    samples = np.full((seen, replicas), effective)
    data = {
        "event": "evaluation",
        "task": seen - 1,
        "nll": _lists({"pooled": nll, "per_task": pooled, "own": own, "effective_samples": samples})
        | {"samples": 5000},
        "diversity": _lists(
            {
                "table": np.log(seen) - entropy,
                "uniform": entropy * 0,
                "bernoulli": entropy * 0,
                "proportions": shares,
            }
        )
        | {"classes": list(range(seen)), "samples": 10000},
        "frechet": {"pooled": (20 + rng.random(replicas)).tolist(), "features": "classifier"},
        "classifier": {"accuracy": accuracy, "digest": "5f1c"},
        "forgetting": _lists({"own": lost, "pooled": lost + dilution[:, None], "dilution": dilution}),
        "posterior": {"active_units": [[18] * replicas] * seen, "at_upper_limit": [[0.0] * replicas] * seen},
        "ledger": {
            "memory": memory,
            "memory_bytes": sum(memory.values()),
            "images_stored": 0,
            "parameters": 699_080,
        },
    }
    return to_json(read_evaluation(data, "a made-up run", replicas))


def _lists(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Turn arrays into lists with null where a number is not finite."""
    return {key: np.where(np.isfinite(a), a, None).tolist() for key, a in arrays.items()}  # type: ignore[call-overload]


class Page(HTMLParser):
    """The tags of a page and whether they nest."""

    VOID = frozenset({"meta", "img", "br", "use", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag
