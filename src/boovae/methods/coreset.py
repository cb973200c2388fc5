"""`coreset`: keep a few real images of each finished task and learn them again.

When a task ends, each replica chooses `coreset_images` of the training images and keeps them: at random, or far from
each other (`kcenter`: greedy farthest points from a random start in pixel space; Gonzalez, 1985; for coresets
Nguyen et al., 2018). Two ways to use them (`coreset_mode`):

- `append`: add them to the training set, so that each is seen once per epoch; this matches the paper's numbers.
- `batch`: add them to every batch, as the paper describes; every image has the same weight.

Deviation from the released code, which samples from all old images again for every new task.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from boovae.config import Settings
from boovae.config.section import AtLeastOne, Section
from boovae.methods.method import Method, TaskImages
from boovae.model import VAE
from boovae.replicas import Batch, Draw, Replicas, bound_before


@dataclass(frozen=True)
class CoresetSettings(Section):
    """The real images that are kept."""

    coreset_images: AtLeastOne = 15
    """Number of images kept per task."""
    coreset_mode: Literal["append", "batch"] = "append"
    """Add kept images to the training set, or to every batch."""
    coreset_choice: Literal["random", "kcenter"] = "random"
    """Keep random images, or images far from each other."""


class Coreset(Method):
    """A few real images of each finished task, learned again with every later one."""

    name = "coreset"
    summary = "keeps a few real images of each finished task and learns them again"
    sections = (CoresetSettings,)
    stores_examples = True
    shared_memory = frozenset({"counts"})

    own: CoresetSettings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.settled_by = 2 if self.own.coreset_mode == "batch" else 1

    # --- which images are kept ----------------------------------------------------------------------------------

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Choose some of the task's own images and keep them."""
        own = task.train[..., -task.own_images :, :]  # kept ones come first
        own = own.expand(len(replicas), *own.shape[-2:])
        count = min(self.own.coreset_images, task.own_images)
        if count < self.own.coreset_images:
            self.say(task, f"the task has only {count} images, fewer than coreset_images; all are kept")
        chosen = replicas.generators.order(task.own_images, "coreset", task.index)
        if self.own.coreset_choice == "kcenter":
            chosen = farthest_points(own, chosen[:, 0], count)
        images = own.take_along_dim(chosen[:, :count].unsqueeze(2), dim=1).unsqueeze(1)
        now = {"images": images, "counts": torch.tensor([count], device=replicas.device)}
        rows, counts = ([self.memory[name], now[name]] if self.memory else [now[name]] for name in now)
        width = max(row.shape[2] for row in rows)
        padded = [F.pad(row, (0, 0, 0, width - row.shape[2])) for row in rows]  # tasks with fewer images are padded
        self.memory = {"images": torch.cat(padded, dim=1), "counts": torch.cat(counts)}

    def stored_images(self) -> Tensor | None:
        """Return the kept images (R, M, D) of all finished tasks, or None if there are none."""
        if not self.memory:
            return None
        counts = self.memory["counts"].tolist()
        return torch.cat([self.memory["images"][:, task, :count] for task, count in enumerate(counts)], dim=1)

    def images_stored(self) -> int:
        """Return the number of kept images."""
        return int(self.memory["counts"].sum()) if self.memory else 0

    def memory_shapes(self, replicas: Replicas, tasks: int, pixels: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the images (R, T, m, D), and of the number of images per task (T,)."""
        return {"images": (len(replicas), tasks, -1, pixels), "counts": (tasks,)} if tasks else {}

    # --- how they are learned again -----------------------------------------------------------------------------

    def images(self, replicas: Replicas, task: TaskImages) -> TaskImages:
        """Put the kept images before the task's own ones (append); validation images remain the task's own."""
        kept = self.stored_images()
        if kept is None or self.own.coreset_mode == "batch":
            return task
        own = task.train.expand(len(replicas), *task.train.shape[-2:])
        return replace(task, train=torch.cat([kept, own], dim=1))

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Provide the kept images to the loss (batch)."""
        kept = self.stored_images()
        if kept is not None and self.own.coreset_mode == "batch":
            number = torch.full((len(replicas),), float(kept.shape[1]), device=replicas.device)
            self.state = {"images": kept, "number": number}

    def training_draws(self, batch_size: int) -> dict[str, Draw]:
        """Return noise for the kept images of a step, and a random choice if they outnumber the batch."""
        if not self.state:
            return {}
        kept = self.state["images"].shape[1]
        draws = {"kept_noise": Draw("normal", (min(kept, batch_size), self.settings.model.latent_dim))}
        if kept > batch_size:
            draws["kept_order"] = Draw("uniform", (kept,))
        return draws

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return (M / B) times the kept images' mean negative ELBO; validation leaves it out."""
        if not batch["state"]:
            return {}
        if "kept_noise" not in batch:
            return {"kept": torch.zeros_like(batch["kl_weight"])}
        images, noise = batch["state"]["images"], batch["kept_noise"]
        if "kept_order" in batch:
            images = images[batch["kept_order"].argsort(stable=True)[: len(noise)]]
        if "pixels" in batch:  # thresholds of the batch, which has at least as many images
            images = (batch["pixels"][: len(noise)] < images).to(images.dtype)
        loss = bound_before(model, images, noise).weighted(batch["kl_weight"])
        # M and 1 / B as tensors: compiled code cannot multiply by a quotient of sizes that vary from task to task.
        return {"kept": batch["state"]["number"] * batch["weight"][0] * loss.mean()}


def farthest_points(images: Tensor, start: Tensor, count: int) -> Tensor:
    """Choose images (R, count) from (R, N, D), each the farthest from those chosen before it.

    The first is `start` (R,). The largest distance of an image to the chosen ones is at most twice the optimum.
    """
    images = images.contiguous()
    rows = torch.arange(len(images), device=images.device)
    chosen = [start]
    nearest = torch.full_like(images[..., 0], torch.inf)  # distance of each image to the chosen ones
    for _ in range(count - 1):
        centre = images[rows, chosen[-1]].unsqueeze(1)
        distance = torch.cdist(images, centre, compute_mode="donot_use_mm_for_euclid_dist").squeeze(2)
        nearest = torch.minimum(nearest, distance)
        nearest[rows, chosen[-1]] = -1.0  # never chosen again, even if images are equal
        chosen.append(nearest.argmax(1))
    return torch.stack(chosen, 1)
