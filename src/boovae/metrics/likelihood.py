"""The importance-sampled negative log-likelihood of test images.

−log p(x) ≈ −log 1/S Σ_s p(x | z_s) p(z_s) / q(z_s | x), z_s ~ q(z | x)

Images are encoded once; chunks of (images x samples) are decoded and added up by a streaming log-sum-exp. All images
share the random numbers (common random numbers), so an image's score does not depend on its neighbours. Images that the
encoder describes poorly can be scored again with a better proposal (`fitted.py`).
"""

import functools
import itertools
import math
from collections.abc import Callable, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor

from boovae.errors import InputError
from boovae.metrics.evaluation import FEW
from boovae.metrics.fitted import LATENTS, STEPS, fitted_posterior, proposed_by_mixture
from boovae.metrics.partial_results import PartialResult
from boovae.model.distributions import LOG_TWO_PI, DiagonalNormal
from boovae.model.nets import ConvDecoder
from boovae.model.residual import ResidualDecoder
from boovae.model.vae import VAE
from boovae.replicas.randomness import seed_for
from boovae.replicas.stacked import Replicas
from boovae.training.trainer import Trainer

#: Bytes of decoder outputs per chunk: large for long GPU kernels, small to fit a CPU's cache.
CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}
#: Most images per chunk; a power of two keeps the shapes the same from task to task.
IMAGE_CHUNK = 512
#: Images per chunk, padded with zeros, if an image's score must not depend on the other images by a single bit.
FIXED_CHUNK = {"cuda": 1024, "cpu": 32}


class LogLikelihood(NamedTuple):
    """Per image and replica, each (R, n)."""

    log_prob: Tensor
    own: Tensor
    """Under the image's own task's part of the prior; the same as `log_prob` where tasks do not share the prior."""
    effective_samples: Tensor
    """(Σw)²/Σw², how reliable the estimate is: very low if the proposal misses the image."""
    fitted: Tensor
    """Whether the proposal is the mixture of `fitted.py`, not the encoder's posterior alone."""


class _Chunk(NamedTuple):
    """One replica and some images x (n, D) with their tasks (n,) and posteriors.

    A posterior has `mean` and log-variances `spread`, (n, L); a mixture means (n, P, L) and factors (n, P, L, L).
    """

    tensors: dict[str, Tensor]
    x: Tensor
    owners: Tensor | None
    mean: Tensor
    spread: Tensor


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
    partial: PartialResult | None = None,
) -> LogLikelihood:
    """Return log p(x) of images (n, D) under each replica by importance sampling with `samples` samples.

    `tasks` (n,) is the task of each image; without it the own part of the prior is the whole prior. With `fixed` chunks
    an image's score does not depend, bit for bit, on the other images. Given the `partial` result of an interrupted
    computation on the same images, only the rest is computed; the result is the same.
    """
    # A GPU compiles for one shape and pads to it; otherwise the last chunk is shorter.
    chunk = IMAGE_CHUNK if compile and images.is_cuda else min(IMAGE_CHUNK, len(images))
    if fixed:
        chunk = FIXED_CHUNK[images.device.type]
    if not len(images):
        raise InputError("images is empty: there is nothing to score")
    model = replicas.model
    per_chunk = _even(samples, CHUNK_BYTES[images.device.type] // (4 * chunk * _row(model, images.shape[1])))
    noise = _noise(samples, model.latent_dim, seed, images.device)
    weigh = _compiled_weigh() if compile else _weigh
    partial = partial or PartialResult()
    cut = {"at_once": [chunk, per_chunk], "device": images.device.type}
    plan = {"images": len(images), "samples": samples, "seed": seed, **cut}
    starts = range(0, len(images), chunk)
    nothing = torch.full((3, len(replicas), len(starts) * chunk), -math.inf, device=images.device)
    sums = partial.begin(plan, nothing)  # results of `_weigh` over all noise
    steps = list(itertools.product(range(len(replicas)), starts, noise.split(per_chunk)))
    place: tuple[int, int] | None = None
    for r, start, part in partial.rest(steps):
        end = start + chunk
        if place != (r, start):
            place = r, start
            current = _chunk(replicas, r, images[start:end], None if tasks is None else tasks[start:end], chunk)
        for row, more in zip(sums[:, r, start:end], weigh(replicas, current, part), strict=True):
            torch.logaddexp(row, more, out=row)
    return _of_sums(*sums[:, :, : len(images)].contiguous(), samples=samples)


@torch.no_grad()
def scored_again(
    replicas: Replicas,
    images: Tensor,
    samples: int,
    found: LogLikelihood,
    *,
    tasks: Tensor | None = None,
    seed: int = 0,
    partial: PartialResult | None = None,
) -> LogLikelihood:
    """Return the scores with those of few effective samples replaced by scores under the proposal of `fitted.py`.

    The new score uses new draws alone. Neither the choice of images nor the fit has seen them, so given both it is a
    lower bound of log p(x) in expectation. The better of the two scores would not be one, nor would a score with the
    draws that were found to be poor: draws chosen by their weights are biased.
    """
    partial = partial or PartialResult()
    few = (found.effective_samples < FEW).nonzero()  # (m, 2): replica and image; never those of a diverged replica
    if not len(few):
        partial.progress(1.0)
        return found
    model, device, half = replicas.model, images.device, -(-samples // 2)
    rows_at_once = CHUNK_BYTES[device.type] // (4 * _row(model, images.shape[1]))
    at_once = max(1, min(IMAGE_CHUNK, rows_at_once // LATENTS))
    per_chunk = _even(half, rows_at_once // (2 * at_once))
    noise = _noise(half, model.latent_dim, seed, device, "fitted likelihood")
    fit_noise = _noise(STEPS * LATENTS, model.latent_dim, seed, device, "fit").unflatten(0, (STEPS, LATENTS))
    counts = few[:, 0].bincount(minlength=len(replicas)).tolist()
    plan = {"images": counts, "samples": samples, "seed": seed, "at_once": [at_once, per_chunk], "device": device.type}
    sums = partial.begin(plan, torch.full((3, len(few)), -math.inf, device=device))
    # No chunk holds images of two replicas: a replica's scores do not depend on the others.
    chunks = [rows for mine in torch.arange(len(few), device=device).split(counts) for rows in mine.split(at_once)]
    steps = list(itertools.product(filter(len, chunks), noise.split(per_chunk)))
    place: Tensor | None = None
    for rows, part in partial.rest(steps):
        if place is not rows:
            place, r, mine = rows, int(few[rows[0], 0]), few[rows, 1]
            current = _chunk(replicas, r, images[mine], None if tasks is None else tasks[mine], len(rows))
            encoded = DiagonalNormal(current.mean, current.spread)
            mean, factor = fitted_posterior(replicas, current.tensors, current.x, encoded, fit_noise)
            deviations = torch.diag_embed((0.5 * encoded.log_variance).exp())
            means, factors = torch.stack([encoded.mean, mean], 1), torch.stack([deviations, factor], 1)
            current = current._replace(mean=means, spread=factors)
        sums[:, rows] = torch.logaddexp(sums[:, rows], torch.stack(_weigh(replicas, current, part)))
    result = LogLikelihood(*(scores.clone() for scores in found))
    fitted = torch.ones(len(few), dtype=torch.bool, device=device)
    for scores, better in zip(result, _of_sums(*sums, samples=2 * half)._replace(fitted=fitted), strict=True):
        scores[few[:, 0], few[:, 1]] = better
    return result


@torch.no_grad()
def log_likelihood_of_each_task(replicas: Replicas, image: Tensor, tasks: int, samples: int) -> LogLikelihood:
    """Return log p(x) of one image (D,), (R, 1), and under each task's own part of the prior, (R, T).

    All tasks share the samples, which are decoded once. Where tasks do not share the prior, `own` is (R, 1), too.
    """
    model = replicas.model
    noise = _noise(samples, model.latent_dim, 0, image.device)
    owners = torch.arange(tasks, device=image.device) if model.prior.shares_mass else None
    per_chunk = max(1, CHUNK_BYTES[image.device.type] // (4 * _row(model, len(image))))
    results = []
    for r in range(len(replicas)):
        chunk = _chunk(replicas, r, image.unsqueeze(0), None, 1)._replace(owners=owners)
        sums = [torch.full((1,), -math.inf, device=image.device)] * 3
        for part in noise.split(per_chunk):
            sums = [torch.logaddexp(*pair) for pair in zip(sums, _weigh(replicas, chunk, part), strict=True)]
        results.append(sums)
    return _of_sums(*(torch.stack(rows) for rows in zip(*results, strict=True)), samples=samples)


def log_likelihood_of_tasks(
    trainer: Trainer,
    images: Tensor,
    owners: Tensor,
    samples: int,
    progress: Callable[[float], None],
    partial_results: MutableMapping[str, PartialResult] | None = None,
    *,
    fit: bool = False,
) -> LogLikelihood:
    """Return the likelihood of images (n, D) of tasks (n,), each under its task's view of the model.

    With `fit`, those that the encoder describes poorly are scored again.
    """
    replicas, method = trainer.replicas, trainer.method
    kept = {} if partial_results is None else partial_results
    present, counts = (column.tolist() for column in owners.unique(return_counts=True))
    parts: list[tuple[str, Replicas, Tensor | slice]]
    if method.knows_task:
        parts = [(f"nll {task}", method.view(replicas, task), owners == task) for task in present]
    else:  # named by its images: other tasks may be available when it continues
        name = " ".join(["nll", *(f"{task}:{count}" for task, count in zip(present, counts, strict=True))])
        parts = [(name, replicas, slice(None))]
    found, passes = [], 2 if fit else 1

    def partial(name: str, done: int) -> PartialResult:
        result = kept.setdefault(name, PartialResult())
        result.progress = lambda share: progress((done + share) / (passes * len(parts)))
        return result

    for index, (name, view, mine) in enumerate(parts):
        own, tasks = images[mine], owners[mine]
        first = partial(name, passes * index)
        scores = log_likelihood(view, own, samples, tasks=tasks, compile=trainer.compile, partial=first)
        if fit:
            second = partial(f"{name} fitted", passes * index + 1)
            scores = scored_again(view, own, samples, scores, tasks=tasks, partial=second)
        found.append(scores)
    return LogLikelihood(*(torch.cat(columns, dim=1) for columns in zip(*found, strict=True)))


def _of_sums(total: Tensor, own: Tensor, squares: Tensor, *, samples: int) -> LogLikelihood:
    encoder_alone = torch.zeros_like(total, dtype=torch.bool)
    return LogLikelihood(total - math.log(samples), own - math.log(samples), (2 * total - squares).exp(), encoder_alone)


def _even(samples: int, most: int) -> int:
    """Return how many samples to take at once, at most `most`, if possible a divisor of `samples`.

    A shorter last chunk would have to be compiled separately.
    """
    most = max(1, min(samples, most))
    divisor = next(size for size in range(most, 0, -1) if samples % size == 0)
    return divisor if 2 * divisor >= most else most


def _noise(samples: int, latent_dim: int, seed: int, device: torch.device, purpose: str = "likelihood") -> Tensor:
    """Return the noise (S, L), which all images share."""
    generator = torch.Generator(device).manual_seed(seed_for(seed, purpose))
    return torch.randn(samples, latent_dim, generator=generator, device=device)


def _row(model: VAE, pixels: int) -> int:
    """Return the floats in memory per sample and image: decoder outputs or convolutions, and the prior's densities."""
    # A convolution, its normalisation and its ReLU each make an array; component densities are in float64.
    widths = [3 * layer.widest for layer in model.decoder.modules() if isinstance(layer, ConvDecoder | ResidualDecoder)]
    return max([pixels * model.likelihood.parameters, *widths]) + 4 * model.prior.components


def _chunk(replicas: Replicas, r: int, images: Tensor, tasks: Tensor | None, size: int) -> _Chunk:
    """Encode images (n, D) of tasks (n,) by one replica, padded to `size`."""
    tensors, rest = {name: tensor[r] for name, tensor in replicas.tensors().items()}, size - len(images)
    x, owners = torch.nn.functional.pad(images, (0, 0, 0, rest)), None
    if tasks is not None and replicas.model.prior.shares_mass:
        owners = torch.nn.functional.pad(tasks, (0, rest))
    posterior: DiagonalNormal = replicas.call(tensors, VAE.posterior, x)
    return _Chunk(tensors, x, owners, *posterior)


def proposed(model: VAE, x: Tensor, posterior: DiagonalNormal, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents z (n, s, L) of images x (n, D) drawn from their posteriors, log p(x | z) and log q(z | x), (n, s).

    An importance weight is p(x | z) p(z) / q(z | x); the prior is the caller's. All images share the noise (s, L).
    """
    mean, log_variance = posterior
    z = mean.unsqueeze(1) + noise * (0.5 * log_variance).exp().unsqueeze(1)
    output = model.likelihood.bounded(model.decode(z))
    log_q = -0.5 * ((noise.square() + LOG_TWO_PI).sum(-1) + log_variance.sum(-1, keepdim=True))
    return z, model.likelihood.log_prob(output, x.unsqueeze(1)), log_q


def _weigh(replicas: Replicas, chunk: _Chunk, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Σ w, the same under the own part of the prior, and log Σ w² over noise (s, L), each (n,)."""
    tensors, x, owners, mean, spread = chunk

    def log_weights(model: VAE) -> tuple[Tensor, Tensor]:
        if mean.ndim == 2:
            z, likelihood, log_q = proposed(model, x, DiagonalNormal(mean, spread), noise)
        else:
            z, likelihood, log_q = proposed_by_mixture(model, x, mean, spread, noise)
        rest = likelihood - log_q
        if owners is None:
            whole = own = model.prior.forward(model.posterior).log_prob(z)
        else:
            whole, own = model.prior.log_probs(model.posterior, z, owners)
        return rest + whole, rest + own

    whole, own = replicas.call(tensors, log_weights)
    return torch.logsumexp(whole, 1), torch.logsumexp(own, 1), torch.logsumexp(2 * whole, 1)


@functools.cache
def _compiled_weigh() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_weigh, dynamic=False)
