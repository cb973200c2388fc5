"""The importance-sampled negative log-likelihood of test images.

−log p(x) ≈ −log 1/S Σ_s p(x | z_s) p(z_s) / q(z_s | x), z_s ~ q(z | x)

Images are encoded once; chunks of (images x samples) are decoded and summed up by a streaming log-sum-exp. The random
numbers are the same for every image (common random numbers), so an image's score does not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from boovae.distributions import LOG_TWO_PI, DiagonalNormal
from boovae.errors import InputError
from boovae.nets import ConvDecoder
from boovae.training.randomness import seed_for
from boovae.training.replicas import Replicas
from boovae.vae import VAE

#: Bytes that one chunk of decoder outputs may take: the GPU wants long kernels, the CPU what fits its cache.
CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}
#: Images per chunk at most; a power of two keeps the shapes the same from task to task.
IMAGE_CHUNK = 512
#: Images per chunk where an image must get the same bits in any company: always so many, filled up with nothing.
FIXED_CHUNK = {"cuda": 1024, "cpu": 32}


class LogLikelihood(NamedTuple):
    """Per image and replica, each (R, n)."""

    log_prob: Tensor
    own: Tensor
    """Under the image's own task's part of the prior; the same as `log_prob` where tasks do not share the prior."""
    effective_samples: Tensor


class _Weights(NamedTuple):
    """log Σ w, the same under the own part of the prior, and log Σ w², each (images,)."""

    total: Tensor
    own: Tensor
    squares: Tensor


@torch.no_grad()
def log_likelihood(
    replicas: Replicas,
    images: Tensor,
    samples: int,
    *,
    tasks: Tensor | None = None,
    seed: int = 0,
    compile: bool = False,
    fixed: bool = False,
    progress: Callable[[float], None] | None = None,
) -> LogLikelihood:
    """Return log p(x) of images (n, D) under each replica by importance sampling with `samples` samples.

    `tasks` (n,) says which task each image belongs to; without it the own part of the prior is the whole prior.
    With `fixed` chunks an image's score is the same, bit for bit, whatever other images are scored with it.

    The effective number of samples (Σw)²/Σw² says how far to trust it: with a handful, the encoder no longer finds the
    image.
    """
    # A GPU compiles for one shape and fills it up; elsewhere the last chunk is what is left.
    chunk = IMAGE_CHUNK if compile and images.is_cuda else min(IMAGE_CHUNK, len(images))
    if fixed:
        chunk = FIXED_CHUNK[images.device.type]
    if not len(images):
        raise InputError("images is empty: there is nothing to score")
    model = replicas.model
    per_chunk = _even(samples, CHUNK_BYTES[images.device.type] // (4 * chunk * _row(model, images.shape[1])))
    noise = _noise(samples, model.latent_dim, seed, images.device)
    weigh = _compiled_weigh() if compile else _weigh
    results = []
    for r in range(len(replicas)):
        tensors = {name: tensor[r] for name, tensor in replicas.tensors().items()}
        parts = []
        for start in range(0, len(images), chunk):
            x = images[start : start + chunk]
            rest = chunk - len(x)
            padded = torch.nn.functional.pad(x, (0, 0, 0, rest))
            owners = None
            if tasks is not None and model.prior.shares_mass:
                owners = torch.nn.functional.pad(tasks[start : start + chunk], (0, rest))
            weights = _stream(replicas, tensors, padded, owners, noise, per_chunk, weigh)
            parts.append(torch.stack(weights)[:, : len(x)])
            if progress is not None:
                progress((r + (start + len(x)) / len(images)) / len(replicas))
        results.append(torch.cat(parts, dim=1))
    total, own, squares = torch.stack(results, dim=1)
    return LogLikelihood(total - math.log(samples), own - math.log(samples), (2 * total - squares).exp())


@torch.no_grad()
def log_likelihood_of_each_task(
    replicas: Replicas, image: Tensor, tasks: int, samples: int, seed: int = 0
) -> LogLikelihood:
    """Return log p(x) of one image (D,), (R, 1), and under each task's own part of the prior, (R, T).

    All tasks share the samples, which are decoded once. Where tasks do not share the prior, `own` is (R, 1), too.
    """
    model = replicas.model
    noise = _noise(samples, model.latent_dim, seed, image.device)
    owners = torch.arange(tasks, device=image.device) if model.prior.shares_mass else None
    per_chunk = max(1, CHUNK_BYTES[image.device.type] // (4 * _row(model, len(image))))
    results = []
    for r in range(len(replicas)):
        tensors = {name: tensor[r] for name, tensor in replicas.tensors().items()}
        results.append(_stream(replicas, tensors, image.unsqueeze(0), owners, noise, per_chunk, _weigh))
    total, own, squares = (torch.stack(parts) for parts in zip(*results, strict=True))
    return LogLikelihood(total - math.log(samples), own - math.log(samples), (2 * total - squares).exp())


def _even(samples: int, most: int) -> int:
    """Return how many samples to take at once, `most` at most: if possible so that all chunks are alike.

    Every other length of the last chunk is compiled once more.
    """
    most = max(1, min(samples, most))
    divisor = next(size for size in range(most, 0, -1) if samples % size == 0)
    return divisor if 2 * divisor >= most else most


def _noise(samples: int, latent_dim: int, seed: int, device: torch.device) -> Tensor:
    """Return the noise (S, L) that all images share."""
    generator = torch.Generator(device).manual_seed(seed_for(seed, "likelihood"))
    return torch.randn(samples, latent_dim, generator=generator, device=device)


def _row(model: VAE, pixels: int) -> int:
    """Return the floats that one sample of one image takes: its outputs or convolutions, and the prior's densities."""
    # A convolution, its normalisation and its ReLU each leave an array; a component's density is computed in float64.
    widths = [3 * layer.widest for layer in model.decoder.modules() if isinstance(layer, ConvDecoder)]
    return max([pixels, *widths]) + 4 * model.prior.components


def _stream(
    replicas: Replicas,
    tensors: dict[str, Tensor],
    x: Tensor,
    owners: Tensor | None,
    noise: Tensor,
    per_chunk: int,
    weigh: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> _Weights:
    """Add up the importance weights of the images x (n, D) over all noise (S, L)."""
    posterior: DiagonalNormal = replicas.call(tensors, VAE.posterior, x)
    sums = [torch.full(x.shape[:1], -math.inf, device=x.device)] * 3
    for part in noise.split(per_chunk):
        sums = [
            torch.logaddexp(*pair)
            for pair in zip(sums, weigh(replicas, tensors, x, owners, *posterior, part), strict=True)
        ]
    return _Weights(*sums)


def _weigh(
    replicas: Replicas,
    tensors: dict[str, Tensor],
    x: Tensor,
    owners: Tensor | None,
    mean: Tensor,
    log_variance: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sums of `_Weights` over noise (s, L) for images x (n, D) with posteriors (n, L)."""

    def log_weights(model: VAE) -> tuple[Tensor, Tensor]:
        z = mean.unsqueeze(1) + noise * (0.5 * log_variance).exp().unsqueeze(1)  # (n, s, L)
        output = model.likelihood.bounded(model.decode(z))
        log_q = -0.5 * ((noise.square() + LOG_TWO_PI).sum(-1) + log_variance.sum(-1, keepdim=True))
        rest = model.likelihood.log_prob(output, x.unsqueeze(1)) - log_q
        if owners is None:
            whole = own = model.prior.forward(model.posterior).log_prob(z)
        else:
            whole, own = model.prior.log_probs(model.posterior, z, owners)
        return rest + whole, rest + own

    whole, own = replicas.call(tensors, log_weights)
    return torch.logsumexp(whole, 1), torch.logsumexp(own, 1), torch.logsumexp(2 * whole, 1)


def _compiled_weigh() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    global _compiled
    if _compiled is None:
        _compiled = torch.compile(_weigh, dynamic=False)
    return _compiled


_compiled: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
