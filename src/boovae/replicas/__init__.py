"""Train many replicas of a model at once: stacked state, randomness as tensors, the training step, the device."""

from boovae.replicas.randomness import Draw as Draw
from boovae.replicas.randomness import latent_draws as latent_draws
from boovae.replicas.stacked import Replicas as Replicas
from boovae.replicas.stacked import Tensors as Tensors
from boovae.replicas.stacked import replica_of as replica_of
from boovae.replicas.step import Batch as Batch
from boovae.replicas.step import Step as Step
from boovae.replicas.teacher import Teacher as Teacher
from boovae.replicas.teacher import bound_before as bound_before
