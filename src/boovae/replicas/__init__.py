"""Many replicas of a module at once: stacked state, randomness as tensors, the training step, the device."""
