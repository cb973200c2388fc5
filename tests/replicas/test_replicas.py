from __future__ import annotations

import pytest
import torch
from torch import Tensor

from boovae.model.likelihoods import Bernoulli
from boovae.model.nets import make_nets
from boovae.model.priors import NormalPrior, VampPrior
from boovae.model.vae import VAE, Bound
from boovae.replicas import stacked as module
from boovae.replicas.randomness import seed_for
from boovae.replicas.stacked import Replicas, replica_of

CPU = torch.device("cpu")
PIXELS, LATENT = 12, 3
SEEDS = (4, 5, 9)


def build() -> VAE:
    nets = make_nets("mlp:16", (PIXELS,), LATENT, (-6.0, 2.0))
    return VAE(*nets, Bernoulli(), NormalPrior(LATENT), LATENT)


def build_vamp() -> VAE:
    nets = make_nets("mlp:16", (PIXELS,), LATENT, (-6.0, 2.0))
    return VAE(*nets, Bernoulli(), VampPrior(4, PIXELS), LATENT)


def alone(seed: int) -> VAE:
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(seed, "weights"))
        return build()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(len(SEEDS), 7, PIXELS, generator=generator)
    return x, torch.randn(len(SEEDS), 7, LATENT, generator=generator)


def test_replicas_equal_the_modules_built_alone_with_the_same_seeds(way: str) -> None:
    replicas = Replicas(build, SEEDS, CPU)
    assert replicas.stacked == (way == "stacked")
    x, noise = inputs()
    bound: Bound = replicas.map(VAE.bound, x, noise)
    assert bound.reconstruction.shape == bound.kl.shape == (3, 7)
    for r, seed in enumerate(SEEDS):
        expected = alone(seed).bound(x[r], noise[r])
        torch.testing.assert_close(bound.reconstruction[r], expected.reconstruction, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(bound.kl[r], expected.kl, rtol=1e-5, atol=1e-5)


def test_stacked_and_looped_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(build_vamp, SEEDS, CPU)
    x, noise = inputs()

    def everything(model: VAE, x: Tensor, noise: Tensor) -> dict[str, object]:
        return {"bound": model.bound(x, noise), "nested": [model.images(noise), (model.posterior(x).mean,)]}

    stacked = replicas.map(everything, x, noise)
    monkeypatch.setattr(module, "STACK_LIMIT", 0)
    assert not replicas.stacked
    torch.testing.assert_close(replicas.map(everything, x, noise), stacked, rtol=1e-5, atol=1e-5)


def test_replicas_start_from_different_weights() -> None:
    replicas = Replicas(build, SEEDS, CPU)
    weight = replicas.parameters["encoder.body.0.weight"]
    assert weight.shape == (3, 16, PIXELS)
    assert not torch.equal(weight[0], weight[1])


def test_weights_of_a_replica_depend_on_its_seed_alone() -> None:
    together, single = Replicas(build, SEEDS, CPU), Replicas(build, SEEDS[2:], CPU)
    for name, tensor in replica_of(together.tensors(), 2).items():
        assert torch.equal(tensor, single.tensors()[name][0])


def test_initialise_is_repeatable() -> None:
    replicas = Replicas(build, SEEDS, CPU)
    before = {name: tensor.clone() for name, tensor in replicas.tensors().items()}
    for tensor in replicas.parameters.values():
        tensor.add_(1)
    torch.rand(5)
    replicas.initialise()
    for name, tensor in replicas.tensors().items():
        assert torch.equal(tensor, before[name])


def test_initialise_does_not_touch_the_global_random_state() -> None:
    torch.manual_seed(12345)  # not where an earlier test may have left it
    before = torch.get_rng_state()
    Replicas(build, SEEDS, CPU).initialise()
    assert torch.equal(torch.get_rng_state(), before)


def test_changing_one_replica_leaves_the_others_bit_for_bit(way: str) -> None:
    replicas = Replicas(build, SEEDS, CPU)
    x, noise = inputs()
    before = replicas.map(VAE.bound, x, noise).reconstruction
    for tensor in replicas.parameters.values():
        tensor[1] = torch.nan
    x[1] = 0.5
    after = replicas.map(VAE.bound, x, noise).reconstruction
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_results_follow_the_stacked_tensors_not_the_template(way: str) -> None:
    replicas = Replicas(build, SEEDS, CPU)
    x, noise = inputs()
    before = replicas.map(VAE.bound, x, noise).reconstruction
    with torch.no_grad():
        for parameter in replicas.model.parameters():
            parameter.fill_(7.0)
    assert torch.equal(replicas.map(VAE.bound, x, noise).reconstruction, before)


def test_size_counts_the_parameters_of_one_replica() -> None:
    replicas = Replicas(build, SEEDS, CPU)
    assert len(replicas) == 3
    assert replicas.size == sum(parameter.numel() for parameter in alone(0).parameters())


def test_large_networks_are_not_stacked_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(build, SEEDS, CPU)
    monkeypatch.setattr(module, "STACK_LIMIT", replicas.size)
    assert replicas.stacked
    monkeypatch.setattr(module, "STACK_LIMIT", replicas.size - 1)
    assert not replicas.stacked


def test_one_replicas_tensors_can_be_called_by_themselves() -> None:
    replicas = Replicas(build, SEEDS, CPU)
    x, _ = inputs()
    mean = replicas.call(replica_of(replicas.tensors(), 1), VAE.posterior, x[1]).mean
    torch.testing.assert_close(mean, alone(SEEDS[1]).posterior(x[1]).mean)
