from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call, grad, vmap

from boovae.data import Stream
from boovae.errors import InputError
from boovae.methods import make_method
from boovae.metrics.cost import ledger
from boovae.metrics.likelihood import log_likelihood
from boovae.model.bayesian import (
    Bayesian,
    BayesianConv2d,
    bayesian_layers,
    gaussians,
    make_bayesian,
    noisy,
    recorded_shapes,
)
from boovae.model.vae import VAE
from boovae.replicas.step import Batch
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer
from conftest import Recorder, same, tiny, trained

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "linear without biases": lambda: nn.Linear(4, 3, bias=False),
    "convolution": lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1),
    "convolution in groups": lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2, padding_mode="circular"),
    "transposed convolution": lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)


def random_layer(kind: str) -> tuple[Bayesian, Tensor]:
    """Return a Bayesian layer with random means and variances, and a batch of two for it."""
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    make_bayesian(layer, -2.0)
    assert isinstance(layer, Bayesian)
    for parameter in layer.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return layer, torch.randn(2, 4) if "linear" in kind else torch.randn(2, 2, 5, 5)


def means(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("_log_variance")}


# --- the layers -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@every_layer
def test_outputs_are_distributed_as_those_of_sampled_weights(kind: str) -> None:
    layer, x = random_layer(kind)
    plain, count = LAYERS[kind](), 20_000
    samples = {
        name: normal.mean + (normal.log_variance / 2).exp() * torch.randn(count, *normal.mean.shape)
        for name, normal in ((name.removeprefix("."), normal) for name, normal in gaussians(layer).items())
    }
    with torch.no_grad():
        sampled = torch.cat([vmap(lambda one: functional_call(plain, one, x))(part) for part in split(samples, 1000)])
        mean = layer(x)
        layer.noise = torch.ones_like(mean)
        deviation = layer(x) - mean
    spread = sampled.std(0)
    assert ((sampled.mean(0) - mean).abs() < 5 * spread / math.sqrt(count)).all()
    torch.testing.assert_close(deviation, spread, rtol=5 / math.sqrt(2 * count), atol=0)


def split(tensors: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    parts = {name: tensor.split(size) for name, tensor in tensors.items()}
    return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]


@every_layer
def test_a_layer_keeps_its_weights_and_is_the_plain_layer_without_noise(kind: str) -> None:
    torch.manual_seed(0)
    plain = LAYERS[kind]()
    after = torch.random.get_rng_state()
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    make_bayesian(layer, -12.0)
    assert torch.equal(torch.random.get_rng_state(), after)  # nothing else was drawn
    x = random_layer(kind)[1]
    assert torch.equal(layer(x), plain(x))
    make_bayesian(layer, 0.0)  # what is Bayesian stays as it is
    assert all(bool((tensor == -12).all()) for name, tensor in layer.named_parameters() if name.endswith("variance"))


def test_a_layer_can_be_made_directly() -> None:
    layer = BayesianConv2d(2, 3, 5, stride=2, log_variance=-2.0)
    assert {name: tuple(normal.log_variance.shape) for name, normal in gaussians(layer).items()} == {
        ".weight": (3, 2, 5, 5),
        ".bias": (3,),
    }
    assert all(bool((normal.log_variance == -2).all()) for normal in gaussians(layer).values())


def test_the_first_pass_uses_the_noise_up() -> None:
    layer, x = random_layer("linear")
    noise = torch.randn(2, 3)
    with noisy(layer, {"": noise}):
        first, second = layer(x), layer(torch.cat([x, x, x]))  # another batch size: the noise would not fit
    assert not torch.allclose(first, layer(x))
    torch.testing.assert_close(second[:2], layer(x))
    with pytest.raises(ZeroDivisionError), noisy(layer, {"": noise}):
        raise ZeroDivisionError
    assert layer.noise is None


@pytest.mark.usefixtures("float64")
@every_layer
def test_stacked_gradients_equal_those_of_one_layer_at_a_time(kind: str) -> None:
    layer, x = random_layer(kind)
    parameters = dict(layer.named_parameters())
    stacked = {name: torch.stack([tensor, 0.5 * tensor]).detach() for name, tensor in parameters.items()}
    noise = torch.randn(2, *layer(x).shape)

    def loss(parameters: dict[str, Tensor], noise: Tensor) -> Tensor:
        layer.noise = noise
        output: Tensor = functional_call(layer, parameters, x)
        return output.square().sum()

    together = vmap(grad(loss))(stacked, noise)
    for replica in range(2):
        alone = {name: tensor[replica].clone().requires_grad_() for name, tensor in stacked.items()}
        slopes = torch.autograd.grad(loss(alone, noise[replica]), list(alone.values()))
        for name, slope in zip(alone, slopes, strict=True):
            torch.testing.assert_close(together[name][replica], slope)
            assert slope.abs().min() > 0


def test_an_input_of_zeros_has_finite_gradients_without_biases() -> None:
    layer = random_layer("linear without biases")[0]
    layer.noise = torch.ones(2, 3)
    layer(torch.zeros(2, 4)).sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in layer.parameters() if parameter.grad is not None)


def test_shapes_of_outputs_are_found_and_nothing_is_left_behind() -> None:
    net = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 3, 5, stride=4, padding=1),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(12, 5),
    )
    make_bayesian(net, -12.0)
    with recorded_shapes(net) as shapes:
        net(torch.rand(1, 64))
    assert shapes == {"1": (3, 2, 2), "4": (5,)}
    assert net.training
    assert net[2].training
    assert net[2].num_batches_tracked == 0
    net(torch.rand(7, 64))
    assert shapes == {"1": (3, 2, 2), "4": (5,)}


# --- the penalty ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [0, 1])
def test_the_penalty_is_the_divergence_to_the_previous_posterior_per_image(earlier: int, digits: Stream) -> None:
    trainer = Trainer(tiny(method="vcl", vcl_weight=0.5, vcl_log_variance=-3.0), digits.spec)
    for task in digits[:earlier]:
        trainer.learn(task, Recorder())
    before = {name: tensor.double() for name, tensor in trainer.replicas.parameters.items()}
    trainer._begin(trainer._task_images(digits[earlier]))
    generator = torch.Generator().manual_seed(0)
    for tensor in trainer.replicas.parameters.values():
        tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    terms: dict[str, Tensor] = trainer.replicas.map(trainer.method.parts[0].penalty, {"state": trainer.method.state})
    now = {name: tensor.double() for name, tensor in trainer.replicas.parameters.items()}
    for replica in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for name in means(before):
            posterior, previous = (
                Normal(tensors[name][replica], (tensors[f"{name}_log_variance"][replica] / 2).exp())
                for tensors in (now, before)
            )
            total += kl_divergence(posterior, previous if earlier else Normal(0.0, 1.0)).sum()
        expected = 0.5 / len(digits[earlier].train.images) * total
        torch.testing.assert_close(terms["weights"][replica].double(), expected, rtol=1e-5, atol=0)


def test_a_task_begins_without_divergence_and_logs_it(digits: Stream) -> None:
    recorder = Recorder()
    trained(tiny(method="vcl", tasks=2), digits, recorder)
    epochs = recorder.of("epoch")
    first, second = ([event for event in epochs if event["task"] == task] for task in (0, 1))
    # Every weight starts at 4 nats from N(0, 1) but for its mean; the images of the task share them.
    layers = bayesian_layers(Trainer(tiny(method="vcl"), digits.spec).replicas.model)
    size = sum(parameter.numel() for layer in layers.values() for parameter in layer.parameters()) / 2
    expected = 4.0 * size / len(digits[0].train.images)
    assert first[0]["train"]["weights"] == pytest.approx([expected, expected], rel=0.1)
    assert all(0 < value < 0.1 * expected for event in second for value in event["train"]["weights"])


def test_weights_that_matter_become_certain_and_others_return_to_the_prior(digits: Stream) -> None:
    settings = tiny(method="vcl", tasks=1, epochs=60, learning_rate=0.05, vcl_weight=0.05, vcl_log_variance=-2.0)
    trainer = trained(settings, digits)
    images = digits[0].train.images
    variances = trainer.replicas.parameters["encoder.body.0.weight_log_variance"].mean(1)  # per pixel
    never, always = images.max(0).values == 0, images.mean(0) > 0.5
    assert never.any()
    assert always.any()
    assert (variances[:, never] > -0.5).all()  # black in every image: nothing is known about these weights
    biases = trainer.replicas.parameters["decoder.4.bias_log_variance"]
    assert (biases[:, always] < -2.5).all()


# --- where the noise goes -------------------------------------------------------------------------------------------


def batch_of(trainer: Trainer, images: Tensor, *, training: bool) -> Batch:
    """Return a batch for all replicas as the engine makes it."""
    count, rows = len(images), len(trainer.replicas)
    noise = trainer.generators.draw_all(trainer.objective.draws(count, training=training), "test")
    weight, ones = torch.full((rows, count), 1 / count), torch.ones(rows)
    state = trainer.method.state
    return {"x": images.expand(rows, -1, -1), "weight": weight, "kl_weight": ones, "state": state, **noise}


@pytest.mark.parametrize("method", ["vcl", "boo+vcl", "multihead+vcl", "vcl+distill"])
def test_noise_is_in_the_elbo_of_training_and_nowhere_else(method: str, digits: Stream) -> None:
    settings = tiny(method=method, vcl_log_variance=-1.0)
    trainer, calm = (trained(settings.changed(tasks=1), digits) for _ in range(2))
    for one in (trainer, calm):
        one._begin(one._task_images(digits[1]))
    for name, tensor in calm.replicas.parameters.items():
        if name.endswith("_log_variance") and not name.startswith("prior."):
            tensor.fill_(-40.0)  # as good as certain
    images = digits[1].train.images
    noisy_batch, plain_batch = (batch_of(trainer, images, training=training) for training in (True, False))
    loud, plain = (trainer.replicas.map(trainer.objective, batch).terms for batch in (noisy_batch, plain_batch))
    silent = calm.replicas.map(calm.objective, noisy_batch).terms
    for name in ("reconstruction", "kl"):
        if name == "kl" and "multihead" in method:
            assert torch.equal(loud[name], plain[name])  # the encoder belongs to the task alone
        else:
            assert ((loud[name] - plain[name]).abs() > 1e-3).all(), name
        torch.testing.assert_close(silent[name], plain[name], rtol=1e-4, atol=1e-4)
    for name in set(plain) - {"loss", "reconstruction", "kl"}:
        assert torch.equal(loud[name], plain[name]), name
    assert all(layer.noise is None for layer in bayesian_layers(trainer.replicas.model).values())


def test_components_of_the_prior_are_encoded_with_mean_weights(digits: Stream) -> None:
    trainer = trained(tiny(method="boo+vcl", tasks=1, vcl_log_variance=-1.0), digits)
    vcl = trainer.method.parts[1]
    trainer._begin(trainer._task_images(digits[1]))
    batch = batch_of(trainer, digits[1].train.images[:5], training=True)

    def encodings(model: VAE, batch: Batch) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def watched(x: Tensor) -> Any:
            posterior = model.encoder(x)
            seen.append(posterior.mean)
            return posterior

        with vcl.perturbed(model, trainer.method.batch_of(vcl, batch)):
            posterior = watched(batch["x"])
            model.decode(posterior.mean)
            model.prior.for_training(watched)
        return seen[0] - model.encoder(batch["x"]).mean, seen[1] - model.encoder(model.prior.live_inputs).mean

    images, components = trainer.replicas.map(encodings, batch)
    assert images.abs().min() > 0
    assert components.shape == (2, 3, 4)
    assert (components == 0).all()


def test_log_variances_learn_from_the_images(digits: Stream) -> None:
    """Without the divergence only the noise in the ELBO moves them."""
    trainer = trained(tiny(method="vcl", tasks=1, vcl_weight=0.0, vcl_log_variance=-4.0), digits)
    changed = {
        name: tensor for name, tensor in trainer.replicas.parameters.items() if name.endswith("bias_log_variance")
    }
    assert len(changed) == 6
    assert all(bool((tensor != -4).all()) for tensor in changed.values())


def test_the_network_starts_as_that_of_other_methods_and_is_evaluated_at_its_means(digits: Stream) -> None:
    plain, fresh = (Trainer(tiny(method=method), digits.spec) for method in ("standard", "vcl"))
    assert all(torch.equal(fresh.replicas.parameters[name], plain.replicas.parameters[name]) for name in plain_names())
    assert ledger(fresh).parameters == 2 * (ledger(plain).parameters or 0)
    bayesian = trained(tiny(method="vcl", tasks=1, vcl_log_variance=-1.0), digits)
    for name, tensor in plain.replicas.parameters.items():
        tensor.copy_(bayesian.replicas.parameters[name])
    images = digits[0].test.images
    ours, truth = (log_likelihood(one.replicas, images, 20).log_prob for one in (bayesian, plain))
    assert torch.equal(ours, truth)
    assert torch.equal(generate(bayesian, 10), generate(plain, 10))


def plain_names() -> list[str]:
    layers = ("encoder.body.0", "encoder.body.2", "encoder.head", "decoder.0", "decoder.2", "decoder.4")
    return [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]


# --- with other methods ---------------------------------------------------------------------------------------------


def test_layers_of_one_task_alone_stay_ordinary(digits: Stream) -> None:
    trainer = trained(tiny(method="multihead+vcl", tasks=2), digits)
    assert set(bayesian_layers(trainer.replicas.model)) == {"decoder.body.0", "decoder.body.2", "decoder.body.4"}
    drawn = set(trainer.objective.draws(7, training=True)) - {"latent"}
    assert drawn == {f"vcl.decoder.body.{layer}" for layer in (0, 2, 4)}
    assert not any("log_variance" in name for name in trainer.method.memory())


@pytest.mark.parametrize("other", ["ewc", "si"])
def test_two_methods_that_hold_the_weights_are_refused(other: str) -> None:
    with pytest.raises(InputError, match=f"both keep the weights.*'{other}' or 'vcl'"):
        make_method(tiny(method=f"vcl+{other}"))


@pytest.mark.parametrize("method", ["boo+vcl", "multihead+vcl"])
def test_combinations_resume_exactly(method: str, harmless_kills: Callable[..., int]) -> None:
    settings = tiny(method=method, tasks=2, batch_size=1)
    lives = iter(lambda: 3, None)
    assert harmless_kills(settings, lives) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vcl", "boo+vcl"])
def test_compiled_training_is_the_same_in_one_graph(method: str, digits: Stream) -> None:
    settings = tiny(method=method, tasks=2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = Trainer(settings, digits.spec, compile=True)
    for task in digits[:2]:
        compiled.learn(task, Recorder())
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    plain = trained(settings, digits)
    assert not same(plain, Trainer(settings, digits.spec))
    for name, tensor in plain.replicas.parameters.items():
        torch.testing.assert_close(compiled.replicas.parameters[name], tensor, rtol=1e-4, atol=1e-5)
