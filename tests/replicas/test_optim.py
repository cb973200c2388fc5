from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from boovae.replicas.adam import adam_step
from boovae.training.task_progress import Control

RATES = (1e-2, 3e-4, 0.1)
SHAPES = ((4, 3), (5,), ())


def gradients(step: int, replicas: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of very different sizes, some of them zero: epsilon and bias correction both matter."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(replicas, *shape, generator=generator).to(dtype) for shape in SHAPES]
    drawn[0][:, 0] *= 1e-9
    drawn[0][:, 1] = 0
    drawn[1] *= 1e3
    return drawn


def start(replicas: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(replicas, *shape, generator=generator).to(dtype) for shape in SHAPES]


def torch_adam(replica: int, rate: float, replicas: int, dtype: torch.dtype) -> Iterator[list[Tensor]]:
    parameters = [nn.Parameter(tensor[replica].clone()) for tensor in start(replicas, dtype)]
    optimiser = torch.optim.Adam(parameters, lr=rate)
    for step in range(50):
        for parameter, gradient in zip(parameters, gradients(step, replicas, dtype), strict=True):
            parameter.grad = gradient[replica].clone()
        optimiser.step()
        yield [parameter.detach().clone() for parameter in parameters]


# --- Adam -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_adam_of_stacked_replicas_with_their_own_rates_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    replicas = len(RATES)
    parameters = start(replicas, dtype)
    first, second = ([torch.zeros_like(tensor) for tensor in parameters] for _ in range(2))
    rate, steps = torch.tensor(RATES, dtype=dtype), torch.zeros(replicas, dtype=dtype)
    expected = [torch_adam(replica, rate, replicas, dtype) for replica, rate in enumerate(RATES)]
    for step, truth in enumerate(zip(*expected, strict=True)):
        before = [tensor.clone() for tensor in parameters]
        steps += 1
        adam_step(parameters, gradients(step, replicas, dtype), first, second, rate, steps)
        assert not all(torch.equal(*pair) for pair in zip(before, parameters, strict=True))
        for replica, tensors in enumerate(truth):
            for ours, theirs in zip(parameters, tensors, strict=True):
                # One step moves a weight by about its rate: that is what an error is measured against.
                torch.testing.assert_close(ours[replica], theirs, rtol=1e-6, atol=tolerance * RATES[replica])
    assert steps.tolist() == [50.0] * replicas


def test_adam_of_one_replica_equals_torch() -> None:
    parameters = [tensor[0].clone() for tensor in start(1, torch.float64)]
    first, second = ([torch.zeros_like(tensor) for tensor in parameters] for _ in range(2))
    rate = torch.tensor(5e-4, dtype=torch.float64)
    for step, truth in enumerate(torch_adam(0, 5e-4, 1, torch.float64)):
        steps = torch.tensor(step + 1.0, dtype=torch.float64)
        adam_step(parameters, [g[0] for g in gradients(step, 1, torch.float64)], first, second, rate, steps)
        for ours, theirs in zip(parameters, truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_adam_counts_the_steps_of_each_replica() -> None:
    # A replica that starts anew (steps 1, no moments) takes the full first step, its neighbour goes on.
    parameters, gradient = [torch.zeros(2, 3)], [torch.ones(2, 3)]
    first, second = [torch.zeros(2, 3)], [torch.zeros(2, 3)]
    adam_step(parameters, gradient, first, second, torch.full((2,), 0.1), torch.tensor([1.0, 1000.0]))
    assert parameters[0][0].tolist() == pytest.approx([-0.1] * 3, rel=1e-4)
    # No bias correction is left after 1000 steps: 0.1 * 0.1 / sqrt(0.001 / (1 - 0.999^1000)).
    expected = -0.1 * 0.1 / np.sqrt(0.001 / (1 - 0.999**1000))
    assert parameters[0][1].tolist() == pytest.approx([expected] * 3, rel=1e-4)


def test_a_broken_gradient_stays_in_its_replica() -> None:
    parameters, gradient = [torch.zeros(2, 3)], [torch.ones(2, 3)]
    gradient[0][0] = torch.nan
    first, second = [torch.zeros(2, 3)], [torch.zeros(2, 3)]
    adam_step(parameters, gradient, first, second, torch.full((2,), 0.1), torch.ones(2))
    assert parameters[0][0].isnan().all()
    assert parameters[0][1].isfinite().all()


# --- the plateau rule -----------------------------------------------------------------------------------------------

# Steps around the relative threshold of 1e-4, so that some improvements are too small to count.
changes = st.lists(st.sampled_from([-1e-2, -2e-4, -5e-5, 0.0, 5e-5, 1e-2]), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.floats(1.0, 1000.0), changes), min_size=1, max_size=3), patience=st.integers(1, 4)
)
def test_plateau_rule_equals_torch(sequences: list[tuple[float, list[float]]], patience: int) -> None:
    length = min(len(steps) for _, steps in sequences)
    losses = np.array([level * np.cumprod(1 + np.array(steps[:length])) for level, steps in sequences])
    optimisers = [torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in losses]
    schedulers = [ReduceLROnPlateau(optimiser, factor=0.5, patience=patience) for optimiser in optimisers]
    control = Control(np.full(len(losses), 0.1))
    for epoch in range(length):
        control.plateau(losses[:, epoch], patience)
        for loss, scheduler in zip(losses[:, epoch], schedulers, strict=True):
            scheduler.step(float(loss))
        rates = [optimiser.param_groups[0]["lr"] for optimiser in optimisers]
        np.testing.assert_allclose(control.learning_rate, rates, rtol=1e-12)


def test_plateau_rule_lowers_the_rate_of_the_late_replica_only() -> None:
    control = Control(np.array([0.1, 0.1]))
    for epoch in range(8):
        control.plateau(np.array([100.0, 100.0 - epoch]), patience=2)
    # Epoch 0 sets the best; three more without improvement halve the rate, then three more.
    assert control.learning_rate.tolist() == [0.025, 0.1]


def test_losses_below_zero_improve_when_they_fall() -> None:
    # Colour images can have positive log-densities; torch's relative threshold would take steps back for progress.
    control = Control(np.array([0.1, 0.1]))
    for epoch in range(8):
        control.plateau(np.array([-100.0 + 1e-3 * epoch, -100.0 - epoch]), patience=2)
    assert control.learning_rate.tolist() == [0.025, 0.1]


# --- early stopping -------------------------------------------------------------------------------------------------


def note(control: Control, losses: list[float], epoch: int, patience: int = 3, **rules: bool) -> list[bool]:
    chosen = {"eligible": True, "counting": True} | rules
    improved = control.early_stop(np.array(losses), epoch, patience, **chosen)
    return [bool(value) for value in improved]


@pytest.mark.parametrize("patience", [1, 3, 10])
def test_a_replica_stops_after_patience_and_one_epochs_without_a_new_best(patience: int) -> None:
    control = Control(np.array([0.1]))
    assert note(control, [5.0], 0, patience) == [True]
    for epoch in range(1, patience + 1):
        assert note(control, [5.0], epoch, patience) == [False]
        assert control.active.tolist() == [1]
    note(control, [5.0], patience + 1, patience)
    assert control.active.tolist() == [0]
    assert control.best_epoch.tolist() == [0]
    assert control.epochs.tolist() == [patience + 2]


def test_a_new_best_resets_the_patience() -> None:
    control = Control(np.array([0.1]))
    for epoch, loss in enumerate([5.0, 6.0, 6.0, 6.0, 4.999999, 6.0, 6.0, 6.0]):
        note(control, [loss], epoch)
    assert control.active.tolist() == [1]
    assert control.best_epoch.tolist() == [4]
    note(control, [6.0], 8)
    assert control.active.tolist() == [0]


def test_a_stopped_replica_keeps_its_best_while_the_others_go_on() -> None:
    control = Control(np.array([0.1, 0.1]))
    note(control, [5.0, 5.0], 0)
    for epoch in range(1, 5):
        note(control, [6.0, 5.0 - epoch], epoch)
    assert control.active.tolist() == [0, 1]
    assert note(control, [1.0, 0.5], 5) == [False, True]
    assert note(control, [0.1, 0.6], 6) == [False, False]
    assert control.best.tolist() == [5.0, 0.5]
    assert control.best_epoch.tolist() == [0, 5]
    assert control.epochs.tolist() == [5, 7]
    assert control.active.tolist() == [0, 1]


def test_epochs_that_are_not_eligible_are_never_the_best() -> None:
    control = Control(np.array([0.1]))
    assert note(control, [1.0], 0, eligible=False, counting=False) == [False]
    assert control.best.tolist() == [np.inf]
    assert note(control, [9.0], 1) == [True]
    assert control.best.tolist() == [9.0]
    assert control.best_epoch.tolist() == [1]


def test_epochs_that_do_not_count_do_not_stop_a_replica() -> None:
    control = Control(np.array([0.1]))
    note(control, [1.0], 0)
    for epoch in range(1, 20):
        note(control, [2.0], epoch, counting=False)
    assert control.active.tolist() == [1]
    # A better epoch is kept all the same.
    assert note(control, [0.5], 20, counting=False) == [True]


def test_a_nan_loss_is_never_the_best() -> None:
    control = Control(np.array([0.1]))
    assert note(control, [float("nan")], 0) == [False]
    assert note(control, [3.0], 1) == [True]
    assert note(control, [float("nan")], 2) == [False]
    assert control.best.tolist() == [3.0]


# --- divergence -----------------------------------------------------------------------------------------------------


def test_a_diverging_replica_is_halved_twice_and_then_given_up() -> None:
    control = Control(np.array([0.1, 0.1, 0.1]))
    assert [control.diverged(1) for _ in range(3)] == [True, True, False]
    assert control.learning_rate.tolist() == [0.1, 0.025, 0.1]
    assert control.active.tolist() == [1, 0, 1]
    assert control.retries.tolist() == [0, 3, 0]


# --- across restarts ------------------------------------------------------------------------------------------------


def test_control_continues_the_same_after_a_checkpoint() -> None:
    losses = np.random.default_rng(0).normal(100, 5, size=(40, 3))

    def go(control: Control, epochs: range) -> Control:
        for epoch in epochs:
            control.plateau(losses[epoch], 2)
            control.early_stop(losses[epoch], epoch, 12, eligible=epoch > 2, counting=epoch > 4)
        return control

    straight = go(Control(np.array([0.1, 0.2, 0.3])), range(40))
    half = go(Control(np.array([0.1, 0.2, 0.3])), range(13))
    half.diverged(2)
    straight_again = Control.from_tensors(half.tensors())
    assert straight_again.retries.tolist() == [0, 0, 1]
    resumed = go(Control.from_tensors(go(Control(np.array([0.1, 0.2, 0.3])), range(13)).tensors()), range(13, 40))
    for name, tensor in straight.tensors().items():
        torch.testing.assert_close(resumed.tensors()[name], tensor, rtol=0, atol=0)


def test_a_snapshot_of_the_control_does_not_follow_it() -> None:
    control = Control(np.array([0.1]))
    tensors = control.tensors()
    copy = Control.from_tensors(tensors)
    control.diverged(0)
    assert tensors["learning_rate"].tolist() == copy.learning_rate.tolist() == [0.1]
    copy.diverged(0)
    assert tensors["retries"].tolist() == [0]
