"""`joint`: keep all images of the tasks seen so far and train on them from scratch at every task.

Not a continual method but the upper bound of every comparison: the result of the same network without forgetting. The
prior is N(0, I) or, with `--prior vamp`, a VampPrior (Tomczak and Welling, 2018) with `components`
pseudo-inputs for each task seen, started at random training images.
"""

import torch

from boovae.methods.method import Method, TaskImages
from boovae.model import Prior, VampPrior
from boovae.replicas import Replicas


class FreshModel(Method):
    """Trains a new model at every task; the base of `joint` and `scratch`."""

    def make_prior(self, pixels: int, pixel_range: tuple[float, float]) -> Prior | None:
        """Return a VampPrior with capacity for the tasks seen so far, if the settings ask for one."""
        if self.settings.model.prior == "vamp":
            return VampPrior(self.settings.model.components * max(self.tasks_seen, 1), pixels, pixel_range)
        return None

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Initialise the model; pseudo-inputs start at random training images, repeated if too few."""
        replicas.initialise()
        if isinstance(replicas.model.prior, VampPrior):
            order = replicas.generators.order(task.train.shape[-2], "vamp", task.index)
            places = torch.arange(len(replicas.model.prior.logits), device=order.device) % order.shape[1]
            starts = task.train.expand(len(replicas), -1, -1).take_along_dim(order[:, places, None], 1)
            replicas.parameters["prior.logits"].copy_(replicas.model.prior.logits_of(starts))


class Joint(FreshModel):
    """Training on everything seen so far."""

    name = "joint"
    summary = "keeps every image and trains on all of them from scratch: the upper bound"
    stores_examples = True
    shared_memory = frozenset({"train", "valid"})

    def images(self, replicas: Replicas, task: TaskImages) -> TaskImages:
        """Put the images of all earlier tasks before the task's own."""
        return task.with_images(**self.memory) if self.memory else task

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Keep all images."""
        self.memory = {"train": task.train, "valid": task.valid}

    def images_stored(self) -> int:
        """Return the number of images seen."""
        return sum(len(images) for images in self.memory.values())

    def memory_shapes(self, replicas: Replicas, tasks: int, pixels: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the kept images."""
        return {"train": (-1, pixels), "valid": (-1, pixels)} if tasks else {}
