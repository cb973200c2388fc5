"""Inspect and prune the components that a run stores: their weights, pictures, and the cost of dropping each.

The mixture of a task is m = Σ_k v_k h_k. Without component k, the other weights scaled up, it is
m_k = (m − v_k h_k) / (1 − v_k), and dropping k costs

    KL[m ‖ m_k] = E_m[r − 1 − log r],  r = m_k / m

nats, estimated on fixed samples of every component. E_m[r − 1] is zero; it keeps every term non-negative and makes
small costs precise.
"""

import base64
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from boovae.boosting.losses import component_log_probs
from boovae.errors import InputError
from boovae.files import write_file
from boovae.model.distributions import DiagonalNormal
from boovae.model.priors.boosted import EMPTY, TaskMixture
from boovae.model.vae import VAE
from boovae.replicas.randomness import Draw, Generators
from boovae.replicas.stacked import replica_of
from boovae.runs.run import Run
from boovae.training.events import Event
from boovae.training.trainer import Trainer

#: Samples of a task's mixture, equally many of each component.
SAMPLES = 4096
#: Buffer of the prior's weights; a method keeps them in its memory under the last part of this name.
WEIGHTS = "prior.log_weights"


@dataclass(frozen=True, eq=False)
class Component:
    """One stored component of one replica."""

    task: int
    place: int  # slot within its task
    weight: float  # within its task
    mass: float  # in the whole prior
    cost: float  # nats lost by dropping it; infinite for the only one
    share: float  # of the costs of all components of its task; NaN for the only one
    pseudo_input: Tensor  # (D,)
    decoded: Tensor  # (D,), the mean image at the component's mean

    @property
    def only(self) -> bool:
        """Whether it is the only component of its task."""
        return math.isinf(self.cost)

    def numbers(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return its numbers for JSON; None where one is not finite."""
        values = {"weight": self.weight, "mass": self.mass, "cost": self.cost, "share": self.share}
        rounded = {key: float(f"{value:.6g}") if math.isfinite(value) else None for key, value in values.items()}
        return {"task": self.task, "name": names.get(self.task, ""), "component": self.place, **rounded}


# --- what dropping a component costs --------------------------------------------------------------------------------


def drop_costs(log_weights: Tensor, parts: DiagonalNormal, noise: Tensor) -> Tensor:
    """Return KL[m ‖ m without it] of each component, (K,); infinite for the only one and for empty slots.

    `log_weights` (K,), `parts` (K, L); `noise` (K, S, L) is standard normal: S samples of each component.
    """
    stored = log_weights > EMPTY / 2
    wide = log_weights.double().masked_fill(~stored, -math.inf).log_softmax(-1)
    parts = DiagonalNormal(*(part.double() for part in parts))
    z = DiagonalNormal(*(part.unsqueeze(1) for part in parts)).rsample(noise.double()).flatten(0, 1)
    scores = component_log_probs(parts, z) + wide
    log_ratio = _sum_of_others(scores) - scores.logsumexp(-1, keepdim=True) - _sum_of_others(wide)
    per_component = (torch.expm1(log_ratio) - log_ratio).unflatten(0, noise.shape[:2]).mean(1)
    costs: Tensor = wide.exp() @ per_component
    return costs.masked_fill(~stored | (stored.sum() == 1), math.inf)


def _sum_of_others(scores: Tensor) -> Tensor:
    """Return log Σ_{j ≠ k} exp(s_j) for every k of the last axis.

    Subtracting a term from the sum is exact for all but the largest; for that one the others are summed again.
    """
    whole = scores.logsumexp(-1, keepdim=True)
    largest = torch.arange(scores.shape[-1], device=scores.device) == scores.argmax(-1, keepdim=True)
    rest = whole + torch.log1p(-(scores - whole).exp().masked_fill(largest, 0.0))
    return torch.where(largest, scores.masked_fill(largest, -math.inf).logsumexp(-1, keepdim=True), rest)


def pruned(log_weights: Tensor, parts: DiagonalNormal, noise: Tensor, cost: float) -> Tensor:
    """Drop components that cost less than `cost`, the cheapest first, one at a time; return the log-weights (R, K).

    Costs are recomputed after each drop: once one of two equal components is gone, the other becomes expensive.
    """
    places = torch.arange(log_weights.shape[1], device=log_weights.device)
    while True:
        least, cheapest = vmap(drop_costs)(log_weights, parts, noise).min(1, keepdim=True)
        cheap = least < cost
        if not cheap.any():
            return log_weights
        empty = (places == cheapest) | (log_weights <= EMPTY / 2)
        fewer = log_weights.masked_fill(empty, EMPTY).log_softmax(1).masked_fill(empty, EMPTY)
        log_weights = torch.where(cheap, fewer, log_weights)


def _noise(trainer: Trainer, task: int, replicas: slice = slice(None)) -> Tensor:
    """Draw the noise of a task's samples, (R, K, S, L); it depends only on seed and task."""
    places = trainer.replicas.buffers[WEIGHTS].shape[2]
    draw = Draw("normal", (places, max(1, SAMPLES // places), trainer.settings.model.latent_dim))
    return Generators(trainer.replicas.seeds[replicas], trainer.device).draw(draw, "inspect", task)


# --- looking --------------------------------------------------------------------------------------------------------


def has_components(trainer: Trainer) -> bool:
    """Whether the prior stores components."""
    return isinstance(trainer.replicas.model.prior, TaskMixture)


def require_components(trainer: Trainer) -> None:
    """Refuse a model without components."""
    method = trainer.settings.method
    if not has_components(trainer):
        raise InputError(
            f"method '{method}' stores no components; train a run with {{method=boo}} or boo+distill to have some"
        )
    if trainer.tasks_done == 0:
        raise InputError("no task is finished yet, so there are no components: continue the run with `boovae train`")


@torch.no_grad()
def components(trainer: Trainer, replica: int = 0) -> list[Component]:
    """Return every component of the finished tasks, task by task, the most expensive to drop first."""
    found = []
    for task in range(trainer.tasks_done):
        view = trainer.view(task)
        tensors = replica_of(view.tensors(), replica)
        parts, decoded = view.call(tensors, _gaussians_and_images, task)
        log_weights, inputs = tensors[WEIGHTS], tensors["prior.pseudo_inputs"]
        costs = drop_costs(log_weights[task], parts, _noise(trainer, task, slice(replica, replica + 1))[0])
        shares = costs / costs.masked_fill(log_weights[task] <= EMPTY / 2, 0.0).sum()
        weights = log_weights[task].double().exp()
        masses = weights * tensors["prior.log_masses"][task].double().exp()
        numbers = torch.stack([weights, masses, costs, shares], 1).tolist()
        for place in (log_weights[task] > EMPTY / 2).nonzero().flatten().tolist():
            weight, mass, cost, share = numbers[place]
            found.append(Component(task, place, weight, mass, cost, share, inputs[task, place], decoded[place]))
    return sorted(found, key=lambda component: (component.task, -component.cost))


def _gaussians_and_images(model: VAE, task: int) -> tuple[DiagonalNormal, Tensor]:
    """Return a task's Gaussians (K, L) of one replica and the mean images (K, D) at their means."""
    assert isinstance(model.prior, TaskMixture)
    parts = DiagonalNormal(*(part[task] for part in model.prior.stored(model.posterior)))
    return parts, model.images(model.prior.outward(parts.mean))


# --- dropping -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def prune(trainer: Trainer, cost: float, tasks: Sequence[int]) -> list[Event]:
    """Drop components that cost less than `cost`, in all replicas, from prior and memory; return the events."""
    parts: DiagonalNormal = trainer.replicas.map(lambda model: model.prior.stored(model.posterior))
    log_weights = trainer.replicas.buffers[WEIGHTS]
    events = []
    for task in tasks:
        before = log_weights[:, task].clone()
        own = DiagonalNormal(*(part[:, task] for part in parts))
        log_weights[:, task] = pruned(before, own, _noise(trainer, task), cost)
        count_before, kept = ((weights > EMPTY / 2).sum(1) for weights in (before, log_weights[:, task]))
        if (kept < count_before).any():
            dropped = (count_before - kept).tolist()
            events.append({"event": "prune", "task": task, "cost": cost, "dropped": dropped, "kept": kept.tolist()})
    kept_as = WEIGHTS.removeprefix("prior.")
    for part in trainer.method.parts:  # those that keep the weights in their memory
        if kept_as in part.memory:
            part.memory[kept_as] = log_weights[:, : trainer.tasks_done].clone()
    return events


def prune_run(run: Run, trainer: Trainer, cost: float, tasks: Sequence[int]) -> list[Event]:
    """Prune a run between two tasks and update its folder: log, checkpoint, numbers and pictures."""
    if not 0 < cost < math.inf:
        raise InputError(f"{{prune}} is {cost}; it must be a number of nats above 0, for example 0.001")
    if trainer.in_task:
        raise InputError(
            f"{run.folder} is in the middle of a task: let `boovae train` finish it, then prune ({{prune}})"
        )
    run.restore(trainer)  # the log may be ahead of the checkpoint
    events = prune(trainer, cost, tasks)
    if events:
        for event in events:
            run.event(event)
        run.checkpoint(trainer)
        save_components(run, trainer)
    return events


# --- writing --------------------------------------------------------------------------------------------------------


def save_components(run: Run, trainer: Trainer) -> None:
    """Write the first replica's components into the run folder: numbers with small pictures, and a gallery."""
    names, found = task_names(run), components(trainer)
    listed = [component.numbers(names) | _pictures(component, trainer) for component in found]
    write_file(run.files.components, json.dumps({"replica": 0, "components": listed}, indent=1).encode())
    save_gallery(run.files.components_picture, found, trainer, names)


def task_names(run: Run) -> dict[int, str]:
    """Return the names of the tasks begun so far."""
    return {event["task"]: event["name"] for event in run.events("task_start")}


def save_gallery(path: Path, found: Sequence[Component], trainer: Trainer, names: Mapping[int, str]) -> None:
    """Write components as PNG: for each task a row of pseudo-inputs above a row of their decoded images."""
    from boovae.report.pictures import gallery, png

    labelled = []
    for task, components in itertools.groupby(found, key=lambda component: component.task):
        pairs = torch.stack([torch.stack([each.pseudo_input, each.decoded]) for each in components], dim=1)
        labelled.append((names.get(task, f"task {task}"), pairs.cpu().numpy()))
    write_file(path, png(gallery(labelled, trainer.spec.shape, trainer.spec.pixel_range)))


def _pictures(component: Component, trainer: Trainer) -> dict[str, str]:
    """Return pseudo-input and decoded image as PNG in base64."""
    from boovae.report.pictures import grid, png, tile_scale

    def picture(image: Tensor) -> str:
        spec, images = trainer.spec, image.unsqueeze(0).cpu().numpy()
        shown = grid(images, spec.shape, 1, tile_scale(spec.shape), spec.pixel_range)
        return base64.b64encode(png(shown)).decode("ascii")

    return {"pseudo_input": picture(component.pseudo_input), "decoded": picture(component.decoded)}
