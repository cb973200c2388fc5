"""Numbers about a trained model. Metrics only read.

A new metric is one file and one line here, or `register` from anywhere else. Nothing heavy is imported before something
is measured: who only shows numbers needs no torch.
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
