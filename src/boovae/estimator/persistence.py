"""A saved estimator is a run folder: `boovae sample`, `inspect` and `export` read it, and `BooVAE.load` reads runs."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from boovae.config import Settings
from boovae.data.scaling import Scaling
from boovae.errors import InputError, RunError
from boovae.estimator.parameters import FOREIGN, OWN
from boovae.runs.environment import environment
from boovae.runs.run import Run
from boovae.runs.train import load_trainer, run_event
from boovae.training.events import Event
from boovae.training.trainer import Trainer


class Record(msgspec.Struct):
    """The state of an estimator besides its trainer, as stored in the `run` event of its folder."""

    parameters: dict[str, Any]
    image_shape: tuple[int, ...]
    feature_names: list[str] = []
    grey: bool = True
    centre: list[float] = []
    scale: list[float] = []

    @classmethod
    def of_run(cls, settings: Settings, head: Event) -> Self:
        """Return the record of an estimator equivalent to a run of the command line."""
        if head["pixel_range"] != [0.0, 1.0]:
            raise InputError(f"this run has pixels in {head['pixel_range']}; an estimator needs pixels in [0, 1]")
        values, usual = settings.flat(), Settings().flat()
        others = {
            name: value
            for name, value in values.items()
            if name not in (*OWN, *FOREIGN) and (name not in usual or value != usual[name])
        }
        own = {name: values[name] for name in OWN}
        colours, *size = head["shape"]
        shape = (*size, colours) if len(size) == 2 else tuple(head["shape"])  # colours come last, as in files
        return cls(own | {"settings": others or None, "random_state": settings.training.seed}, shape)

    def scaling(self) -> Scaling:
        """Return the scaling of the rows that the model learned."""
        features = math.prod(self.image_shape)
        centre, scale = self.centre or [0.0] * features, self.scale or [1.0] * features
        return Scaling(self.grey, np.array(centre), np.array(scale))


def save_model(folder: Path, record: Record, trainer: Trainer, events: Sequence[Event]) -> Path:
    """Write a fitted model to `folder` atomically: first to a folder beside it, which then replaces it."""
    _check_replaceable(folder)
    fresh, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    for leftover in (fresh, old):  # of a killed process
        shutil.rmtree(leftover, ignore_errors=True)
    names = [event["name"] for event in events if event["event"] == "task_start"]
    split = {"binarize": trainer.spec.binarize, "digest": ""}
    head = run_event(trainer.settings, trainer.spec, names, split)
    with Run.create(fresh, trainer.settings, environment(trainer.device, trainer.compile, "BooVAE.save")) as run:
        run.event(head | {"estimator": msgspec.to_builtins(record)})
        for event in events:
            run.event(event)
        run.checkpoint(trainer)
    try:
        if folder.exists():
            folder.replace(old)
        fresh.replace(folder)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror}; the model is in {fresh}") from error
    shutil.rmtree(old, ignore_errors=True)
    return folder


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace anything but an earlier save or an empty folder."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if folder.is_dir() and (folder / "config.toml").is_file():
        with Run.open(folder) as run:
            if "estimator" in next(iter(run.events("run")), {}):
                return
    raise InputError(f"{folder} holds something other than a saved BooVAE: choose another folder")


def load_model(folder: Path, device: str) -> tuple[Record, Trainer, list[Event]]:
    """Load the parts of an estimator from a folder: a saved one, or a finished run of the command line."""
    run, trainer = load_trainer(folder, device)
    with run:
        head, events = run.events("run")[0], [event for event in run.events() if event["event"] != "run"]
    if trainer.in_task or not trainer.tasks_done:
        raise InputError(f"{folder} is in the middle of a task: let `boovae train` finish it, then load it")
    if len(trainer.replicas) > 1:
        raise InputError(
            f"{folder} holds {len(trainer.replicas)} replicas, and an estimator is one model; train with replicas=1"
        )
    try:
        saved = msgspec.convert(head.get("estimator"), Record | None)
    except msgspec.ValidationError as error:
        raise InputError(f"{folder}: metrics.jsonl does not describe an estimator ({error})") from error
    return saved or Record.of_run(trainer.settings, head), trainer, events
