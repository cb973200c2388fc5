"""The latent space's numbers against scikit-learn and plain counting, and the map that a run writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from boovae.data import Stream
from boovae.metrics.latent import SHOWN, codes, latent_map, principal_plane
from boovae.model.distributions import DiagonalNormal
from boovae.model.priors.boosted import EMPTY
from boovae.model.priors.flow import FlowPrior
from boovae.model.vae import VAE
from boovae.replicas.stacked import replica_of
from boovae.training.trainer import Trainer
from conftest import tiny, trained


def test_the_plane_is_that_of_scikit_learn() -> None:
    points = torch.randn(300, 7, generator=torch.Generator().manual_seed(0)).double() * torch.arange(1, 8).double()
    centre, plane, explained = principal_plane(points)
    truth = PCA(2).fit(points.numpy())
    assert np.allclose(centre, truth.mean_)
    assert np.allclose(explained, truth.explained_variance_ratio_)
    cosines = (plane.T.numpy() * truth.components_).sum(1)
    assert np.allclose(np.abs(cosines), 1.0)
    assert (plane.gather(0, plane.abs().argmax(0, keepdim=True)) > 0).all()


def test_one_dimension_has_a_flat_map() -> None:
    _, plane, explained = principal_plane(torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64))
    assert plane.tolist() == [[1.0, 0.0]]
    assert explained.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("method", ["boo", "standard", "multihead"])
def test_the_map_shows_every_task_and_every_component(digits: Stream, method: str) -> None:
    tasks = digits[:2]
    trainer = trained(tiny(method=method, epochs=2), tasks)
    posteriors = codes(trainer, tasks)
    found = latent_map(trainer, posteriors)
    assert json.loads(json.dumps(found)) == found
    assert [row["task"] for row in found["codes"]] == [0, 1]
    for task, row in zip(tasks, found["codes"], strict=True):
        assert len(row["points"]) == min(SHOWN, len(task.test.images))
    assert found["separate"] == (method == "multihead")
    assert sum(part["mass"] for part in found["components"]) == pytest.approx(1.0, abs=1e-3)
    # Every place is the projection of the latent it stands for.
    together = torch.cat([posteriors[task].mean[0] for task in (0, 1)]).double()
    centre, plane, _ = principal_plane(together)
    first = (posteriors[0].mean[0, 0].double() - centre) @ plane
    assert found["codes"][0]["points"][0] == pytest.approx(first.tolist(), abs=1e-3)
    if method == "boo":
        assert {part["task"] for part in found["components"]} == {0, 1}
        stored = trainer.replicas.buffers["prior.mean"][0, 0, 0].double()
        assert found["components"][0]["at"] == pytest.approx(((stored - centre) @ plane).tolist(), abs=1e-3)
    else:
        assert found["components"] == [
            {
                "task": None,
                "mass": 1.0,
                "at": pytest.approx((-centre @ plane).tolist(), abs=1e-3),
                "deviation": pytest.approx([1.0, 1.0], abs=1e-3),
            }
        ]


def test_the_map_shows_where_a_flow_takes_the_components(digits: Stream) -> None:
    tasks = digits[:2]
    trainer = trained(tiny(method="boo-flow", epochs=2), tasks)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in trainer.replicas.parameters.items():
        if name.startswith("prior.flow."):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    found = latent_map(trainer, posteriors := codes(trainer, tasks))
    weights = trainer.replicas.buffers["prior.log_weights"][0]
    assert [part["task"] for part in found["components"]] == [
        task for task in (0, 1) for weight in weights[task] if weight > EMPTY / 2
    ]
    assert sum(part["mass"] for part in found["components"]) == pytest.approx(1.0, abs=1e-3)
    centre, plane, _ = principal_plane(torch.cat([posteriors[task].mean[0] for task in (0, 1)]).double())

    def drawn(model: VAE) -> Tensor:
        prior = model.prior
        assert isinstance(prior, FlowPrior)
        mean, log_variance = (part[0, 0] for part in prior.stored(model.posterior))
        return prior.outward(mean + (0.5 * log_variance).exp() * torch.randn(20_000, len(mean), generator=generator))

    z = (trainer.replicas.call(replica_of(trainer.replicas.tensors(), 0), drawn).detach().double() - centre) @ plane
    spread = z.std(0).max().item()
    assert found["components"][0]["at"] == pytest.approx(z.mean(0).tolist(), abs=0.3 * spread)


def test_a_diverged_replica_has_no_map(digits: Stream) -> None:
    trainer = Trainer(tiny(), digits.spec)
    nothing = torch.full((2, 5, trainer.settings.model.latent_dim), torch.nan)
    assert latent_map(trainer, {0: DiagonalNormal(nothing, nothing)})["codes"] == []


def test_tasks_whose_images_are_gone_are_left_out(digits: Stream) -> None:
    trainer = Trainer(tiny(), digits.spec)
    assert list(codes(trainer, [None, digits[1]])) == [1]
