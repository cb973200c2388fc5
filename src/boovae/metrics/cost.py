"""The cost ledger: what a method carries of the past, and how large the model is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boovae.training.trainer import Trainer

#: Where the name of a network's tensor begins: what is kept of all layers is counted as one.
NETWORK = re.compile(r"\.?\b(?:encoder|decoder)\.")


def ledger(trainer: Trainer) -> dict[str, Any]:
    """Return the bytes that one replica remembers of finished tasks, the images among them, and the parameters."""
    method, replicas = trainer.method, len(trainer.replicas)
    memory: dict[str, int] = {}
    for name, tensor in sorted(method.memory().items()):  # a checkpoint keeps no order
        kind = NETWORK.split(name)[0] or "networks"
        share = tensor.nbytes if name in method.shared_memory else tensor.nbytes // replicas
        memory[kind] = memory.get(kind, 0) + share
    return {
        "memory": memory,
        "memory_bytes": sum(memory.values()),
        "images_stored": method.images_stored(),
        "parameters": trainer.replicas.size,
    }
