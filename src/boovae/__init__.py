"""A variational autoencoder that keeps learning: one task after another, without keeping old data."""

__version__ = "0.1.0"
