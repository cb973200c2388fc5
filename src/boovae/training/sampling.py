"""Draw images from a trained model."""

import torch
from torch import Tensor

from boovae.errors import InputError
from boovae.replicas.prior_samples import drawn_images
from boovae.replicas.randomness import latent_draws
from boovae.training.trainer import Trainer


@torch.no_grad()
def generate(
    trainer: Trainer, count: int, purpose: str = "samples", task: int | None = None, *, uniform: Tensor | None = None
) -> Tensor:
    """Return `count` mean images from each replica's prior, (R, count, D); with `task`, from that task's part alone.

    With `uniform` numbers (R, count, D) the images are drawn from p(x | z) instead.

    The random numbers depend only on the replica's seed and the purpose: they are the same for every task. If the model
    must know the task, the images alternate between all tasks.
    """
    replicas = trainer.replicas
    if task is not None and not 0 <= task < max(trainer.tasks_done, 1):
        raise InputError(f"task is {task}; this model has learned tasks 0 to {trainer.tasks_done - 1}")
    if count < 1:
        raise InputError(f"count is {count}; it must be a whole number of at least 1")
    noise = replicas.generators.draw_all(latent_draws(count, replicas.model.latent_dim), purpose)
    if uniform is not None:
        noise["pixels"] = uniform
    pixels = trainer.spec.pixels
    if not trainer.method.knows_task:
        return drawn_images(replicas, noise, pixels, task)
    tasks = range(max(trainer.tasks_done, 1)) if task is None else [task]
    result = torch.empty(len(replicas), count, pixels, device=replicas.device)
    for turn, owner in enumerate(tasks):
        rows = {name: tensor[:, turn :: len(tasks)] for name, tensor in noise.items()}
        if rows["uniform"].shape[1]:
            result[:, turn :: len(tasks)] = drawn_images(trainer.view(owner), rows, pixels, owner)
    return result
