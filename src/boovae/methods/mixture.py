"""The common base of methods whose prior is a mixture with a row of components per task."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from boovae.boosting.fit import MixtureSettings
from boovae.boosting.penalties import Penalties
from boovae.config import Settings
from boovae.errors import InputError
from boovae.methods.method import Method, TaskImages
from boovae.model import VAE
from boovae.model.priors.boosted import TaskMixture
from boovae.replicas import Batch, Draw, Replicas

ROW = ("pseudo_inputs", "mean", "log_variance", "log_weights")


class MixtureMethod(Method):
    """Opens a row of live components when a task begins, stores it when the task ends, and penalises its changes."""

    #: The two penalties on stored components, and the setting with their weight.
    penalties: Penalties
    strength_name: str
    #: Whether components of finished tasks are re-encoded.
    reencodes = False

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.mixture = settings.of(MixtureSettings)
        self.equal_masses = self.mixture.boo_masses == "equal"

    def compare(self, candidates: Mapping[str, Sequence[float]]) -> None:
        """Give each replica its own values; the weight of the penalties may be one of them."""
        super().compare(candidates)
        self.penalties.on |= self.strength_name in candidates

    def check(self) -> None:
        """Refuse penalties that would pass old components through the network of another task."""
        if self.private and (self.penalties.on or self.reencodes):
            remedy = f"set {{{self.strength_name}=0}} and {{boo_reencode=False}}"
            raise InputError(f"{self.name} cannot preserve or re-encode components with a network per task: {remedy}")

    def open_row(self, replicas: Replicas, task: TaskImages) -> None:
        """Add a row for the task's components to the stored ones, and set the mass of each task."""
        replicas.rebuild()
        buffers = replicas.buffers
        for name, stored in self.memory.items():
            if name in ROW:
                buffers[f"prior.{name}"][:, : task.index] = stored
        sizes = torch.tensor([*task.sizes_before, task.own_images], dtype=torch.float32, device=replicas.device)
        if self.equal_masses:
            sizes = torch.ones_like(sizes)
        log_masses = (sizes / sizes.sum()).log()
        buffers["prior.log_masses"][:, : task.index] = log_masses[:-1]
        buffers["prior.live_log_mass"][:] = log_masses[-1]
        TaskMixture.of(replicas.model).live = True
        if self.penalties.on and task.index > 0:
            strength, growth = self.strength(self.strength_name, replicas), task.images_before / task.own_images
            self.state = self.penalties.state(replicas, self.memory, strength, growth)
        if self.settings.model.components > task.own_images:
            self.say(task, f"fewer images ({task.own_images}) than components ({self.settings.model.components})")

    def store_row(self, replicas: Replicas, task: TaskImages, row: dict[str, Tensor]) -> None:
        """Store the task's components: the tensors named in ROW, each (R, K, ...)."""
        buffers = replicas.buffers
        TaskMixture.of(replicas.model).live = False
        for name in ROW:
            buffers[f"prior.{name}"][:, task.index] = row[name]
        buffers["prior.log_masses"][:, task.index] = buffers["prior.live_log_mass"]
        decoded = [self.memory["decoded"]] if "decoded" in self.memory else []
        self.memory = {name: buffers[f"prior.{name}"][:, : task.index + 1].clone() for name in ROW}
        if self.penalties.stores_outputs:
            decoded.append(self.penalties.outputs(replicas, self.memory["mean"][:, -1:]))
            self.memory["decoded"] = torch.cat(decoded, dim=1)

    def draws(self, batch_size: int) -> dict[str, Draw]:
        """Return the noise of the penalties."""
        return self.penalties.draws(self.tasks_seen)

    @property
    def wants_old_components(self) -> bool:
        """Whether R_enc needs the encodings of old pseudo-inputs."""
        return self.penalties.on and bool(self.state)

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return R_enc and R_dec, if they are on."""
        return self.penalties.penalty(model, batch) if batch["state"] else {}

    def memory_shapes(self, replicas: Replicas, tasks: int, pixels: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the stored components, for each task."""
        if not tasks:
            return {}
        model = self.settings.model
        row = len(replicas), tasks, model.components
        images, latents = (*row, pixels), (*row, model.latent_dim)
        shapes = dict(zip(ROW, (images, latents, latents, row), strict=True))
        return {**shapes, "decoded": images} if self.penalties.stores_outputs else shapes
