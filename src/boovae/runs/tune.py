"""Choose a strength on validation data: all candidate values train at once, each as a few replicas.

Every value gets the same seeds, so the comparison is paired, and trying ten values costs little more than trying one.
Test images are never used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w
import torch
from torch import Tensor

from boovae.config import Settings
from boovae.config.resolve import read_toml
from boovae.data import Stream, Task
from boovae.errors import InputError
from boovae.files import write_file
from boovae.methods import from_mapping, make_method
from boovae.methods.registry import METHODS, parts_of
from boovae.metrics.likelihood import log_likelihood_of_tasks
from boovae.replicas.devices import matmul_precision
from boovae.runs.progress import Display, Watch
from boovae.runs.train import planned_tasks, trainer_for
from boovae.training.trainer import Trainer


@dataclass(frozen=True)
class Trial:
    """A value of a setting and the validation NLL of all tasks seen, one number per seed."""

    setting: str
    value: float
    nll: list[float]


def search(
    settings: Settings,
    stream: Stream,
    setting: str | None = None,
    values: Sequence[float] | None = None,
    *,
    seeds: int = 2,
    device: torch.device,
    compile: str = "auto",
    display: Display,
) -> list[Trial]:
    """Train every value on the planned tasks, all at once, and score it on their validation images."""
    setting, values = _what(settings, setting, values)
    if seeds < 1:
        raise InputError(f"{{seeds_each}} is {seeds}; it must be a whole number of at least 1")
    planned = planned_tasks(stream, settings)
    many = settings.changed(replicas=len(values) * seeds)
    own_seeds = [settings.training.seed + seed for _ in values for seed in range(seeds)]
    candidates = {setting: [value for value in values for _ in range(seeds)]}
    trainer = trainer_for(many, planned, device, compile, seeds=own_seeds, candidates=candidates)
    parts = [task.valid.images for task in planned]
    scores = torch.cat(learn_and_score(trainer, planned, parts, settings.evaluation.samples, display), dim=1).mean(1)
    rows = scores.view(len(values), seeds).tolist()
    return [Trial(setting, value, row) for value, row in zip(values, rows, strict=True)]


def learn_and_score(
    trainer: Trainer, tasks: Sequence[Task], images: Sequence[Tensor], samples: int, display: Display
) -> list[Tensor]:
    """Learn the tasks one after another, then return the NLL (R, n) of each one's `images` (n, D)."""
    watch = Watch(display)
    for index, task in enumerate(tasks):
        display.task(index, len(tasks), task.name, trainer.settings.training.epochs)
        trainer.learn(task, watch)
    sizes = [len(part) for part in images]
    owners = torch.repeat_interleave(torch.tensor(sizes)).to(trainer.device)
    with matmul_precision(trainer.device):
        together = torch.cat([*images]).to(trainer.device)
        found = log_likelihood_of_tasks(trainer, together, owners, samples, display.evaluating)
    return list((-found.log_prob.double()).split(sizes, dim=1))


def best(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the lowest mean; one that diverged cannot win."""
    return min(trials, key=lambda trial: (any(math.isnan(nll) for nll in trial.nll), fmean(trial.nll)))


def edge(trials: Sequence[Trial], winner: Trial) -> str:
    """Return a warning if the best value is the smallest or largest one tried, since a better one may lie beyond."""
    values = [trial.value for trial in trials]
    if len(set(values)) == 1 or min(values) < winner.value < max(values):
        return ""
    side, beyond = ("smallest", "smaller") if winner.value == min(values) else ("largest", "larger")
    return f"{winner.setting}: {winner.value:g} is the {side} value tried; {beyond} ones may be better (--values)"


def read_recipe(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the sections of a recipe file, settings by method; none where there is no file yet."""
    if path is None or not path.exists():
        return {}
    sections: dict[str, dict[str, Any]] = read_toml(path, "recipe")
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise InputError(
                f"{{recipe}} {path} must hold sections of settings, one per method: '{name}' is not a section"
            )
        from_mapping({"method": name, **section})
    return sections


def write_recipe(path: Path, method: str, winner: Trial) -> None:
    """Write the winner into the method's section of a recipe file; keep the other sections."""
    sections = read_recipe(path)
    sections.setdefault(method, {})[winner.setting] = winner.value
    write_file(path, tomli_w.dumps(sections).encode())


def _what(settings: Settings, setting: str | None, values: Sequence[float] | None) -> tuple[str, tuple[float, ...]]:
    """Return the setting to choose and the values to try; of a combination with several strengths, name one."""
    method = settings.method
    searches = [part.search for part in parts_of(method) if part.search]
    known = {name: usual for search in searches for name, usual in search.items()}
    if not known:
        able = ", ".join(name for name, part in METHODS.items() if part.search)
        raise InputError(f"{{method={method}}} has no strength to choose; these have: {able}")
    if setting is None and len(searches) > 1:
        raise InputError(
            f"{{method}} {method} has {len(searches)} strengths to choose from; name one by {{setting}} "
            f"({', '.join(known)})"
        )
    setting = setting or next(iter(known))
    if setting not in known:
        raise InputError(f"{{setting}} {setting}: method {method} has no such strength; it has {', '.join(known)}")
    chosen = tuple(float(value) for value in values or known[setting])
    for value in chosen:  # a bad value is refused before anything is trained
        make_method(from_mapping({**settings.flat(), setting: value}))
    return setting, chosen
