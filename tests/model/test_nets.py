from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from boovae.errors import InputError
from boovae.model.likelihoods import make_likelihood
from boovae.model.nets import make_nets
from boovae.model.normalisation import Normalisation

RANGE = (-6.0, 2.0)


@pytest.mark.parametrize(("name", "parameters"), [("mlp:300", 688_464), ("mlp:1024", 3_830_624)])
def test_networks_have_as_many_parameters_as_the_papers(name: str, parameters: int) -> None:
    nets = make_nets(name, (28, 28), 40, RANGE)
    assert sum(parameter.numel() for net in nets for parameter in net.parameters()) == parameters


@pytest.mark.parametrize("shape", [(5,), (4, 3), (3, 4, 2)])
def test_images_of_any_shape_are_flat_rows(shape: tuple[int, ...]) -> None:
    encoder, decoder = make_nets("mlp:8", shape, 3, RANGE)
    pixels = math.prod(shape)
    posterior = encoder(torch.rand(2, 7, pixels))
    assert posterior.mean.shape == posterior.log_variance.shape == (2, 7, 3)
    assert decoder(torch.randn(2, 7, 3)).shape == (2, 7, pixels)


@pytest.mark.parametrize("limits", [(-6.0, 2.0), (-4.0, 4.0), (-0.5, 0.25)])
def test_log_variance_stays_inside_its_range_and_reaches_it(limits: tuple[float, float]) -> None:
    torch.manual_seed(0)
    encoder, _ = make_nets("mlp:20", (10,), 5, limits)
    log_variance = encoder(1000 * torch.randn(200, 10)).log_variance
    assert log_variance.min().item() == limits[0]
    assert log_variance.max().item() == limits[1]
    tame = encoder(0.001 * torch.randn(200, 10)).log_variance
    assert tame.unique().numel() > 100


def test_mean_of_the_posterior_is_not_limited() -> None:
    torch.manual_seed(0)
    encoder, _ = make_nets("mlp:20", (10,), 5, RANGE)
    assert encoder(1000 * torch.randn(200, 10)).mean.abs().max().item() > 100


def test_initial_weights_have_the_xavier_normal_scale() -> None:
    torch.manual_seed(0)
    encoder, decoder = make_nets("mlp:300", (28, 28), 40, RANGE)
    layers = [layer for net in (encoder, decoder) for layer in net.modules() if isinstance(layer, nn.Linear)]
    shapes = [tuple(layer.weight.shape) for layer in layers]
    assert shapes == [(300, 784), (300, 300), (80, 300), (300, 40), (300, 300), (784, 300)]
    for layer in layers:
        # The encoder's head is two layers of 40 side by side; each has its own fan-out.
        weights = layer.weight.detach().chunk(2) if layer.out_features == 80 else [layer.weight.detach()]
        for weight in weights:
            outputs, inputs = weight.shape
            wanted = math.sqrt(2 / (inputs + outputs))
            assert weight.std().item() == pytest.approx(wanted, rel=0.03)
            assert weight.mean().item() == pytest.approx(0, abs=5 * wanted / math.sqrt(weight.numel()))
            kurtosis = ((weight / weight.std()) ** 4).mean().item()
            assert kurtosis == pytest.approx(3.0, abs=0.2)  # normal; a uniform draw has 1.8
        bound = 1 / math.sqrt(layer.in_features)
        assert layer.bias.abs().max().item() <= bound
        assert layer.bias.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.25)


def test_hidden_layers_are_leaky_rectifiers() -> None:
    _, decoder = make_nets("mlp:6", (4,), 2, RANGE)
    z = torch.randn(5, 2)
    state = decoder.state_dict()
    hidden = z
    for layer in ("0", "2", "4"):
        hidden = hidden @ state[f"{layer}.weight"].T + state[f"{layer}.bias"]
        if layer != "4":
            hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
    torch.testing.assert_close(decoder(z), hidden)


@pytest.mark.parametrize(
    "name", ["", "mlp", "mlp:", "mlp:0", "mlp:-3", "mlp:3.5", "mlp:300\n", "MLP:300", "conv", "cnn:3"]
)
def test_an_unknown_net_is_refused_by_the_name_of_its_setting(name: str) -> None:
    with pytest.raises(InputError, match=r"\(net\)") as caught:
        make_nets(name, (28, 28), 40, RANGE)
    assert f"'{name}'" in str(caught.value)
    assert "mlp:300" in str(caught.value)


# --- convolutions -----------------------------------------------------------------------------------------------------


def test_the_network_for_faces_is_that_of_the_papers_table() -> None:
    encoder, decoder = make_nets("conv:32", (3, 32, 32), 128, (-3.0, 4.0), bounds=(-1.0, 1.0), normalisation="batch")
    sizes: list[tuple[int, ...]] = []
    for net in (encoder, decoder):
        for layer in net.modules():
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
                layer.register_forward_hook(lambda _, __, output: sizes.append(tuple(output.shape[1:])))
    posterior = encoder(torch.rand(2, 3072))
    assert sizes == [(32, 15, 15), (64, 7, 7), (128, 3, 3), (256, 1, 1)]
    sizes.clear()
    assert decoder(posterior.mean).shape == (2, 3072)
    assert sizes == [(128, 8, 8), (64, 16, 16), (32, 32, 32), (3, 32, 32)]
    # Counted by hand: 4 convolutions with normalisation and two heads; linear, 3 transposed, 1x1.
    counts = [sum(parameter.numel() for parameter in net.parameters()) for net in (encoder, decoder)]
    assert counts == [1_144_832, 1_604_355]


@pytest.mark.parametrize("normalisation", ["group", "batch"])
@pytest.mark.parametrize("shape", [(3, 64, 64), (28, 28), (1, 8, 16), (3, 8, 8)])
def test_convolutions_take_pictures_of_other_sizes_as_flat_rows(
    shape: tuple[int, ...], normalisation: Normalisation
) -> None:
    encoder, decoder = make_nets("conv:4", shape, 3, RANGE, normalisation=normalisation)
    pixels = math.prod(shape)
    for lead in ((), (5,), (2, 5)):
        posterior = encoder(torch.rand(*lead, pixels))
        assert posterior.mean.shape == posterior.log_variance.shape == (*lead, 3)
        assert decoder(torch.randn(*lead, 3)).shape == (*lead, pixels)


def test_pixels_are_rows_of_one_picture() -> None:
    """Leading axes are images: each is encoded by itself, colours first."""
    encoder, _ = make_nets("conv:4", (3, 8, 8), 3, RANGE)
    x = torch.rand(2, 5, 192)
    apart = encoder(x[1, 3].reshape(1, 192)).mean[0]
    torch.testing.assert_close(encoder(x).mean[1, 3], apart, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (0.0, 1.0)])
def test_softsign_keeps_pixels_between_the_bounds(bounds: tuple[float, float]) -> None:
    torch.manual_seed(0)
    _, decoder = make_nets("conv:4", (3, 8, 8), 3, RANGE, bounds=bounds)
    _, free = make_nets("conv:4", (3, 8, 8), 3, RANGE)
    free.load_state_dict(decoder.state_dict())
    with torch.no_grad():
        for net in (decoder, free):
            net.get_parameter("body.3.weight").mul_(100)
    z = torch.randn(50, 3)
    output = decoder(z)
    low, high = bounds
    assert low < output.min() < low + 0.1
    assert high - 0.1 < output.max() < high
    squashed = free(z) / (1 + free(z).abs())
    torch.testing.assert_close(output, (squashed + 1) / 2 * (high - low) + low)


def test_group_normalisation_leaves_small_pictures_something_to_say() -> None:
    torch.manual_seed(0)
    encoder, _ = make_nets("conv:4", (3, 8, 8), 3, RANGE)
    assert encoder(torch.rand(20, 192)).mean.std(0).min() > 1e-3


@pytest.mark.parametrize(
    ("shape", "message"), [((40,), "40 features"), ((3, 30, 7), "30 x 7"), ((4, 4), "4 x 4"), ((3, 32, 33), "32 x 33")]
)
def test_pictures_that_cannot_be_halved_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make_nets("conv:8", shape, 3, RANGE)
    assert "mlp:WIDTH" in str(caught.value)


# --- gated layers and residual networks -------------------------------------------------------------------------------


def test_gated_layers_multiply_units_by_gates() -> None:
    _, decoder = make_nets("gated:6", (4,), 2, RANGE)
    z = torch.randn(5, 2)
    state = decoder.state_dict()
    hidden = z
    for layer in ("0", "2"):
        units, gates = (hidden @ state[f"{layer}.weight"].T + state[f"{layer}.bias"]).chunk(2, -1)
        hidden = units / (1 + (-gates).exp())
    torch.testing.assert_close(decoder(z), hidden @ state["4.weight"].T + state["4.bias"])


@pytest.mark.parametrize("shape", [(3, 64, 64), (28, 28), (3, 48, 64), (3, 33, 47), (8, 9), (3, 8, 8)])
@pytest.mark.parametrize("parameters", [1, 2, 9])
def test_residual_networks_take_pictures_of_any_size(shape: tuple[int, ...], parameters: int) -> None:
    encoder, decoder = make_nets("res:4", shape, 3, RANGE, parameters=parameters)
    pixels = math.prod(shape)
    for lead in ((), (5,), (2, 5)):
        posterior = encoder(torch.rand(*lead, pixels))
        assert posterior.mean.shape == posterior.log_variance.shape == (*lead, 3)
        assert decoder(torch.randn(*lead, 3)).shape == (*lead, parameters * pixels)


def test_every_latent_of_a_residual_network_reaches_every_pixel_of_every_parameter() -> None:
    torch.manual_seed(0)
    _, decoder = make_nets("res:8", (3, 11, 14), 2, RANGE, parameters=2)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    difference = decoder(torch.zeros(2)) - decoder(torch.tensor([1.0, 0.0]))
    assert (difference.abs() > 1e-7).float().mean() > 0.99


@pytest.mark.parametrize(("shape", "message"), [((40,), "40 features"), ((3, 30, 7), "at least 8 x 8")])
def test_pictures_too_small_for_residual_networks_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make_nets("res:8", shape, 3, RANGE)
    assert "mlp:WIDTH" in str(caught.value)


@pytest.mark.parametrize("name", ["gated:8", "res:8"])
def test_parameters_of_a_likelihood_are_blocks_of_the_size_of_an_image(name: str) -> None:
    """Each block holds one parameter for all pixels, in the order of the pixels."""
    torch.manual_seed(0)
    _, decoder = make_nets(name, (3, 8, 8), 2, RANGE, parameters=2)
    bias = [tensor for name, tensor in decoder.named_parameters() if name.endswith("bias")][-1]
    with torch.no_grad():
        bias[: len(bias) // 2] = 100.0
    output = decoder(torch.randn(5, 2))
    assert (output[:, :192] > 50).all()
    assert (output[:, 192:] < 50).all()


@pytest.mark.parametrize("name", ["mlp:8", "res:4", "conv:4"])
@pytest.mark.parametrize("likelihood", ["normal", "logistic"])
def test_shared_noise_is_one_width_for_each_colour(name: str, likelihood: str) -> None:
    shape = (3, 16, 16)
    made = make_likelihood(likelihood, shape=shape, noise="shared")
    _, decoder = make_nets(name, shape, 5, RANGE, parameters=made.parameters, shared_noise=True)
    level = dict(decoder.named_parameters())["level"]
    with torch.no_grad():
        level.copy_(torch.tensor([-0.1, 0.0, 0.05]))
    output = decoder(torch.randn(4, 5))
    assert output.shape == (4, 2 * 3 * 16 * 16)
    widths = output.unflatten(1, (2, 3, 256))[:, 1]
    assert (widths == widths[:1, :, :1]).all()
    assert widths[0, 0, 0] < widths[0, 1, 0] < widths[0, 2, 0]
    made.log_prob(output, torch.rand(4, 768)).sum().backward()
    assert level.grad is not None
    assert (level.grad != 0).all()


def test_learned_noise_is_refused_where_there_is_none() -> None:
    with pytest.raises(InputError, match="noise='shared' is for likelihood normal or logistic, not for bernoulli"):
        make_likelihood("bernoulli", noise="shared")


def test_a_linear_net_is_a_linear_map_if_its_hidden_units_are_silent() -> None:
    encoder, decoder = make_nets("linear:8", (5,), 3, RANGE, parameters=2)
    x = torch.randn(6, 5)
    with torch.no_grad():
        for name, weight in (*encoder.named_parameters(), *decoder.named_parameters()):
            if "linear" not in name:
                weight.zero_()
        codes = encoder(x).mean
        torch.testing.assert_close(encoder(2 * x).mean, 2 * codes)
        assert codes.std() > 0
        there, twice, nowhere = (decoder(factor * codes) for factor in (1, 2, 0))
    assert there.shape == (6, 10)
    torch.testing.assert_close(twice - nowhere, 2 * (there - nowhere))
