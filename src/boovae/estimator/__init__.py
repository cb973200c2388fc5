"""The scikit-learn front."""

from boovae.estimator.boovae import BooVAE

__all__ = ["BooVAE"]
