"""The cost ledger: what a method carries of the past, and how large the model is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boovae.training.trainer import Trainer


def ledger(trainer: Trainer) -> dict[str, Any]:
    """Return the bytes that one replica remembers of finished tasks, the images among them, and the parameters."""
    method, replicas = trainer.method, len(trainer.replicas)
    memory = {
        name: tensor.nbytes if name in method.shared_memory else tensor.nbytes // replicas
        for name, tensor in sorted(method.memory().items())  # a checkpoint keeps no order
    }
    return {
        "memory": memory,
        "memory_bytes": sum(memory.values()),
        "images_stored": method.images_stored(),
        "parameters": trainer.replicas.size,
    }
