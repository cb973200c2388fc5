"""`multihead`: one encoder and one input layer of the decoder per task; the rest of the decoder is shared.

The shared part of the model is the decoder after its input layer; a new task gets a new encoder and a new
Linear(L → L) before the decoder, and those of finished tasks are frozen. An image can be scored only if its task is
known; samples alternate between the tasks. The paper compares with it alone and together with EWC and VCL, which then
regularise only the shared decoder. Deviation: only the frozen heads are kept; they count as memory.
"""

from collections import OrderedDict
from types import MappingProxyType

import torch
from torch import Tensor, nn

from boovae.methods.method import Method, TaskImages
from boovae.model import Nets
from boovae.model.nets import initialise
from boovae.replicas import Replicas
from boovae.replicas.randomness import seed_for

#: Why some methods cannot be combined with it.
NO_COMMON_NETWORK = "there is no common network to distil, each task has its own"
NO_OLD_IMAGES = "the network of a new task cannot learn images of old tasks"


class Multihead(Method):
    """A network per task before a shared decoder."""

    name = "multihead"
    summary = "a separate encoder and decoder input layer for each task; the task must be known"
    knows_task = True
    private = ("encoder.", "decoder.head.")
    clashes = MappingProxyType({"distill": NO_COMMON_NETWORK, "replay": NO_OLD_IMAGES, "coreset": NO_OLD_IMAGES})

    def adapt(self, nets: Nets) -> Nets:
        """Put the task's own input layer before the decoder."""
        head = nn.Linear(self.settings.model.latent_dim, self.settings.model.latent_dim)
        with torch.no_grad():
            initialise(head)
        return Nets(nets.encoder, nn.Sequential(OrderedDict(head=head, body=nets.decoder)))

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Initialise the task's own networks."""
        if task.index == 0:
            return
        for row, seed in enumerate(replicas.seeds):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed_for(seed, "head", task.index))
                fresh = replicas.build().state_dict()
            for name, tensor in self._own(replicas.tensors()).items():
                tensor[row] = fresh[name].to(replicas.device)

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Freeze the task's own networks."""
        own = {name: tensor.unsqueeze(1) for name, tensor in self._own(replicas.tensors()).items()}
        self.memory = {
            name: torch.cat([self.memory[name], tensor], dim=1) if self.memory else tensor.clone()
            for name, tensor in own.items()
        }

    def view(self, replicas: Replicas, task: int) -> Replicas:
        """Return the model with the networks of a task."""
        return replicas.replaced({name: heads[:, task] for name, heads in self.memory.items()})

    def _own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name.startswith(Multihead.private)}

    def memory_shapes(self, replicas: Replicas, tasks: int, pixels: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the frozen networks: those of the task's own, for each task."""
        own = self._own(replicas.tensors()) if tasks else {}
        return {name: (len(tensor), tasks, *tensor.shape[1:]) for name, tensor in own.items()}
