"""The scikit-learn estimator."""

from boovae.estimator.boovae import BooVAE

__all__ = ["BooVAE"]
