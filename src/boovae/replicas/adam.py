"""Adam with a learning rate per replica."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

Several = Sequence[Tensor]
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Moments(NamedTuple):
    """Running means of the gradients and of their squares, {name: (R, ...)}, and the steps taken (R,)."""

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    steps: Tensor

    @classmethod
    def zeros(cls, parameters: Mapping[str, Tensor]) -> Self:
        """Return the moments of stacked parameters before the first step."""
        first, second = ({name: torch.zeros_like(tensor) for name, tensor in parameters.items()} for _ in range(2))
        some = next(iter(first.values()))
        return cls(first, second, torch.zeros(len(some), device=some.device))

    def forget(self, replica: int) -> None:
        """Reset one replica to the state before the first step."""
        for tensor in (*self.first.values(), *self.second.values(), self.steps):
            tensor[replica] = 0


def adam_step(
    parameters: Several, gradients: Several, first: Several, second: Several, rate: Tensor, steps: Tensor
) -> None:
    """Take one step of Adam (Kingma and Ba, 2015) in place.

    `rate` and `steps` (steps done, including this one) have the leading axes that the parameters share: (R,) for
    stacked replicas, () for one. Bias correction is folded into rate and epsilon.
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
