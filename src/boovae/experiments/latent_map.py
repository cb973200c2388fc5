"""`boovae latent-map`: the prior and the aggregated posterior in a two-dimensional latent space.

The prior that maximises the ELBO is the aggregated posterior q̂(z) = 1/n Σ_x q(z | x). A standard normal cannot match
it, a boosted prior can; two dimensions make this visible. Both models learn the same tasks one after another. After
every task each gets a map, and a Monte Carlo estimate of KL[q̂ ‖ prior] on the test images of all tasks seen.
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from boovae.config import Settings
from boovae.data import Task
from boovae.errors import InputError, SettingError
from boovae.methods import from_mapping
from boovae.model import VAE, DiagonalMixture, DiagonalNormal
from boovae.replicas import latent_draws
from boovae.replicas.devices import choose_device, matmul_precision
from boovae.report.outputs import prepared, save_figure, write_table
from boovae.runs.data import load_data
from boovae.runs.environment import environment
from boovae.runs.progress import Watch, make_display
from boovae.runs.train import planned_tasks, trainer_for
from boovae.training.trainer import Trainer

#: Samples of the aggregated posterior for estimating the divergence.
SAMPLES = 50_000
#: Points along each side of a map, and latents per batch.
POINTS, CHUNK = 160, 5000

Grid = npt.NDArray[np.float32]


class Map(NamedTuple):
    """One model after one task; all but the divergence comes from the first replica."""

    method: str
    seen: int
    divergence: list[float]  # of each replica: KL[q̂ ‖ prior] in nats
    codes: Grid  # (n, 2): posterior means of the test images
    labels: npt.NDArray[np.int64]  # (n,): their classes
    extent: float  # distance from the centre to the edge of the map
    aggregated: Grid  # (POINTS, POINTS): density of the aggregated posterior
    prior: Grid  # (POINTS, POINTS): density of the prior


def run(
    settings: Settings, out: Path, *, data_dir: Path | None, device: str, compile: str, quiet: bool, command: str
) -> list[dict[str, Any]]:
    """Train both models and map them; write `latent_map.csv` and `latent_map.png`, return the rows."""
    check(settings)
    place, folder = choose_device(device), prepared(out)
    stream = planned_tasks(load_data(settings, data_dir), settings)
    rows, maps = list[dict[str, Any]](), list[Map]()
    with closing(make_display(quiet=quiet)) as display:
        for method in ("standard", settings.method):
            trainer = trainer_for(from_mapping({**settings.flat(), "method": method}), stream, place, compile)
            for index, task in enumerate(stream):
                display.task(index, len(stream), f"{method}, {task.name}", trainer.settings.training.epochs)
                trainer.learn(task, Watch(display))
                with matmul_precision(place):
                    maps.append(make_map(trainer, stream[: index + 1]))
                head = {"dataset": settings.data.dataset, "method": method, "tasks_seen": index + 1}
                by_seed = zip(settings.training.seeds, maps[-1].divergence, strict=True)
                rows += [{**head, "seed": seed, "kl": kl} for seed, kl in by_seed]
                # Write after every map, so that an interrupted run leaves complete files.
                write_table(folder / "latent_map.csv", rows, environment(place, trainer.compile, command))
                save_figure(folder / "latent_map.png", draw(maps))
    return rows


def check(settings: Settings) -> None:
    """Refuse settings that cannot be drawn in two dimensions, or beside `standard`."""
    if settings.model.latent_dim != 2:
        raise SettingError("latent_dim", settings.model.latent_dim, "2, the dimensions of a map; leave it out")
    if settings.method == "standard":
        raise InputError("{method=standard}: the map always shows it; name a method to compare with it, such as boo")
    if "multihead" in settings.method.split("+"):
        raise InputError(f"{{method={settings.method}}}: each task has its own encoder, so there is no common map")


@torch.no_grad()
def make_map(trainer: Trainer, tasks: Sequence[Task], samples: int = SAMPLES) -> Map:
    """Return the map of a model on the test images of the tasks seen."""
    images = torch.cat([task.test.images for task in tasks]).to(trainer.device)
    posterior = trainer.replicas.map(VAE.posterior, images.expand(len(trainer.replicas), -1, -1))
    codes = posterior.mean[0].cpu()
    # Include two standard deviations: the Gaussians must fit on the map, not only their means.
    reach = codes.abs() + 2 * (0.5 * posterior.log_variance[0].cpu()).exp()
    extent = 1.1 * max(3.0, reach.quantile(0.999).item())
    line = torch.linspace(-extent, extent, POINTS, device=trainer.device)
    points = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).flatten(0, 1)
    points = points.expand(len(trainer.replicas), -1, -1)
    log_densities = [
        [log_prob(part)[0] for part in points.split(CHUNK, dim=1)]
        for log_prob in (partial(aggregated, posterior), partial(prior_log_prob, trainer))
    ]
    densities = [torch.cat(parts).exp().view(POINTS, POINTS).cpu().numpy() for parts in log_densities]
    return Map(
        trainer.settings.method,
        len(tasks),
        divergence_to_prior(trainer, posterior, samples).tolist(),
        codes.numpy(),
        torch.cat([task.test.labels for task in tasks]).numpy(),
        extent,
        *densities,
    )


def divergence_to_prior(trainer: Trainer, posterior: DiagonalNormal, samples: int) -> Tensor:
    """Return KL[q̂ ‖ prior] (R,) for posteriors (R, n, L), estimated from samples of q̂."""
    images, latent_dim = posterior.mean.shape[1:]
    noise = trainer.replicas.generators.draw_all(latent_draws(samples, latent_dim), "map")
    chosen = (noise["uniform"] * images).long().clamp(max=images - 1).unsqueeze(2)
    z = DiagonalNormal(*(part.take_along_dim(chosen, 1) for part in posterior)).rsample(noise["normal"])
    ratios = [aggregated(posterior, part) - prior_log_prob(trainer, part) for part in z.split(CHUNK, dim=1)]
    return torch.cat(ratios, 1).mean(1)


def aggregated(posterior: DiagonalNormal, z: Tensor) -> Tensor:
    """Return log q̂(z) (R, m) at z (R, m, L) for posteriors (R, n, L), one replica after another to save memory."""
    even = torch.zeros_like(posterior.mean[0, :, 0]).log_softmax(-1)
    rows = zip(*posterior, z, strict=True)
    return torch.stack([DiagonalMixture(even, mean, log_variance).log_prob(own) for mean, log_variance, own in rows])


def prior_log_prob(trainer: Trainer, z: Tensor) -> Tensor:
    """Return the log-density of each replica's whole prior at z (R, m, L): (R, m)."""

    def one(model: VAE, z: Tensor) -> Tensor:
        return model.prior.forward(model.posterior).log_prob(z)

    return trainer.replicas.map(one, z)


# --- the figure -----------------------------------------------------------------------------------------------------

ROWS = ("codes by class", "aggregated posterior", "prior")


def draw(maps: Sequence[Map]) -> Figure:
    """Return the figure: a column per number of tasks seen; rows for codes, aggregated posterior and prior."""
    methods = list(dict.fromkeys(one.method for one in maps))
    columns = max(one.seen for one in maps)
    figure = Figure(figsize=(2.1 * columns + 0.5, 2.2 * len(ROWS) * len(methods)), layout="constrained")
    grid = figure.subplots(len(ROWS) * len(methods), columns, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[], aspect="equal")
    for one in maps:
        top = len(ROWS) * methods.index(one.method)
        _panels(grid[top : top + len(ROWS), one.seen - 1], one)
    for row, axes in enumerate(grid[:, 0]):
        name = ROWS[row % len(ROWS)]
        axes.set_ylabel(name if row % len(ROWS) else f"{methods[row // len(ROWS)]}\n{name}")
    return figure


def _panels(column: npt.NDArray[Any], one: Map) -> None:
    """Draw the three panels of a map."""
    codes, *densities = column
    size = min(max(2000 / len(one.codes), 2), 8)
    codes.scatter(*one.codes.T, c=one.labels % 10, cmap="tab10", vmin=0, vmax=9, s=size, linewidths=0)
    kl = sum(one.divergence) / len(one.divergence)
    codes.set_title(f"{one.seen} task{'s' if one.seen > 1 else ''}: KL {kl:.2f}", fontsize=9)
    # Both densities share a scale; the square root keeps sharp peaks from hiding the rest.
    highest = max(np.quantile(one.aggregated, 0.998), np.quantile(one.prior, 0.998)) ** 0.5
    for axes, density in zip(densities, (one.aggregated, one.prior), strict=True):
        extent = (-one.extent, one.extent, -one.extent, one.extent)
        axes.imshow(density**0.5, vmin=0, vmax=highest, extent=extent, origin="lower", cmap="magma")
    for axes in column:
        axes.set(xlim=(-one.extent, one.extent), ylim=(-one.extent, one.extent))
