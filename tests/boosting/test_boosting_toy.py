"""Twelve Gaussians by two components: what each objective finds, and the one that runs away."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from boovae.boosting.losses import component_log_probs, forward_loss, literal_loss, with_floor
from boovae.boosting.weights import em_weights
from boovae.model.distributions import DiagonalMixture, DiagonalNormal
from boovae.replicas.descent import Descent
from conftest import in_torch


def twelve_gaussians() -> DiagonalMixture:
    """Equal weights, standard deviation 0.35; six means on a circle of radius 0.8 around (2, 0), six around (−2, 0)."""
    angle = torch.arange(6) * math.pi / 3
    circle = 0.8 * torch.stack([angle.cos(), angle.sin()], 1)
    mean = torch.cat([circle + torch.tensor([2.0, 0.0]), circle - torch.tensor([2.0, 0.0])])
    return DiagonalMixture(torch.zeros(12).log_softmax(0), mean, torch.full((12, 2), 2 * math.log(0.35)))


def drawn(density: DiagonalMixture, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return density.sample(torch.rand(count, generator=generator), torch.randn(count, 2, generator=generator))


class Toy:
    """Two free Gaussians fitted to the twelve, one after the other: the second beside the learned first.

    The first is learned by the literal objective against a flat mixture from a start near the right-hand group, and
    covers that group; the second starts near the other group. Weights come from EM on samples of the target.
    """

    steps = 150

    def __init__(self) -> None:
        self.target = twelve_gaussians()
        self.noise = torch.randn(1, self.steps, 32, 2, generator=torch.Generator().manual_seed(0))
        flat = DiagonalMixture(torch.zeros(1), torch.zeros(1, 2), torch.full((1, 2), 20.0))
        self.first = self.by_literal_objective(flat, start=1.0)
        self.mixture = DiagonalMixture(torch.zeros(1), *self.first)

    def by_literal_objective(
        self, mixture: DiagonalMixture, start: float = -1.0, box: float | None = None
    ) -> DiagonalNormal:
        """One more component (1, 2); `box` limits its mean as the pixels' box limits what an encoder can say."""

        def loss(learned: list[Tensor], arguments: Any, noise: Tensor) -> Tensor:
            return literal_loss(DiagonalNormal(*learned), noise, *arguments)

        arguments = [DiagonalMixture(*(part.unsqueeze(0) for part in one)) for one in (self.target, mixture)]
        begin = [torch.tensor([[start, 0.5]]), torch.zeros(1, 2)]
        limits = None if box is None else (-box, box)
        return DiagonalNormal(*Descent(loss, limits)(begin, arguments, steps=self.steps, rate=0.1, noise=self.noise))

    def by_forward_objective(self) -> DiagonalNormal:
        def loss(learned: list[Tensor], arguments: Any, noise: Tensor) -> Tensor:
            return forward_loss(DiagonalNormal(*learned[:2]), learned[2], *arguments)

        z = drawn(self.target, 2000, seed=1)
        begin = [torch.tensor([[-1.0, 0.5]]), torch.zeros(1, 2), torch.zeros(1)]
        arguments = (z.unsqueeze(0), self.mixture.log_prob(z).unsqueeze(0))
        return DiagonalNormal(*Descent(loss, None)(begin, arguments, steps=self.steps, rate=0.1)[:2])

    def divergence(self, second: DiagonalNormal) -> float:
        """KL[target ‖ both components], on samples that no fit has seen."""
        both = DiagonalNormal(*(torch.cat(parts) for parts in zip(self.first, second, strict=True)))
        log_components = component_log_probs(both, drawn(self.target, 2000, seed=1))
        log_weights = em_weights(log_components, torch.zeros(2).log_softmax(0))
        z = drawn(self.target, 20_000, seed=2)
        ratio: Tensor = in_torch(self.target).log_prob(z) - DiagonalMixture(log_weights, *both).log_prob(z)
        return ratio.mean().item()


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


def test_the_first_component_of_the_toy_covers_one_group(toy: Toy) -> None:
    torch.testing.assert_close(toy.first.mean, torch.tensor([[2.0, 0.0]]), rtol=0, atol=0.3)
    alone = DiagonalNormal(toy.first.mean, toy.first.log_variance)
    assert toy.divergence(alone) > 5


def test_the_forward_objective_finds_the_other_group(toy: Toy) -> None:
    second = toy.by_forward_objective()
    torch.testing.assert_close(second.mean, torch.tensor([[-2.0, 0.0]]), rtol=0, atol=0.1)
    assert toy.divergence(second) < 0.2


def test_the_literal_objective_with_a_floor_finds_the_other_group(toy: Toy) -> None:
    second = toy.by_literal_objective(with_floor(toy.mixture, toy.target, 0.05))
    torch.testing.assert_close(second.mean, torch.tensor([[-2.0, 0.0]]), rtol=0, atol=0.4)
    assert toy.divergence(second) < 0.25


def test_the_literal_objective_alone_runs_away_from_the_data(toy: Toy) -> None:
    """The log of 1/r grows the farther the component goes; this is why the floor and the box exist."""
    second = toy.by_literal_objective(toy.mixture)
    outermost = -2.8  # the farthest mean; data beyond −4 are as good as impossible
    assert second.mean[0, 0].item() < outermost - 5 * 0.35
    assert toy.divergence(second) > 3


def test_a_box_stops_the_runaway(toy: Toy) -> None:
    second = toy.by_literal_objective(toy.mixture, box=2.5)
    assert second.mean[0, 0].item() == -2.5  # it would go on
    assert toy.divergence(second) < 1
