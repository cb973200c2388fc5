"""The training loop for many replicas at once, with its objective, events and checkpoints."""
