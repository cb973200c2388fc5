"""The cost ledger: how much a method remembers of the past, and how large the model is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from boovae.metrics.evaluation import Ledger
from boovae.metrics.metric import Context, Metric, Number

if TYPE_CHECKING:
    from boovae.training.trainer import Trainer

#: Where the name of a network's tensor begins; memory of all layers is summed up.
NETWORK = re.compile(r"\.?\b(?:encoder|decoder)\.")


class Cost(Metric):
    """Memory of the past and number of parameters."""

    name, section, always = "cost", "ledger", True

    def measure(self, context: Context) -> Ledger:
        """Return the memory and parameters of one replica."""
        return ledger(context.trainer)

    def numbers(self, section: Ledger) -> Iterator[Number]:
        """Yield the bytes of memory, equal for all replicas."""
        if section.memory_bytes is not None:
            count = np.array(section.memory_bytes)
            yield Number(count, "memory_bytes", "memory/bytes", "bytes kept")
            yield Number(count / 1000, curve="Memory of the past per replica, kB")


def ledger(trainer: Trainer) -> Ledger:
    """Return the bytes and images that one replica keeps of finished tasks, and its number of parameters."""
    method, replicas = trainer.method, len(trainer.replicas)
    memory: dict[str, int] = {}
    for name, tensor in sorted(method.memory().items()):  # checkpoints do not preserve the order
        kind = NETWORK.split(name)[0] or "networks"
        share = tensor.nbytes if name in method.shared_memory else tensor.nbytes // replicas
        memory[kind] = memory.get(kind, 0) + share
    return Ledger(memory, sum(memory.values()), method.images_stored(), trainer.replicas.size)
