from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from boovae.errors import InputError
from boovae.metrics.diversity import class_terms, diversity
from boovae.metrics.evaluation import Diversity


def terms(labels: torch.Tensor, classes: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return each class's term of the divergence."""
    found = diversity(labels, classes)
    table, shares = np.atleast_1d(found.table.numpy()), np.atleast_2d(found.proportions.numpy())
    section = Diversity(table, proportions=shares, samples=labels.shape[-1])
    of_one: np.ndarray[Any, np.dtype[np.float64]] = class_terms(section)[0]
    return of_one


@pytest.mark.parametrize(("classes", "paper"), [(2, 0.69), (3, 1.10), (8, 2.08)])
def test_a_collapsed_generator_scores_log_t_as_in_the_papers_tables(classes: int, paper: float) -> None:
    labels = torch.full((1000,), classes - 1)
    result = diversity(labels, range(classes))
    assert result.table.item() == pytest.approx(math.log(classes), abs=1e-12)
    assert round(result.table.item(), 2) == paper


def test_an_even_spread_scores_zero_in_every_reading() -> None:
    result = diversity(torch.arange(7).repeat(30), range(7))
    for value in (result.table, result.uniform, result.bernoulli):
        assert value.item() == pytest.approx(0.0, abs=1e-12)
        assert value.item() >= -1e-15
    assert np.abs(terms(torch.arange(7).repeat(30), range(7))).max() < 1e-7


def test_hand_computed_case() -> None:
    # 3 of class 7 and 1 of class 2: p̂ = (3/4, 1/4); smoothed (3.5/5, 1.5/5) = (0.7, 0.3).
    result = diversity(torch.tensor([7, 2, 7, 7]), classes=(7, 2))
    assert result.proportions.tolist() == [0.75, 0.25]
    assert result.table.item() == pytest.approx(math.log(2) + 0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    uniform = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)
    assert result.uniform.item() == pytest.approx(uniform)
    # Each of the two Bernoulli terms equals the same two-outcome divergence.
    assert result.bernoulli.item() == pytest.approx(2 * uniform)
    found = terms(torch.tensor([7, 2, 7, 7]), (7, 2))
    assert found.tolist() == pytest.approx([0.5 * math.log(0.5 / 0.75), 0.5 * math.log(0.5 / 0.25)])


def test_a_missing_class_keeps_every_number_finite_and_its_term_is_clipped() -> None:
    labels = torch.zeros(100, dtype=torch.int64)
    result, found = diversity(labels, range(4)), terms(labels, range(4))
    assert found[1] == pytest.approx(0.25 * math.log(0.25 * 200))
    assert found[0] < 0 < found[1]
    even, rest = 0.25, 0.5 / 102
    first = 100.5 / 102
    assert result.uniform.item() == pytest.approx(even * math.log(even / first) + 3 * even * math.log(even / rest))

    def bernoulli(p: float) -> float:
        return even * math.log(even / p) + (1 - even) * math.log((1 - even) / (1 - p))

    assert result.bernoulli.item() == pytest.approx(bernoulli(first) + 3 * bernoulli(rest))


def test_terms_sum_to_the_divergence_where_no_class_is_rare() -> None:
    counts = torch.tensor([4000, 3000, 2000, 1000])
    share = counts / counts.sum()
    expected = (0.25 * (0.25 / share.double()).log()).sum().item()
    labels = torch.repeat_interleave(torch.arange(4), counts)
    result = diversity(labels, range(4))
    assert terms(labels, range(4)).sum() == pytest.approx(expected, rel=1e-6)
    assert result.uniform.item() == pytest.approx(expected, rel=1e-3)


def test_order_of_classes_and_samples_does_not_matter() -> None:
    labels = torch.tensor([0, 0, 1, 2, 2, 2, 2, 9])
    one = diversity(labels, [0, 1, 2, 9])
    other = diversity(labels.flip(0), [9, 2, 1, 0])
    assert one.table.item() == pytest.approx(other.table.item(), abs=1e-15)
    assert one.bernoulli.item() == pytest.approx(other.bernoulli.item())
    assert one.proportions.tolist() == other.proportions.tolist()[::-1]


def test_replicas_are_scored_apart() -> None:
    labels = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]])
    both = diversity(labels, [0, 1])
    assert both.table.shape == (2,)
    assert both.proportions.shape == (2, 2)
    for row, alone in enumerate(diversity(x, [0, 1]) for x in labels):
        assert both.table[row].item() == alone.table.item()
        assert both.uniform[row].item() == alone.uniform.item()


def test_unclassified_samples_make_only_their_replica_undefined() -> None:
    result = diversity(torch.tensor([[0, 1, -1], [0, 1, 1]]), [0, 1])
    for values in (result.table, result.uniform, result.bernoulli):
        assert values.isnan().tolist() == [True, False]
    assert result.proportions[0].isnan().all()


def test_one_class_is_never_uneven() -> None:
    result = diversity(torch.zeros(5, dtype=torch.int64), [0])
    assert (result.table.item(), result.uniform.item(), result.bernoulli.item()) == (0.0, 0.0, 0.0)


def test_perfect_generator_sits_at_the_finite_sample_floor() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (400, 1000), generator=generator)
    assert diversity(labels, range(10)).table.mean().item() == pytest.approx(9 / 2000, rel=0.1)


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (torch.tensor([0, 1]), [], "classes"),
        (torch.tensor([0, 1]), [0, 1, 1], "exactly once"),
        (torch.tensor([0, 4]), [0, 1], r"labels contain \[4\]"),
        (torch.tensor([0.0, 1.0]), [0, 1], "whole numbers"),
        (torch.zeros(3, 0, dtype=torch.int64), [0, 1], "at least one sample"),
    ],
)
def test_unusable_labels_are_named(labels: torch.Tensor, classes: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        diversity(labels, classes)
