"""The flow prior: invertible, its determinants right, the same as `boo` without a flow, and held at old components."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from boovae.data import Stream
from boovae.errors import InputError
from boovae.methods import make_method
from boovae.methods.boo_flow import _moved
from boovae.metrics.likelihood import log_likelihood
from boovae.model.distributions import DiagonalNormal
from boovae.model.priors.flow import Flow, FlowPrior, Pushed
from boovae.runs.inspection import components
from boovae.training.trainer import Trainer
from conftest import Recorder, tiny, trained


def bent(latent_dim: int = 5, layers: int = 3, strength: float = 0.5) -> Flow:
    """A flow that is far from the identity."""
    torch.manual_seed(0)
    flow = Flow(latent_dim, layers, 16)
    for parameter in flow.parameters():
        torch.nn.init.normal_(parameter, std=strength)
    return flow


@pytest.mark.parametrize(("latent_dim", "layers"), [(2, 1), (5, 3), (4, 4), (3, 0)])
def test_a_flow_is_inverted_exactly(latent_dim: int, layers: int, float64: None) -> None:
    flow, v = bent(latent_dim, layers), torch.randn(50, latent_dim)
    z, log_det = flow(v)
    back, opposite = flow.inverse(z)
    torch.testing.assert_close(back, v)
    torch.testing.assert_close(opposite, -log_det)
    if layers:
        assert (z - v).abs().mean() > 0.1


def test_the_log_determinant_is_that_of_the_jacobian(float64: None) -> None:
    flow = bent()
    for v in torch.randn(5, 5):
        jacobian = torch.autograd.functional.jacobian(lambda v: flow(v)[0], v)
        torch.testing.assert_close(flow(v)[1], torch.linalg.slogdet(jacobian)[1])
        inverse = torch.autograd.functional.jacobian(lambda z: flow.inverse(z)[0], v)
        torch.testing.assert_close(flow.inverse(v)[1], torch.linalg.slogdet(inverse)[1])


def test_every_latent_is_moved_by_two_couplings(float64: None) -> None:
    flow, v = bent(5, 2), torch.randn(5)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v)[0], v)
    assert ((jacobian - torch.eye(5)).abs().amax(1) > 1e-3).all()


def test_the_density_behind_a_flow_adds_up_to_one(float64: None) -> None:
    """By quadrature in the plane; and samples have that density: their mean is its mean."""
    flow = bent(2, 3, strength=0.25)
    density = Pushed(DiagonalNormal(torch.zeros(2), torch.full((2,), -1.0)), flow)  # type: ignore[arg-type]
    line = torch.linspace(-12, 12, 1000)
    z = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
    cell = float(line[1] - line[0]) ** 2
    mass = density.log_prob(z).exp() * cell
    assert mass.sum().item() == pytest.approx(1, abs=0.01)
    drawn = flow(DiagonalNormal(torch.zeros(2), torch.full((2,), -1.0)).rsample(torch.randn(40_000, 2)))[0]
    torch.testing.assert_close(drawn.mean(0), (mass.unsqueeze(2) * z).sum((0, 1)), rtol=0, atol=0.05)


def test_without_couplings_it_is_boo(digits: Stream) -> None:
    """All tasks, all replicas: the same networks, the same components, the same likelihood."""
    plain, flow = trained(tiny(method="boo"), digits), trained(tiny(method="boo-flow", flow_layers=0), digits)
    for name, tensor in plain.replicas.tensors().items():
        torch.testing.assert_close(flow.replicas.tensors()[name], tensor, rtol=0, atol=1e-5)
    images = digits[1].test.images
    one, other = (log_likelihood(trainer.replicas, images, 50).log_prob for trainer in (plain, flow))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_flow_that_may_not_learn_stays_boo(digits: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts as the identity; with its gradient cut off the first task is that of `boo`."""

    def still(flow: Flow, v: Tensor) -> tuple[Tensor, Tensor]:
        return v + 0 * sum(parameter.sum().detach() for parameter in flow.parameters()), torch.zeros_like(v[..., 0])

    monkeypatch.setattr(Flow, "forward", still)
    monkeypatch.setattr(Flow, "inverse", still)
    plain, flow = trained(tiny(method="boo", tasks=1), digits), trained(tiny(method="boo-flow", tasks=1), digits)
    for name, tensor in plain.replicas.tensors().items():
        torch.testing.assert_close(flow.replicas.tensors()[name], tensor, rtol=0, atol=1e-5)


def test_the_flow_learns_with_the_networks_and_is_held_at_old_components(digits: Stream) -> None:
    def drift(strength: float) -> tuple[float, float]:
        settings = tiny(method="boo-flow", tasks=2, epochs=12, flow_drift=strength, learning_rate=5e-3)
        trainer = Trainer(settings, digits.spec)
        trainer.learn(digits[0], Recorder())
        prior = trainer.replicas.model.prior
        assert isinstance(prior, FlowPrior)
        v = trainer.method.memory()["mean"][:, 0]
        before: Tensor = trainer.replicas.map(_moved, v)
        recorder = Recorder()
        trainer.learn(digits[1], recorder)
        after: Tensor = trainer.replicas.map(_moved, v)
        last = [event for event in recorder.events if event["event"] == "epoch"][-1]
        assert "drift" in last["train"]
        return (before - v).abs().mean().item(), (after - before).square().sum(-1).mean().item()

    moved, free = drift(0.0)
    assert moved > 1e-3  # the flow of the first task is not the identity any more
    assert drift(1000.0)[1] < 0.2 * free


def test_components_are_shown_where_the_flow_takes_them(digits: Stream) -> None:
    trainer = trained(tiny(method="boo-flow", tasks=1, learning_rate=1e-2), digits)
    found = [one for one in components(trainer, 0) if one.task == 0]
    tensors = {name: tensor[0] for name, tensor in trainer.replicas.tensors().items()}
    mean = trainer.method.memory()["mean"][0, 0]

    def images(model: Any) -> Tensor:
        decoded: Tensor = model.images(model.prior.flow(mean)[0])
        return decoded

    truth = trainer.replicas.call(tensors, images)
    for one in found:
        torch.testing.assert_close(one.decoded, truth[one.place], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boo_objective": "literal"}, "boo_objective='corrective'"),
        ({"boo_weights": "bisection"}, "boo_weights='em'"),
        ({"boo_target": "full"}, "boo_target='current'"),
        ({"boo_lambda": 1.0}, "boo_lambda=0"),
        ({"latent_dim": 1}, "latent_dim is 1; it must be at least 2 for a flow"),
        ({"method": "boo-flow+multihead"}, "one flow cannot follow"),
    ],
)
def test_settings_that_do_not_fit_a_flow_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_method(tiny(method="boo-flow").changed(**changes))


def test_the_greedy_forward_objective_works_behind_a_flow(digits: Stream) -> None:
    trainer = trained(tiny(method="boo-flow+distill", boo_objective="forward", tasks=2, epochs=7), digits)
    weights = trainer.method.memory()["boo-flow.log_weights"].exp()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2))
    assert all(tensor.isfinite().all() for tensor in trainer.replicas.tensors().values())
