from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from boovae.errors import InputError
from boovae.nets import make_nets

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


@pytest.mark.parametrize("name", ["", "mlp", "mlp:", "mlp:0", "mlp:-3", "mlp:3.5", "mlp:300\n", "MLP:300", "conv"])
def test_an_unknown_net_is_refused_by_the_name_of_its_flag(name: str) -> None:
    with pytest.raises(InputError, match="--net") as caught:
        make_nets(name, (28, 28), 40, RANGE)
    assert f"'{name}'" in str(caught.value)
    assert "mlp:300" in str(caught.value)
