"""Train many replicas of a model at once: stacked state, randomness as tensors, the training step, the device."""
