"""All state that changes while a task is learned, in one object that is saved and restored."""

from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boovae.config import TrainingSettings
from boovae.replicas.adam import Moments
from boovae.training.state import check, group, put

PLATEAU_FACTOR = 0.5
PLATEAU_THRESHOLD = 1e-4
MAX_RETRIES = 2

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass
class Control:
    """Learning rate, early stopping and divergence of each replica within one task; every field is an array (R,)."""

    learning_rate: Array
    plateau_best: Array = field(init=False)
    plateau_wait: Array = field(init=False)
    best: Array = field(init=False)
    best_epoch: Array = field(init=False)
    wait: Array = field(init=False)
    epochs: Array = field(init=False)
    retries: Array = field(init=False)
    active: Array = field(init=False)

    def __post_init__(self) -> None:
        replicas = len(self.learning_rate)
        for name in ("plateau_wait", "best_epoch", "wait", "epochs", "retries"):
            setattr(self, name, np.zeros(replicas))
        for name in ("plateau_best", "best"):
            setattr(self, name, np.full(replicas, np.inf))
        self.active = np.ones(replicas)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields as tensors, for a checkpoint."""
        return {item.name: torch.from_numpy(getattr(self, item.name).copy()) for item in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """Return the control that `tensors` describes."""
        control = cls(tensors["learning_rate"].numpy().copy())
        for item in fields(cls):
            setattr(control, item.name, tensors[item.name].numpy().copy())
        return control

    def keep(self, before: Self, done: Mask) -> None:
        """Take over the replicas that are done from an earlier attempt, and stop them."""
        for item in fields(self):
            getattr(self, item.name)[done] = getattr(before, item.name)[done]
        self.active[done] = 0

    def judge(
        self,
        settings: TrainingSettings,
        epoch: int,
        plain: Array,
        watched: Array,
        broken: Mask,
        first_eligible: int,
        warmup: int,
    ) -> Mask:
        """Lower learning rates and stop replicas after an epoch; return the mask of replicas with a new best loss.

        `plain` is the loss watched for plateaus, `watched` the one for early stopping, which waits for the end of the
        KL warm-up. A `broken` replica is skipped.
        """
        before = Control.from_tensors(self.tensors())
        if settings.schedule == "plateau":
            self.plateau(plain, settings.plateau_patience)
        improved = self.early_stop(
            watched,
            epoch,
            settings.early_stop,
            eligible=epoch >= min(first_eligible, settings.epochs - 1),
            counting=epoch >= max(warmup, first_eligible),
        )
        for name in ("learning_rate", "plateau_best", "plateau_wait", "best", "best_epoch", "wait", "active"):
            getattr(self, name)[broken] = getattr(before, name)[broken]
        return improved & ~broken

    def plateau(self, watched: Array, patience: int) -> None:
        """Halve the rate of replicas whose `watched` loss has not fallen for more than `patience` epochs."""
        better = watched < self.plateau_best - PLATEAU_THRESHOLD * np.nan_to_num(np.abs(self.plateau_best), posinf=0.0)
        self.plateau_best = np.where(better, watched, self.plateau_best)
        self.plateau_wait = np.where(better, 0, self.plateau_wait + 1)
        late = self.plateau_wait > patience
        self.learning_rate = np.where(late, self.learning_rate * PLATEAU_FACTOR, self.learning_rate)
        self.plateau_wait = np.where(late, 0, self.plateau_wait)

    def early_stop(self, loss: Array, epoch: int, patience: int, *, eligible: bool, counting: bool) -> Mask:
        """Record an epoch's validation loss; return the mask of replicas with a new best snapshot.

        A replica stops once more than `patience` epochs passed without a new best one.
        """
        active = self.active > 0
        improved = active & (loss < self.best) & eligible
        self.best = np.where(improved, loss, self.best)
        self.best_epoch = np.where(improved, epoch, self.best_epoch)
        self.wait = np.where(improved, 0, self.wait + (active & counting))
        self.epochs = np.where(active, epoch + 1, self.epochs)
        self.active = np.where(self.wait > patience, 0, self.active)
        return improved

    def diverged(self, replica: int) -> bool:
        """Record a divergence: halve the rate, or give up after two retries. Return whether training continues."""
        self.retries[replica] += 1
        if self.retries[replica] > MAX_RETRIES:
            self.active[replica] = 0
            return False
        self.learning_rate[replica] *= 0.5
        return True


@dataclass
class TaskProgress:
    """The progress of a task; tensors have a leading replica axis."""

    #: The model before the task: a resumed run begins the task again from it, then loads the rest.
    start: dict[str, Tensor]
    #: The best snapshot of what is restored together: the model, and the tensors that methods track.
    best: dict[str, Tensor]
    control: Control
    moments: Moments
    #: Sums of the loss terms of the epoch.
    totals: dict[str, Tensor] = field(default_factory=dict)
    epoch: int = 0
    #: Blocks of steps done in the epoch.
    block: int = 0
    #: 1 while collapsed replicas learn the task once more.
    attempt: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, for a checkpoint."""
        first, second, steps = self.moments
        named = {"start": self.start, "best": self.best, "first": first, "second": second, "totals": self.totals}
        groups = {**named, "control": self.control.tensors()}
        return {"steps": steps} | {f"{key}/{name}": part for key, own in groups.items() for name, part in own.items()}

    def load(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Load the saved progress into a task that was begun again from its start."""
        count, (first, second, steps) = self.control.learning_rate.shape, self.moments
        self.control = Control.from_tensors(group(tensors, "control"))
        for name, values in self.control.tensors().items():
            check(f"control/{name}", tuple(values.shape), values.shape == count)
        put({"steps": steps}, tensors)
        for name, places in {"first": first, "second": second, "best": self.best}.items():
            put(places, group(tensors, name))
        saved = group(tensors, "totals")
        self.totals.update({name: torch.empty_like(steps) for name in saved})
        put(self.totals, saved)
        self.epoch, self.block, self.attempt = record["epoch"], record["block"], record.get("attempt", 0)

    def take_snapshot(self, chosen: Mask, current: dict[str, Tensor]) -> None:
        """Store the current state of the chosen replicas as their best."""
        if chosen.any():
            mask = torch.from_numpy(chosen).to(self.moments.steps.device)
            for name, tensor in current.items():
                axes = mask.view(-1, *[1] * (tensor.dim() - 1))
                self.best[name] = torch.where(axes, tensor, self.best[name])

    def put_back(self, current: dict[str, Tensor], replica: int | None = None) -> None:
        """Restore the best snapshot of one replica, or of all."""
        rows = slice(None) if replica is None else replica
        for name, tensor in current.items():
            tensor[rows] = self.best[name][rows]
