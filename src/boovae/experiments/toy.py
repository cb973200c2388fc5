"""`boovae toy`: boosting on two densities in the plane, the paper's toy problem.

Two free Gaussians, learned one after the other, approximate twelve Gaussians, and eight approximate a ring. Without an
encoder there is no pixel range to bound a component: the paper's step KL[h ‖ π/r] has no minimum where the mixture r
has lighter tails than the target π, and the new component diverges. Three safeguards prevent this:

    box      the mean must stay in a box, as pseudo-inputs stay in the range of pixels
    floor    a broad Gaussian is mixed into r, so that −log r is bounded
    forward  KL[π ‖ (1 − β) r + β h] is minimised instead, the objective before linearisation

A component starts at the one of twenty samples of the target that the mixture covers least. The weights of all
components come from EM on samples of the target in every case, so only the objective differs.
"""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from torch import Tensor
from torch.func import vmap

from boovae.boosting.losses import component_log_probs, forward_loss, literal_loss, with_floor
from boovae.boosting.weights import em_weights
from boovae.experiments.options import ToyOptions
from boovae.model import DiagonalMixture, DiagonalNormal
from boovae.replicas import Draw, latent_draws
from boovae.replicas.descent import Descent
from boovae.replicas.devices import choose_device, one_thread
from boovae.replicas.randomness import Generators
from boovae.report.outputs import prepared, save_figure, write_table
from boovae.runs.environment import environment

#: Objectives for learning a component, with their labels in the figure.
OBJECTIVES = {
    "literal": "literal, no safeguard",
    "box": "literal, mean in a box",
    "floor": "literal, broad floor in r",
    "forward": "forward KL",
}
#: Number of components for each target, and the half-width of the box for their means.
TARGETS = {"gaussians": 2, "ring": 8}
BOXES = {"gaussians": 2.5, "ring": 2.0}
#: Distance from the centre to the edge of a panel.
EXTENTS = {"gaussians": 5.5, "ring": 4.0}
#: Share of the broad Gaussian in the mixture.
FLOOR = 0.05
#: Samples of the new component per step, of the target for a fit, and of the target for the divergence.
STEP_SAMPLES, FIT_SAMPLES, TEST_SAMPLES = 32, 2000, 20_000
#: Samples of the target among which the start of a component is chosen.
CANDIDATES = 20
#: Learning rate of means and log-variances.
RATE = 0.1


def run(out: Path, options: ToyOptions, *, device: str = "auto", command: str = "") -> list[dict[str, Any]]:
    """Approximate every target with every objective; write `toy.csv` and `toy.png`, return the rows."""
    place, folder = choose_device(device), prepared(out)
    with one_thread(when=place.type == "cpu"):
        fits = [Fit(*names, options, place) for names in product(options.target, options.objective)]
    rows = table(fits)
    write_table(folder / "toy.csv", rows, environment(place, False, command))
    save_figure(folder / "toy.png", draw(fits))
    return rows


def make_target(name: str) -> DiagonalMixture:
    """Return a target density: two groups of six Gaussians, or a ring of sixty narrow ones."""
    if name == "ring":
        mean, deviation = 2.0 * _circle(60), 0.2
    else:
        circle, shift = 0.8 * _circle(6), torch.tensor([2.0, 0.0])
        mean, deviation = torch.cat([circle + shift, circle - shift]), 0.35
    return DiagonalMixture(torch.zeros(len(mean)).log_softmax(0), mean, torch.full_like(mean, 2 * math.log(deviation)))


def _circle(points: int) -> Tensor:
    angle = torch.arange(points) * (2 * math.pi / points)
    return torch.stack([angle.cos(), angle.sin()], 1)


class Fit:
    """One target approximated with one objective by the greedy loop, for all seeds at once.

    Tensors have a leading replica axis: `mixtures` of k components (R, k), (R, k, 2), (R, k, 2). After each component
    (K, R): `divergence`, KL[target ‖ mixture] on samples that were not used for fitting, and `reverse`, KL[mixture ‖
    target].
    """

    def __init__(self, target: str, objective: str, options: ToyOptions, device: torch.device) -> None:
        self.target, self.objective, self.steps = target, objective, options.steps
        self.seeds = range(options.seed, options.seed + options.replicas)
        self.generators = Generators(self.seeds, device)
        parts = make_target(target)
        self.density = DiagonalMixture(*(part.to(device).expand(len(self.seeds), *part.shape) for part in parts))
        self.fit_samples = self._drawn(FIT_SAMPLES, "fit")
        box = (-BOXES[target], BOXES[target]) if objective == "box" else None
        self._literal, self._forward = Descent(_literal, box), Descent(_forward, box)
        learned, self.mixtures = list[DiagonalNormal](), list[DiagonalMixture]()
        for place in range(options.components or TARGETS[target]):
            mixture = self.mixtures[-1] if self.mixtures else None
            learned.append(self._learned(self._start(mixture, place), mixture, place))
            self.mixtures.append(self._weighted(learned))
        z = self._drawn(TEST_SAMPLES, "test")
        self.divergence = torch.stack([_divergence(self.density, mixture, z) for mixture in self.mixtures])
        drawn = ((mixture, self._drawn(TEST_SAMPLES, "reverse", mixture)) for mixture in self.mixtures)
        self.reverse = torch.stack([_divergence(mixture, self.density, z) for mixture, z in drawn])

    def _start(self, mixture: DiagonalMixture | None, place: int) -> Tensor:
        """Return the starting mean of a component (R, 2): the sample of the target that the mixture covers least."""
        z = self._drawn(CANDIDATES, f"start {place}")
        if mixture is None:
            return z[:, 0]
        least = vmap(DiagonalMixture.log_prob)(mixture, z).argmin(1)
        return z[torch.arange(len(z), device=z.device), least]

    def _learned(self, mean: Tensor, mixture: DiagonalMixture | None, place: int) -> DiagonalNormal:
        """Learn the next component (R, 2) from its starting mean; the first one matches the target alone."""
        start = [mean.clone(), torch.zeros_like(mean)]
        if mixture is not None and self.objective == "forward":
            even = torch.full_like(mean[:, 0], -math.log(place))
            arguments = self.fit_samples, vmap(DiagonalMixture.log_prob)(mixture, self.fit_samples)
            mean, log_variance, _ = self._forward([*start, even], arguments, steps=self.steps, rate=RATE)
            return DiagonalNormal(mean, log_variance)
        if mixture is None:  # there is no mixture yet: r is nearly constant
            zero = torch.zeros_like(mean[:, None])
            mixture = DiagonalMixture(zero[..., 0], zero, zero + 20.0)
        elif self.objective == "floor":
            mixture = vmap(lambda r, target: with_floor(r, target, FLOOR))(mixture, self.density)
        noise = self.generators.draw(Draw("normal", (STEP_SAMPLES, 2)), self.target, place, steps=self.steps)
        return DiagonalNormal(*self._literal(start, (self.density, mixture), steps=self.steps, rate=RATE, noise=noise))

    def _weighted(self, parts: Sequence[DiagonalNormal]) -> DiagonalMixture:
        joined = DiagonalNormal(*(torch.stack(columns, 1) for columns in zip(*parts, strict=True)))
        even = torch.zeros_like(joined.mean[..., 0]).log_softmax(-1)
        return DiagonalMixture(em_weights(vmap(component_log_probs)(joined, self.fit_samples), even), *joined)

    def _drawn(self, count: int, purpose: str, mixture: DiagonalMixture | None = None) -> Tensor:
        """Return samples of a mixture, or of the target, (R, count, 2)."""
        noise = self.generators.draw_all(latent_draws(count, 2), self.target, purpose)
        drawn: Tensor = vmap(DiagonalMixture.sample)(mixture or self.density, *noise.values())
        return drawn


def _divergence(one: DiagonalMixture, other: DiagonalMixture, z: Tensor) -> Tensor:
    """Return KL[one ‖ other] (R,), estimated from samples of `one`."""
    log_prob = vmap(DiagonalMixture.log_prob)
    ratio: Tensor = log_prob(one, z) - log_prob(other, z)
    return ratio.mean(1)


def _literal(learned: list[Tensor], arguments: Any, noise: Tensor) -> Tensor:
    return literal_loss(DiagonalNormal(*learned), noise, *arguments)


def _forward(learned: list[Tensor], arguments: Any, noise: Tensor) -> Tensor:
    return forward_loss(DiagonalNormal(*learned[:2]), learned[2], *arguments)


# --- the table and the figure ---------------------------------------------------------------------------------------


def table(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Return one row for every target, objective, number of components and seed."""
    return [
        {
            "target": fit.target,
            "objective": fit.objective,
            "components": count + 1,
            "seed": seed,
            "kl_target_mixture": fit.divergence[count, row].item(),
            "kl_mixture_target": fit.reverse[count, row].item(),
            "mean_x": mixture.mean[row, -1, 0].item(),
            "mean_y": mixture.mean[row, -1, 1].item(),
            "weight": mixture.log_weights[row, -1].exp().item(),
        }
        for fit in fits
        for count, mixture in enumerate(fit.mixtures)
        for row, seed in enumerate(fit.seeds)
    ]


def draw(fits: Sequence[Fit]) -> Figure:
    """Return the figure: a row per objective with the target and the growing mixture of the first seed."""
    by_name = {(fit.target, fit.objective): fit for fit in fits}
    objectives = list(dict.fromkeys(fit.objective for fit in fits))
    components = {fit.target: len(fit.mixtures) for fit in fits}
    columns = [(target, count) for target in components for count in _shown(components[target])]
    figure = Figure(figsize=(2.1 * len(columns) + 0.6, 2.3 * len(objectives) + 0.2), layout="constrained")
    grid = figure.subplots(len(objectives), len(columns), squeeze=False)
    for axes_row, objective in zip(grid, objectives, strict=True):
        for axes, (target, count) in zip(axes_row, columns, strict=True):
            _panel(axes, by_name[target, objective], count)
        axes_row[0].set_ylabel(OBJECTIVES[objective])
    return figure


def _shown(components: int) -> list[int]:
    """Return the numbers of components to show: 1, 2, 4, … and the last."""
    powers = [1 << power for power in range(components.bit_length())]
    return sorted({*powers, components})


def _panel(axes: Axes, fit: Fit, count: int) -> None:
    extent = EXTENTS[fit.target]
    line = torch.linspace(-extent, extent, 160)
    points = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).flatten(0, 1)
    density = make_target(fit.target).log_prob(points).exp().view(160, 160)
    axes.imshow(density, extent=(-extent, extent, -extent, extent), origin="lower", cmap="Greys", aspect="equal")
    mixture = DiagonalMixture(*(part[0].cpu() for part in fit.mixtures[count - 1]))
    outside = []
    for place, (log_weight, mean, log_variance) in enumerate(zip(*mixture, strict=True)):
        x, y = mean.tolist()
        if max(abs(x), abs(y)) > extent:
            outside.append((x, y))
            continue
        width, height = (4 * (0.5 * log_variance).exp()).tolist()  # two standard deviations on each side
        colour = "tab:red" if place == count - 1 else "tab:blue"  # the newest is red
        line_width = 0.6 + 3 * log_weight.exp().item() ** 0.5
        axes.add_patch(Ellipse((x, y), width, height, fill=False, edgecolor=colour, linewidth=line_width))
    for x, y in outside[:2]:
        length = 0.92 * extent / max(abs(x), abs(y))
        arrow = {"arrowstyle": "->", "color": "tab:red", "linewidth": 1.5}
        axes.annotate("", (x * length, y * length), (0.6 * x * length, 0.6 * y * length), arrowprops=arrow)
    if outside:
        text = f"{len(outside)} outside, one at ({outside[0][0]:.0f}, {outside[0][1]:.0f})"
        axes.text(0.5, 0.1, text, transform=axes.transAxes, ha="center", fontsize=7, color="tab:red")
    components = f"{count} component{'s' if count > 1 else ''}"
    axes.set_title(f"{components}: KL {fit.divergence[count - 1, 0].item():.3g}", fontsize=9)
    axes.set(xlim=(-extent, extent), ylim=(-extent, extent), xticks=[], yticks=[])
