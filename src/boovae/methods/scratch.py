"""`scratch`: train a new generator at every task, on its images and on samples of the old generator.

This is deep generative replay as published by Shin et al. (NeurIPS 2017), which BooVAE argues against: before a task
the old model draws as many images as all earlier tasks had, then a new model learns these and the new images together.
The cost of a task grows with the number of tasks before it, and every generation is a copy of a copy. Nothing is
stored between tasks but the model. The prior is that of `joint`: N(0, I), or a VampPrior that grows with the tasks.
"""

from dataclasses import replace

import torch
from torch import Tensor

from boovae.methods.joint import FreshModel
from boovae.methods.method import TaskImages
from boovae.replicas import Draw, Replicas, latent_draws
from boovae.replicas.prior_samples import drawn_images


class Scratch(FreshModel):
    """As `joint`, but the images of earlier tasks are drawn from the old model."""

    name = "scratch"
    summary = "a new model at every task, trained on the old one's samples and the new images"

    def images(self, replicas: Replicas, task: TaskImages) -> TaskImages:
        """Put images drawn from the old model before the task's own, as many as the earlier tasks had."""
        if task.index == 0:
            return task
        valid = max(1, round(task.images_before / task.own_images * task.valid.shape[-2]))
        drawn = {"train": task.images_before, "valid": valid}
        own = {split: getattr(task, split).expand(len(replicas), -1, -1) for split in drawn}
        past = {split: self._drawn(replicas, task, split, count) for split, count in drawn.items()}
        return replace(task, **own).with_images(**past)

    @torch.no_grad()
    def _drawn(self, replicas: Replicas, task: TaskImages, split: str, count: int) -> Tensor:
        """Return images of the past (R, count, D): means, or pixels of 0 and 1 if the data are binary."""
        generators, key = replicas.generators, ("scratch", task.index, split)
        noise = generators.draw_all(latent_draws(count, self.settings.model.latent_dim), *key)
        images = drawn_images(replicas, noise, task.train.shape[-1])
        if self.settings.data.binarize == "none" or (self.settings.data.binarize == "dynamic" and split == "train"):
            return images  # grey; `dynamic` draws new pixels in every epoch
        threshold = generators.draw(Draw("uniform", tuple(images.shape[1:])), *key, "pixels")
        return (threshold < images).to(images.dtype)
