"""Adam with a learning rate per replica, and the rules that lower the rate, stop and recover each replica."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
PLATEAU_FACTOR = 0.5
PLATEAU_THRESHOLD = 1e-4
MAX_RETRIES = 2

Array = npt.NDArray[np.float64]


def adam_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    rate: Tensor,
    steps: Tensor,
) -> None:
    """One step of Adam (Kingma and Ba, 2015) in place.

    `rate` and `steps` (steps done, this one included) have the leading axes that the parameters share: (R,) for stacked
    replicas, () for one. Bias correction is folded into rate and epsilon.
    """
    correction1, correction2 = (-torch.expm1(steps * math.log(beta)) for beta in (BETA1, BETA2))  # 1 − β^steps, exactly
    root = correction2.sqrt()
    scaled_rate, scaled_epsilon = rate * root / correction1, EPSILON * root
    for parameter, gradient, mean, square in zip(parameters, gradients, first, second, strict=True):
        axes = (...,) + (None,) * (parameter.dim() - rate.dim())
        mean.lerp_(gradient, 1 - BETA1)
        square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        update = square.sqrt().add_(scaled_epsilon[axes]).reciprocal_().mul_(mean).mul_(scaled_rate[axes])
        parameter.sub_(update)


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
        self.plateau_best = np.full(replicas, np.inf)
        self.best = np.full(replicas, np.inf)
        self.active = np.ones(replicas)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields as tensors, for a checkpoint."""
        return {item.name: torch.from_numpy(getattr(self, item.name).copy()) for item in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Control:
        """Return the control that `tensors` describes."""
        control = cls(tensors["learning_rate"].numpy().copy())
        for item in fields(cls):
            setattr(control, item.name, tensors[item.name].numpy().copy())
        return control

    def plateau(self, watched: Array, patience: int) -> None:
        """Halve the rate of replicas whose `watched` loss has not fallen for more than `patience` epochs."""
        better = watched < self.plateau_best - PLATEAU_THRESHOLD * np.abs(
            self.plateau_best, where=np.isfinite(self.plateau_best), out=np.zeros_like(self.plateau_best)
        )
        self.plateau_best = np.where(better, watched, self.plateau_best)
        self.plateau_wait = np.where(better, 0, self.plateau_wait + 1)
        late = self.plateau_wait > patience
        self.learning_rate = np.where(late, self.learning_rate * PLATEAU_FACTOR, self.learning_rate)
        self.plateau_wait = np.where(late, 0, self.plateau_wait)

    def early_stop(
        self, loss: Array, epoch: int, patience: int, *, eligible: bool, counting: bool
    ) -> npt.NDArray[np.bool_]:
        """Take note of an epoch's validation loss; return which replicas have a new best snapshot.

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
        """Take note of a divergence: halve the rate, or give up after two retries. Return whether it goes on."""
        self.retries[replica] += 1
        if self.retries[replica] > MAX_RETRIES:
            self.active[replica] = 0
            return False
        self.learning_rate[replica] *= 0.5
        return True
