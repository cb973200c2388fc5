"""What the page of `boovae serve` asks of a model: samples, paths between two images, and a look at an uploaded image.

The task of an image x is judged by Bayes' rule: p(task | x) ∝ mass of the task · p(x | task), where p(x | task) is the
importance-sampled likelihood under the task's own part of the prior (`own` in metrics/likelihood.py).
"""

import functools
import io
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from boovae.config.section import AtLeastOne, checked
from boovae.data.arrays import TEST, as_images, to_float
from boovae.data.folders import read_picture
from boovae.data.tasks import binarized
from boovae.errors import InputError
from boovae.metrics.likelihood import log_likelihood, log_likelihood_of_each_task
from boovae.model import VAE, DiagonalNormal
from boovae.model.priors.boosted import TaskMixture
from boovae.replicas.devices import matmul_precision, one_thread
from boovae.replicas.randomness import Generators, latent_draws
from boovae.replicas.stacked import Replicas, replica_of
from boovae.report.frame import image_source
from boovae.report.pictures import png, singles
from boovae.runs.inspection import Component, components, has_components, task_names
from boovae.runs.run import Run
from boovae.training.trainer import Trainer

#: Most pixels of an uploaded picture: a photograph of 24 megapixels takes 72 MB decoded.
MOST_PIXELS = 24_000_000
#: How far from the origin a latent coordinate may lie; no prior or encoder comes near it.
FARTHEST = 1e4

Coordinate = Annotated[float, Field(ge=-FARTHEST, le=FARTHEST)]


class Exchanged(BaseModel):
    """Base of requests: no type conversion, no extra fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Point(Exchanged):
    """A point in the latent space and its task; None if the model does not distinguish tasks."""

    z: list[Coordinate] = Field(max_length=4096)
    task: int | None = None


class Player:
    """One replica of a trained model to play with. It never changes, and many threads may use it at once."""

    def __init__(self, run: Run, trainer: Trainer, replica: int = 0, samples: int = 1000) -> None:
        """Load what is needed into memory; `run` may be closed afterwards. `samples`: importance samples per image."""
        if trainer.tasks_done == 0:
            raise InputError(f"{run.folder} has not finished its first task yet: continue it with `boovae train`")
        self.name, self.samples = run.folder.resolve().name, checked("samples", samples, AtLeastOne)
        self.settings, self.device, self.count = trainer.settings, trainer.device, trainer.tasks_done
        self.spec = trainer.spec
        self.networks = trainer.method.knows_task  # each task has networks of its own
        prior = trainer.replicas.model.prior
        #: Whether a task can be chosen and the task of an image be judged.
        self.apart = self.networks or prior.shares_mass
        views = range(self.count if self.networks else 1)
        self._views: list[Replicas] = [trainer.view(task).only(replica) for task in views]
        self._log_masses = torch.full((self.count,), -math.log(self.count), device=self.device)
        if prior.shares_mass:
            self._log_masses = self._views[0].buffers["prior.log_masses"][0, : self.count].log_softmax(0)
        names, typical = task_names(run), _typical(run, self.count, replica, own=self.apart)
        self.tasks = [
            {"name": names.get(task, str(task)), "mass": mass, "typical": typical[task]}
            for task, mass in enumerate(self._log_masses.exp().tolist())
        ]
        self.components = components(trainer, replica) if has_components(trainer) else []
        self._lock = threading.Lock()  # one thread at a time uses the model: a call swaps its weights in

    # --- requests -----------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Return what the page needs to know first."""
        return {
            "run": self.name,
            "method": self.settings.method,
            "dataset": self.settings.data.dataset,
            "shape": list(self.spec.shape),
            "latent_dim": self.settings.model.latent_dim,
            "samples": self.samples,
            "apart": self.apart,
            "networks": self.networks,
            "components": bool(self.components),
            "pictures": len(self.spec.shape) > 1,
            "tasks": self.tasks,
        }

    def gallery(self, task: int) -> list[dict[str, Any]]:
        """Return a task's components, the most expensive to drop first, with the image at each one's mean."""
        found = self._components(task)
        pictures = self._pictures(torch.stack([one.decoded for one in found])) if found else []
        return [
            {"component": one.place, "weight": one.weight, "cost": one.cost, "image": picture}
            for one, picture in zip(found, pictures, strict=True)
        ]

    def sample(self, n: int, seed: int, task: int | None = None, component: int | None = None) -> list[dict[str, Any]]:
        """Return `n` images from the prior, from a task's part of it, or from one component; a seed repeats them."""
        if task is not None:
            self._task(task)
        if component is not None and (task is None or component not in [c.place for c in self._components(task)]):
            raise InputError(f"task {task} has no component {component}")
        draws = latent_draws(n, self.settings.model.latent_dim)
        with self._computing():
            uniform, normal = (noise[0] for noise in Generators([seed], self.device).draw_all(draws, "play").values())
            # If each task has its own networks, tasks take turns, as in `boovae sample`.
            owners = [i % self.count if self.networks and task is None else task for i in range(n)]
            z = self._by_task(owners, functools.partial(_draw, component=component), uniform, normal)
            return self._shown(z, owners)

    def path(self, start: Point, end: Point, frames: int) -> list[dict[str, Any]]:
        """Return images at even steps on the straight line between two points.

        If each task has its own networks, those of the first point are used; a second point of another task is
        transferred by encoding its image with them.
        """
        ends = [self._place(point) for point in (start, end)]
        with self._computing():
            if self.networks and start.task != end.task:
                image = self._ask(end.task, VAE.images, ends[1].unsqueeze(0))
                ends[1] = self._ask(start.task, VAE.posterior, image).mean[0]
            share = torch.linspace(0, 1, frames, device=self.device).unsqueeze(1)
            return self._shown(ends[0].lerp(ends[1], share), [start.task] * frames)

    def look(self, content: bytes, *, invert: bool = False) -> dict[str, Any]:
        """Return how the model sees a picture file: the image it receives, its reconstruction, and how well it fits.

        The tasks, each with p(task | x) and log p(x | task), are empty if the model does not distinguish them.
        """
        with self._computing():
            x = self._pixels(content, invert).to(self.device)
            scores, effective = self._scores(x)
            joint = scores + self._log_masses if self.apart else scores
            task = int(joint.argmax()) if self.apart else None
            z = self._ask(task, VAE.posterior, x.unsqueeze(0)).mean
            seen, reconstruction = self._pictures(torch.cat([x.unsqueeze(0), self._ask(task, VAE.images, z)]))
            judged = zip(joint.softmax(0).tolist(), scores.tolist(), strict=True) if self.apart else ()
            return {
                "seen": seen,
                "reconstruction": {"image": reconstruction, "z": z[0].tolist(), "task": task},
                "log_likelihood": float(joint.logsumexp(0)),
                "effective_samples": effective,
                "tasks": [{"share": share, "log_likelihood": score} for share, score in judged],
            }

    # --- calling the model --------------------------------------------------------------------------------------

    @contextmanager
    def _computing(self) -> Iterator[None]:
        alone = self.device.type == "cpu" and self._views[0].stacked
        with self._lock, torch.no_grad(), one_thread(when=alone), matmul_precision(self.device):
            yield

    def _ask(self, task: int | None, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(model, *arguments)` with the networks of a task."""
        view = self._views[task if self.networks and task is not None else 0]
        return view.call(replica_of(view.tensors(), 0), function, *arguments)

    def _by_task(self, owners: Sequence[int | None], function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Return `function(model, owner, *rows)`, each row computed with the networks of its owner."""
        places = {owner: [i for i, other in enumerate(owners) if other == owner] for owner in dict.fromkeys(owners)}
        parts = [self._ask(o, function, o, *(row[mine] for row in rows)) for o, mine in places.items()]
        order = torch.tensor([i for mine in places.values() for i in mine], device=self.device)
        return torch.cat(parts)[order.argsort()]

    def _shown(self, z: Tensor, owners: Sequence[int | None]) -> list[dict[str, Any]]:
        """Return the mean images at latents z (n, L); a prior that distinguishes tasks decides the task of each."""
        images = self._by_task(owners, lambda model, task, z: model.images(z), z)
        if self.apart and not self.networks:
            owners = self._ask(None, _task_scores, z, self._log_masses).argmax(0).tolist()
        found = zip(self._pictures(images), z.tolist(), owners, strict=True)
        return [{"image": image, "z": place, "task": task} for image, place, task in found]

    def _scores(self, x: Tensor) -> tuple[Tensor, float]:
        """Return log p(x | task) of each task, or log p(x) alone, for an image (D,); and the effective samples."""
        if not self.networks:
            found = log_likelihood_of_each_task(self._views[0], x, self.count, self.samples)
            return found.own[0], float(found.effective_samples[0, 0])
        each = [
            log_likelihood(view, x.unsqueeze(0), self.samples, tasks=torch.tensor([task], device=self.device))
            for task, view in enumerate(self._views)
        ]
        scores = torch.cat([found.own[0] for found in each])
        return scores, float(each[int(scores.argmax())].effective_samples[0, 0])

    # --- checking and converting --------------------------------------------------------------------------------

    def _task(self, task: int) -> int:
        method = self.settings.method
        if not self.apart:
            raise InputError(f"task {task}: method '{method}' has one prior for all tasks; leave the task out")
        if not 0 <= task < self.count:
            raise InputError(f"task {task}: there are tasks 0 to {self.count - 1}")
        return task

    def _components(self, task: int) -> list[Component]:
        wanted = self._task(task)
        return [component for component in self.components if component.task == wanted]

    def _place(self, point: Point) -> Tensor:
        """Check a point from outside and return its latent (L,)."""
        if point.task is not None:
            self._task(point.task)
        elif self.networks:
            raise InputError("task: each task has its own networks; name the task of z")
        size = self.settings.model.latent_dim
        if len(point.z) != size:
            raise InputError(f"z: {len(point.z)} numbers, the latent space has {size} dimensions")
        return torch.tensor(point.z, dtype=torch.float32, device=self.device)

    def _pixels(self, content: bytes, invert: bool) -> Tensor:
        """Read a picture file as an image (D,) for the model: cropped to its proportions, then resized."""
        from PIL import Image, ImageOps

        shape = self.spec.shape
        if len(shape) == 1:
            raise InputError("this model has learned feature vectors, not pictures")
        picture = read_picture(io.BytesIO(content), "the picture", most_pixels=MOST_PIXELS)
        height, width = shape[-2:]
        colours = Image.fromarray(picture).convert("RGB" if shape[0] == 3 and len(shape) == 3 else "L")
        larger = picture.shape[0] >= height and picture.shape[1] >= width
        method = Image.Resampling.BOX if larger else Image.Resampling.BICUBIC
        fitted = np.asarray(ImageOps.fit(colours, (width, height), method), np.uint8)
        images = as_images((255 - fitted if invert else fitted)[None], "the picture", self.spec.shape)
        return binarized(to_float(images, self.spec.pixel_range).flatten(), self.spec.binarize, TEST, (0, 0))

    def _pictures(self, images: Tensor) -> list[str]:
        """Encode images (n, D) as addresses of pictures."""
        pictures = singles(images.cpu().numpy(), self.spec.shape, self.spec.pixel_range)
        return [image_source(png(picture)) for picture in pictures]


def _draw(model: VAE, task: int | None, uniform: Tensor, normal: Tensor, *, component: int | None) -> Tensor:
    """Sample latents (n, L) from the prior, a task's part of it, or one component."""
    if component is None:
        return model.prior(model.posterior, task).sample(uniform, normal)  # type: ignore[no-any-return]
    assert isinstance(model.prior, TaskMixture)
    parts = model.prior.stored(model.posterior)
    return DiagonalNormal(*(part[task, component] for part in parts)).rsample(normal)


def _task_scores(model: VAE, z: Tensor, log_masses: Tensor) -> Tensor:
    """Return log mass + log p(z | task), (T, n), of latents z (n, L)."""
    count = len(log_masses)
    tasks = torch.arange(count, device=z.device)
    return log_masses.unsqueeze(1) + model.prior.log_probs(model.posterior, z.expand(count, -1, -1), tasks)[1]


def _typical(run: Run, count: int, replica: int, *, own: bool) -> list[float | None]:
    """Return the mean log-likelihood of each task's test images at the last evaluation; None where there is none."""
    found = [evaluation.nll for evaluation in run.evaluations if evaluation.learned == count and evaluation.nll]
    if not found:
        return [None] * count
    scores = (found[-1].own if own else found[-1].per_task)[:, replica].tolist()
    return [-score if math.isfinite(score) else None for score in scores]
