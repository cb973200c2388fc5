"""A run folder with numbers as a real run has them, and what the tags of a page say."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from boovae.report import save_grid

CONFIG = """\
method = "{method}"

[data]
dataset = "mnist"

[model]
net = "mlp"
latent_dim = 40
components = 15

[training]
replicas = 5
epochs = 500
learning_rate = 5e-4
"""


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
    seeds = list(range(replicas))
    events: list[dict[str, Any]] = [
        {
            "event": "run",
            "format": 1,
            "replicas": replicas,
            "seeds": seeds,
            "method": method,
            "dataset": "mnist",
        }
        | {"shape": [28, 28], "tasks": names, "split": {"how": "by class", "digest": "5f1c", "binarize": "none"}}
    ]
    learned: list[np.ndarray[Any, Any]] = []
    for task in range(min(done + 1, tasks)):
        images = {"train": 5000, "valid": 1000, "test": 1000}
        events.append({"event": "task_start", "task": task, "name": names[task], "classes": [task], "images": images})
        events += _epoch_events(rng, task, epochs, replicas)
        if task == done:
            break  # a run stopped in the middle of a task
        if frozen is not None and task == 4:
            diverged = {"event": "divergence", "task": task, "epoch": 7, "replica": frozen}
            events += [diverged | {"retry": retry} for retry in (1, 2, "frozen")]
        per_replica = [[epochs] * replicas, [epochs - 9] * replicas, [101.5] * replicas]
        events.append(
            {"event": "task_end", "task": task}
            | dict(zip(("epochs", "best_epoch", "best_loss"), per_replica, strict=True))
        )
        learned.append(75 + 20 * rng.random() + rng.normal(0, 0.6, replicas))
        events.append(_evaluation(rng, learned, forget, accuracy, effective, frozen if task >= 4 else None))
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(method=method))
    environment = {
        "boovae": "0.1.0",
        "python": "3.11.7",
        "torch": "2.6.0",
        "device": "cpu",
        "command": "boovae train",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    times = [
        {"event": "task", "task": t, "train_seconds": 31.5 + t, "evaluate_seconds": 4.2 + t, "steps": 800}
        for t in range(done)
    ]
    (folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    for task in range(done):
        save_grid(folder / "samples" / f"task_{task:02d}.png", rng.random((36, 784)), (28, 28), scale=1)
    return folder


def _epoch_events(rng: np.random.Generator, task: int, epochs: int, replicas: int) -> list[dict[str, Any]]:
    events = []
    for epoch in range(epochs):
        kl = 25 - 8 * np.exp(-epoch / 6) + rng.normal(0, 0.2, replicas)
        reconstruction = 72 + (400 if task == 0 else 90) * np.exp(-epoch / 4) + rng.normal(0, 0.6, replicas)
        valid = {"loss": kl + reconstruction + 2, "reconstruction": reconstruction + 2, "kl": kl}
        train = {"loss": kl + reconstruction, "reconstruction": reconstruction, "kl": kl}
        active = [epoch < epochs - r for r in range(replicas)]
        events.append(
            {"event": "epoch", "task": task, "epoch": epoch}
            | {
                "train": _lists(train),
                "valid": _lists(valid),
                "learning_rate": [5e-4] * replicas,
                "active": active,
            }
        )
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
    return {
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
