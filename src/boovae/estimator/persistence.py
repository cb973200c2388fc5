"""A saved estimator is a run folder: `boovae sample`, `inspect` and `export` read it, and `BooVAE.load` reads runs."""

from __future__ import annotations

import numbers
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from boovae.config import Settings
from boovae.data.scaling import Scaling
from boovae.errors import InputError, RunError
from boovae.estimator.parameters import FOREIGN, OWN, plain
from boovae.replicas.devices import choose_device, environment
from boovae.runs.run import Run
from boovae.runs.train import load_trainer, run_event
from boovae.training.events import Event
from boovae.training.trainer import Trainer
from boovae.training.transfer import packed, rebuilt, unpacked


class Portable(BaseEstimator):  # type: ignore[misc]
    """What of an estimator is about moving and keeping the model."""

    trainer_: Trainer
    scaling_: Scaling
    image_shape_: tuple[int, ...]
    n_features_in_: int
    device: str
    _events: list[Event]

    def _check_learned(self) -> None:
        """Refuse to use a model that has learned nothing."""
        check_is_fitted(self)

    def _check_kept(self) -> None:
        """Refuse to store a model while it holds what may not be stored."""

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device, where it also learns from now on."""
        chosen = choose_device(str(device))
        self.device = str(device)
        if hasattr(self, "trainer_"):
            self.trainer_ = rebuilt(self.trainer_, chosen)
        return self

    def save(self, folder: str | Path) -> Path:
        """Write the model to a folder, without pickle; returns it. A model that was saved there before is replaced."""
        self._check_learned()
        self._check_kept()
        return save_model(self, self._events, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "auto") -> Self:
        """Return the model that `save`, or `boovae train --replicas 1`, has written to a folder."""
        model: Self = load_model(cls, Path(folder), device)
        return model

    def __getstate__(self) -> dict[str, Any]:
        self._check_kept()
        state: dict[str, Any] = dict(super().__getstate__())
        state.pop("_waiting", None)  # nothing waits
        if "trainer_" in state:
            state["trainer_"] = packed(state["trainer_"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "trainer_" in state:
            device = choose_device(state["device"] if torch.cuda.is_available() else "auto")
            state = {**state, "trainer_": unpacked(state["trainer_"], device)}
        super().__setstate__(state)


def save_model(model: Any, events: Sequence[Event], folder: Path) -> Path:
    """Write a fitted model to `folder`: beside it first, and then in its place, so that it is whole or not there."""
    _check_replaceable(folder)
    fresh, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    for leftover in (fresh, old):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    trainer = model.trainer_
    names = [event["name"] for event in events if event["event"] == "task_start"]
    split = {"binarize": trainer.binarize, "digest": ""}
    head = run_event(trainer.settings, trainer.shape, trainer.pixel_range, names, split)
    with Run.create(fresh, trainer.settings, environment(trainer.device, trainer.compile, "BooVAE.save")) as run:
        run.event(head | {"estimator": _record(model)})
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
    raise InputError(f"{folder} holds something else than a saved BooVAE: choose another folder")


def _record(model: Any) -> dict[str, Any]:
    """Return what the estimator knows beside its trainer, as JSON has it."""
    parameters = model.get_params(deep=False)
    if not isinstance(parameters["random_state"], numbers.Integral | None):
        parameters["random_state"] = model.trainer_.settings.training.seed  # a generator has no name
    known = {name: plain(value) for name, value in parameters.items()} | {"device": str(model.device)}
    others = {name: plain(value) for name, value in (model.settings or {}).items()}
    scaling = model.scaling_
    return {
        "parameters": known | {"settings": others or None},
        "image_shape": list(model.image_shape_),
        "feature_names": [str(name) for name in getattr(model, "feature_names_in_", [])],
        "grey": scaling.grey,
        "centre": [] if scaling.grey else scaling.centre.tolist(),
        "scale": [] if scaling.grey else scaling.scale.tolist(),
    }


def load_model(kind: type[Any], folder: Path, device: str) -> Any:
    """Return the estimator that lies in a folder: one that was saved, or a finished run of the command line."""
    run, trainer = load_trainer(folder, device)
    with run:
        head, events = run.events("run")[0], [event for event in run.events() if event["event"] != "run"]
    if trainer.control is not None or not trainer.tasks_done:
        raise InputError(f"{folder} is in the middle of a task: let `boovae train` finish it, then load it")
    if len(trainer.replicas) > 1:
        raise InputError(
            f"{folder} holds {len(trainer.replicas)} replicas, and an estimator is one model; train with replicas=1"
        )
    record = head.get("estimator") or _record_of_run(trainer.settings, head)
    model = kind(**{**record["parameters"], "device": device})
    features = int(np.prod(record["image_shape"]))
    centre, scale = (np.array(record[name] or [value] * features) for name, value in (("centre", 0.0), ("scale", 1.0)))
    model.scaling_ = Scaling(record["grey"], centre, scale)
    model.image_shape_ = tuple(record["image_shape"])
    model.n_features_in_ = features
    if record["feature_names"]:
        model.feature_names_in_ = np.array(record["feature_names"], dtype=object)
    model.trainer_ = trainer
    model._events = events
    return model


def _record_of_run(settings: Settings, head: Event) -> dict[str, Any]:
    """Return what an estimator would have to know to have made this run."""
    if head["pixel_range"] != [0.0, 1.0]:
        raise InputError(f"this run has pixels in {head['pixel_range']}; an estimator takes those in [0, 1]")
    values, usual = settings.flat(), Settings().flat()
    others = {
        name: value
        for name, value in values.items()
        if name not in (*OWN, *FOREIGN) and (name not in usual or value != usual[name])
    }
    own = {name: values[name] for name in OWN}
    colours, *size = head["shape"]
    return {
        "parameters": own | {"settings": others or None, "random_state": settings.training.seed},
        "image_shape": [*size, colours] if len(size) == 2 else head["shape"],  # colours come last, as in files
        "feature_names": [],
        "grey": True,
        "centre": [],
        "scale": [],
    }
