"""Classifiers that learn one task after another, R of them at once, on the engine of the trainer.

An MLP with two hidden layers, LeakyReLU, dropout and a head per task. The heads are rows of one matrix; the loss is the
cross-entropy over the classes of all tasks seen, −log p(class) = −log p(head) − log p(class | head), so one network
serves both settings: choosing among the classes of a given task (task-incremental), and among all classes seen
(class-incremental). `class_scores` classifies with a generator alone.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boovae.model import VAE
from boovae.model.nets import initialise
from boovae.replicas import Batch, Draw, Replicas
from boovae.replicas.devices import matmul_precision, one_thread
from boovae.replicas.engine import BLOCK, Engine
from boovae.replicas.step import GradientStep, Loss
from boovae.training.trainer import Trainer

WIDTH = 400
RATE = 1e-3
#: The logit of a class that has not been seen: no probability, and finite gradients.
UNSEEN = -1e4
#: Images per batch of a classifier, and latents per batch of `class_scores`.
CHUNK, LATENTS = 5000, 20_000


class MLP(nn.Module):
    """Two hidden layers with LeakyReLU and dropout; all heads side by side."""

    seen: Tensor  # (classes,): 0, or UNSEEN for classes that are still to be learned

    def __init__(self, pixels: int, classes: int, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(pixels, width), nn.Linear(width, width)
        self.heads = nn.Linear(width, classes)
        self.dropout = dropout
        self.register_buffer("seen", torch.full((classes,), UNSEEN))
        with torch.no_grad():
            initialise(self)

    def forward(self, x: Tensor, uniform: Tensor | None = None) -> Tensor:
        """Return logits (n, classes) of images (n, D); `uniform` (n, 2 . width) decides which units are dropped."""
        masks: Sequence[Tensor | float] = (1.0, 1.0)
        if uniform is not None:
            masks = ((uniform >= self.dropout) / (1 - self.dropout)).chunk(2, dim=1)
        hidden = F.leaky_relu(self.first(x)) * masks[0]
        hidden = F.leaky_relu(self.second(hidden)) * masks[1]
        logits: Tensor = self.heads(hidden) + self.seen
        return logits


class Classifiers:
    """R classifiers; `learn` adds the head of a task and trains on images that the replicas share, or on their own."""

    def __init__(
        self, pixels: int, classes: int, seeds: Sequence[int], device: torch.device, dropout: float, width: int = WIDTH
    ) -> None:
        self.width = width
        # The engine needs no more of a model than the objective uses.
        self.replicas = Replicas(lambda: cast(VAE, MLP(pixels, classes, width, dropout)), seeds, device)
        self.step = GradientStep(self.replicas, self.objective, compile=False)
        self.generators = self.replicas.generators
        self.tasks = 0

    def objective(self, model: Any, batch: Batch) -> Loss:
        """Return the mean cross-entropy of one replica; the last column of `x` is the class."""
        x = batch["x"]
        log_probs = model(x[:, :-1], batch.get("dropout")).log_softmax(-1)
        # Compare instead of indexing: a captured step must not look anything up.
        own = x[:, -1:] == torch.arange(log_probs.shape[1], device=x.device)
        return Loss(-((log_probs * own).sum(1) * batch["weight"]).sum(), {}, {})

    def learn(self, images: Tensor, labels: Tensor, classes: Sequence[int], *, epochs: int, batch_size: int) -> None:
        """Learn a task with new `classes`: images (N, D) and labels (N,) for all replicas, or (R, N, D) and (R, N)."""
        self.replicas.buffers["seen"][:, list(classes)] = 0.0
        rows = torch.cat([images, labels.unsqueeze(-1).to(images.dtype)], dim=-1)
        device = self.replicas.device
        with matmul_precision(device), one_thread(when=device.type == "cpu" and self.replicas.stacked):
            engine = Engine(self.step, rows, rows[..., :1, :], batch_size, {}, {})
            steps, batch = engine.steps_per_epoch, engine.batch_size
            draws = {"dropout": Draw("uniform", (batch, 2 * self.width))}
            for epoch in range(epochs):
                engine.rate.fill_(RATE * 0.5 * (1 + math.cos(math.pi * epoch / epochs)))
                key = ("classifier", self.tasks, epoch)
                order = self.generators.order(engine.images, *key)[:, : steps * batch].unflatten(1, (steps, batch))
                for block, part in enumerate(order.split(BLOCK, dim=1)):
                    noise = self.generators.draw_all(draws, *key, block, steps=part.shape[1])
                    engine.run_block(part, noise)
        self.tasks += 1

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return the logits (R, n, classes) of images (n, D), or of images per replica (R, n, D)."""
        each = images.expand(len(self.replicas), *images.shape[-2:])
        with matmul_precision(self.replicas.device):
            parts = [self.replicas.map(MLP.forward, part) for part in each.split(CHUNK, dim=1)]
        return torch.cat(parts, dim=1)


def accuracies(scores: Tensor, labels: Tensor, tasks: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return accuracy on every task seen, (T, R): among the task's own classes, and among all classes seen.

    `scores` (R, n, classes) of test images with `labels` (n,); `tasks` are the classes of each task.
    """
    labels, seen = labels.to(scores.device), [label for task in tasks for label in task]
    incremental = _best(scores, seen)
    rows = []
    for task in tasks:
        own = torch.isin(labels, torch.tensor(list(task), device=labels.device))
        within = _best(scores[:, own], task)
        rows.append(torch.stack([(guess == labels[own]).double().mean(1) for guess in (within, incremental[:, own])]))
    by_task, by_class = torch.stack(rows, dim=1)
    return by_task, by_class


def _best(scores: Tensor, classes: Sequence[int]) -> Tensor:
    """Return the most likely of the given classes, (R, n)."""
    columns = torch.tensor(list(classes), device=scores.device)
    return columns[scores[..., columns].argmax(-1)]


@torch.no_grad()
def class_scores(trainer: Trainer, images: Tensor, labels_of: Sequence[int], classes: int, samples: int) -> Tensor:
    """Return log p(x, class) (R, n, classes) of images (n, D), up to a constant per image; −inf for unseen classes.

    Importance sampling with the posterior as proposal; `labels_of` gives the class of each VAE task.
    """
    replicas = trainer.replicas
    noise = replicas.generators.draw(Draw("normal", (samples, trainer.settings.model.latent_dim)), "classify")
    sizes = torch.tensor(trainer.sizes, dtype=torch.float32, device=images.device)
    log_masses = (sizes / sizes.sum()).log()

    def joint(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
        posterior = model.posterior(x)
        wide = type(posterior)(*(part.unsqueeze(1) for part in posterior))
        z = wide.rsample(noise)  # (n, samples, L)
        output = model.likelihood.bounded(model.decode(z))
        rest = model.likelihood.log_prob(output, x.unsqueeze(1)) - wide.log_prob(z)
        parts = [model.prior.forward(model.posterior, task).log_prob(z) for task in range(len(labels_of))]
        return torch.logsumexp(rest.unsqueeze(2) + torch.stack(parts, 2), 1) + log_masses

    chunk = max(1, LATENTS // samples)
    with matmul_precision(trainer.device):
        parts = [replicas.map(joint, part.expand(len(replicas), -1, -1), noise) for part in images.split(chunk)]
    found = torch.cat(parts, 1)
    scores = torch.full((*found.shape[:2], classes), -torch.inf, device=images.device)
    scores[..., list(labels_of)] = found
    return scores
