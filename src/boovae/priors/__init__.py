"""Priors over the latent space: a prior is a module whose call returns a distribution."""

from boovae.priors.base import Density, Prior
from boovae.priors.boosted import BoostedPrior, FreeMixture, TaskMixture
from boovae.priors.flow import FlowPrior
from boovae.priors.normal import NormalPrior
from boovae.priors.pseudo_inputs import VampPrior

__all__ = ["BoostedPrior", "Density", "FlowPrior", "FreeMixture", "NormalPrior", "Prior", "TaskMixture", "VampPrior"]
