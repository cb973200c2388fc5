"""Metrics of a trained model. They never change the model.

A new metric is one file and one line here, or `register` from anywhere else. Torch is imported only when something is
measured, so code that only shows numbers does not need it.
"""

from boovae.metrics.cost import Cost
from boovae.metrics.distances import FeatureDistances
from boovae.metrics.diversity import SpreadOverClasses
from boovae.metrics.evaluation import Evaluation
from boovae.metrics.forgetting import ChangeOfNLL
from boovae.metrics.metric import METRICS, Context, Metric, Number, register
from boovae.metrics.nll import NegativeLogLikelihood
from boovae.metrics.posterior import PosteriorHealth

# In the order in which they are measured and shown: forgetting compares the NLL that was just measured.
METRICS |= {
    kind.name: kind()
    for kind in (NegativeLogLikelihood, SpreadOverClasses, ChangeOfNLL, FeatureDistances, PosteriorHealth, Cost)
}

__all__ = ["METRICS", "Context", "Evaluation", "Metric", "Number", "register"]
