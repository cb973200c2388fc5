"""Encoders and decoders, by name.

`mlp:WIDTH` takes any rows of numbers: `mlp:300` is the paper's network for MNIST, `mlp:1024` for the other two grey
datasets. `gated:WIDTH` has gated layers (Dauphin et al., 2017), as in the literature on likelihoods of grey pictures.
`linear:WIDTH` adds a linear map to both networks of `mlp:WIDTH`, for tables, whose columns depend on each other mostly
linearly.
`conv:CHANNELS` is for pictures: `conv:32` on 3 x 32 x 32 is the paper's network for faces. `res:CHANNELS` has residual
blocks and takes pictures of any size from 8 x 8 pixels (`residual.py`).
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boovae.errors import InputError
from boovae.model.distributions import DiagonalNormal
from boovae.model.normalisation import NORMALISATIONS, Normalisation
from boovae.model.residual import ResidualBlock, ResidualDecoder, ResidualEncoder, ResidualPlan

#: The lowest and the highest pixel.
Bounds = tuple[float, float]


class Nets(NamedTuple):
    """The two networks of a VAE."""

    encoder: nn.Module
    decoder: nn.Module


class Encoder(nn.Module):
    """A body that computes features, then a head for the mean and the clamped log-variance of q(z | x).

    With `inputs`, a linear map of these many numbers is added to the mean.
    """

    def __init__(
        self, body: nn.Module, features: int, latent_dim: int, limits: tuple[float, float], inputs: int = 0
    ) -> None:
        super().__init__()
        self.body = body
        self.linear = nn.Linear(inputs, latent_dim, bias=False) if inputs else None
        self.head = nn.Linear(features, 2 * latent_dim)  # mean and log-variance in one product
        self.limits = limits

    def forward(self, x: Tensor) -> DiagonalNormal:
        """Map images (..., D) to q(z | x) with parameters (..., L)."""
        mean, log_variance = self.head(self.body(x)).chunk(2, dim=-1)
        if self.linear is not None:
            mean = mean + self.linear(x)
        return DiagonalNormal(mean, log_variance.clamp(*self.limits))


def hidden_layers(inputs: int, width: int, *, gated: bool) -> tuple[nn.Module, ...]:
    """Return two layers with LeakyReLU, or `gated` ones: h = (W x + b) σ(V x + c)."""
    outputs, activation = (2 * width, nn.GLU) if gated else (width, nn.LeakyReLU)
    return nn.Linear(inputs, outputs), activation(), nn.Linear(width, outputs), activation()


class Beside(nn.Module):
    """The sum of a network and of a linear map."""

    def __init__(self, network: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.network = network
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        output: Tensor = self.network(x) + self.linear(x)
        return output


class Picture(NamedTuple):
    """The size of a picture, the number of times its sides are halved, and the channels at full size."""

    channels: int
    height: int
    width: int
    halvings: int
    base: int

    @property
    def smallest(self) -> tuple[int, int, int]:
        """The smallest feature map, from which the decoder doubles the sides: 256 x 4 x 4 in the paper."""
        return self.base << self.halvings, self.height >> self.halvings, self.width >> self.halvings


class Convolutions(nn.Sequential):
    """Layers that take rows of numbers (..., D) as feature maps of this shape, and return rows."""

    def __init__(self, shape: tuple[int, int, int], layers: Iterable[nn.Module]) -> None:
        super().__init__(*layers)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        maps = x.reshape(-1, *self.shape)
        for layer in self:
            maps = layer(maps)
        return maps.reshape(*x.shape[:-1], -1)


def conv_body(picture: Picture, normalisation: Normalisation) -> tuple[nn.Module, int]:
    """Return convolutions 5x5 of stride 2, each with normalisation and ReLU, and their number of features.

    They halve the sides until about one pixel is left.
    """
    layers: list[nn.Module] = []
    inputs, height, width = picture[:3]
    for stage in range(picture.halvings + 1):
        outputs = picture.base << stage
        layers.append(nn.Conv2d(inputs, outputs, 5, stride=2, padding=1))
        layers += [NORMALISATIONS[normalisation](outputs), nn.ReLU()]
        inputs, height, width = outputs, (height - 1) // 2, (width - 1) // 2
    return Convolutions(picture[:3], layers), inputs * height * width


class ConvDecoder(nn.Module):
    """A linear layer, then transposed convolutions 5x5 that double the sides, each with normalisation and ReLU.

    A 1x1 convolution returns the colours, or several `parameters` for each. A scaled Softsign keeps the outputs within
    `bounds`, those of the pixels; without bounds the outputs are free (logits).
    """

    def __init__(
        self, picture: Picture, latent_dim: int, bounds: Bounds | None, normalisation: Normalisation, parameters: int
    ) -> None:
        super().__init__()
        self.bounds = bounds
        #: Number of values in the widest layer for one image, which determines the memory of a pass.
        self.widest = picture.base * picture.height * picture.width
        self.foot = nn.Linear(latent_dim, math.prod(picture.smallest))
        layers: list[nn.Module] = []
        channels = picture.smallest[0]
        for _ in range(picture.halvings):
            double = nn.ConvTranspose2d(channels, channels // 2, 5, stride=2, padding=2, output_padding=1)
            layers += [double, NORMALISATIONS[normalisation](channels // 2), nn.ReLU()]
            channels //= 2
        layers.append(nn.Conv2d(channels, parameters * picture.channels, 1))
        self.body = Convolutions(picture.smallest, layers)

    def forward(self, z: Tensor) -> Tensor:
        """Map latents (..., L) to pixels (..., D)."""
        output: Tensor = self.body(torch.relu(self.foot(z)))
        if self.bounds is None:
            return output
        low, high = self.bounds
        return 0.5 * (low + high) + 0.5 * (high - low) * F.softsign(output)


def initialise(module: nn.Module) -> None:
    """Initialise weights by Xavier-normal, keep PyTorch's biases; each of the encoder's heads counts as a layer."""
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.xavier_normal_(layer.weight)
    for part in module.modules():
        if isinstance(part, ResidualBlock):
            part.start_as_identity()
        if isinstance(part, Encoder):
            for half in part.head.weight.detach().chunk(2):
                nn.init.xavier_normal_(half)


class SharedNoise(nn.Module):
    """A decoder whose second block of outputs is a width for each colour, the same for all images and places.

    A network that predicts a width for every number can call an edge uncertain instead of drawing it; one width for all
    numbers falls only as the means get better (Rybkin et al., 2021), so that small data are learned in fewer steps.
    """

    #: A log-width has to move by several units, weights by hundredths: it is learned this many times faster.
    rate = 20.0

    def __init__(self, decoder: nn.Module, colours: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.level = nn.Parameter(torch.zeros(colours))

    def forward(self, z: Tensor) -> Tensor:
        """Return means and log-widths (..., 2 D) at latents."""
        mean: Tensor = self.decoder(z)
        width = (self.rate * self.level).repeat_interleave(mean.shape[-1] // len(self.level))
        return torch.cat((mean, width.expand_as(mean)), -1)


def make_nets(
    name: str,
    shape: tuple[int, ...],
    latent_dim: int,
    limits: tuple[float, float],
    *,
    parameters: int = 1,
    bounds: Bounds | None = None,
    normalisation: Normalisation = "group",
    shared_noise: bool = False,
) -> Nets:
    """Return encoder and decoder called `name` for images of `shape`.

    `limits` are those of the posterior's log-variance. The decoder returns `parameters` blocks of outputs, each of the
    size of an image. `bounds` limit the outputs of a convolutional decoder; `normalisation` is used by convolutional
    networks. With `shared_noise` the last block is a width that all images share.
    """
    match = re.fullmatch(r"(mlp|gated|linear|conv|res):([1-9]\d{0,4})", name)
    if match is None:
        raise InputError(
            f"unknown net '{name}' ({{net}}): use mlp:WIDTH, gated:WIDTH or linear:WIDTH, for example mlp:300, or for "
            "pictures conv:CHANNELS or res:CHANNELS, for example res:32"
        )
    kind, size, pixels = match[1], int(match[2]), math.prod(shape)
    parameters -= shared_noise
    decoder: nn.Module
    if kind in ("mlp", "gated"):
        body = nn.Sequential(*hidden_layers(pixels, size, gated=kind == "gated"))
        encoder = Encoder(body, size, latent_dim, limits)
        layers = hidden_layers(latent_dim, size, gated=kind == "gated")
        decoder = nn.Sequential(*layers, nn.Linear(size, parameters * pixels))
    elif kind == "linear":
        body = nn.Sequential(*hidden_layers(pixels, size, gated=False))
        encoder = Encoder(body, size, latent_dim, limits, inputs=pixels)
        layers = hidden_layers(latent_dim, size, gated=False)
        outputs = parameters * pixels
        decoder = Beside(nn.Sequential(*layers, nn.Linear(size, outputs)), latent_dim, outputs)
    elif kind == "res":
        plan = ResidualPlan.of(check_picture(name, shape), size)
        residual = ResidualEncoder(plan)
        encoder = Encoder(residual, residual.features, latent_dim, limits)
        decoder = ResidualDecoder(plan, latent_dim, parameters)
    else:
        picture = _picture(name, shape, size)
        encoder = Encoder(*conv_body(picture, normalisation), latent_dim, limits)
        decoder = ConvDecoder(picture, latent_dim, bounds if parameters == 1 else None, normalisation, parameters)
    if shared_noise:
        decoder = SharedNoise(decoder, shape[0] if len(shape) == 3 else 1)
    with torch.no_grad():
        initialise(encoder)
        initialise(decoder)
    return Nets(encoder, decoder)


def check_picture(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return colours, height and width of pictures; refuse rows of features."""
    if len(shape) < 2:
        raise InputError(f"net '{name}' ({{net}}) is for pictures, but these are {shape[0]} features; use mlp:WIDTH")
    channels, height, width = (1, *shape)[-3:]
    return channels, height, width


def _picture(name: str, shape: tuple[int, ...], base: int) -> Picture:
    """Halve the sides of a picture as long as both stay whole numbers of at least four pixels."""
    channels, height, width = check_picture(name, shape)
    halvings = 0
    while all(side % (2 << halvings) == 0 and side >> (halvings + 1) >= 4 for side in (height, width)):
        halvings += 1
    if halvings == 0:
        raise InputError(
            f"net '{name}' ({{net}}) halves the sides of pictures, but {height} x {width} cannot be halved to 4 pixels "
            "or more; use res:CHANNELS, which takes any size, or mlp:WIDTH"
        )
    return Picture(channels, height, width, halvings, base)
