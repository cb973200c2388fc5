"""Train many replicas of a model at once: stacked state, randomness as tensors, the training step, the device."""

from boovae.replicas.randomness import Draw, latent_draws
from boovae.replicas.stacked import Replicas, Tensors, replica_of
from boovae.replicas.step import Batch, Step
from boovae.replicas.teacher import Teacher, bound_before

__all__ = ["Batch", "Draw", "Replicas", "Step", "Teacher", "Tensors", "bound_before", "latent_draws", "replica_of"]
