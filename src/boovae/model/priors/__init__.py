"""Priors over the latent space: a prior is a module whose call returns a distribution."""

from boovae.model.priors.boosted import BoostedPrior, FreeMixture, TaskMixture
from boovae.model.priors.flow import FlowPrior
from boovae.model.priors.normal import NormalPrior
from boovae.model.priors.prior import Density, Prior
from boovae.model.priors.vamp import VampPrior

__all__ = ["BoostedPrior", "Density", "FlowPrior", "FreeMixture", "NormalPrior", "Prior", "TaskMixture", "VampPrior"]
