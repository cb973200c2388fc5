"""Diversity: how evenly the samples of a model spread over the classes it has seen.

A classifier labels N samples; `p̂_t` is the share of class t among the T classes seen. Three definitions of
"distance from uniform" are in use; all are zero for an even spread and given in nats:

=============  ==================================  ======================================================
name           formula                             remark
=============  ==================================  ======================================================
`table`        KL[p̂ ‖ uniform] = log T − H(p̂)      the headline; the paper's tables; between 0 and log T
`uniform`      KL[uniform ‖ p̂]                     the paper's supplement; smoothed, else often infinite
`bernoulli`    Σ_t KL[Be(1/T) ‖ Be(p̂_t)]           the paper's main text; smoothed in the same way
=============  ==================================  ======================================================

The smoothing adds half a sample to every class, p̂_t = (N_t + ½) / (N + T/2). A perfect generator scores about
(T − 1) / (2N) in `table`, not 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from boovae.errors import InputError
from boovae.metrics.evaluation import Diversity
from boovae.metrics.metric import Context, Metric, Number
from boovae.metrics.schema import Floats, rounded

if TYPE_CHECKING:
    from torch import Tensor


class SpreadOverClasses(Metric):
    """Diversity of samples according to the dataset's classifier."""

    name = section = "diversity"
    needs = frozenset({"classifier"})

    def measure(self, context: Context) -> Diversity:
        """Return the spread of the samples over the classes seen."""
        classifier, samples = context.classifier, context.samples
        assert classifier is not None
        classes = list(dict.fromkeys(label for task in context.present for label in task.classes))
        found = diversity(classifier.classify_features(classifier.features(samples), classes), classes)
        table, uniform, bernoulli, proportions = map(rounded, found)
        return Diversity(table, uniform, bernoulli, proportions, classes, samples.shape[1])

    def numbers(self, section: Diversity) -> Iterator[Number]:
        """Yield the three definitions; the first is the headline."""
        yield Number(section.table, "diversity", "diversity", "diversity", "Diversity (0 is best)", 3)
        yield Number(section.uniform, "diversity_uniform")
        yield Number(section.bernoulli, "diversity_bernoulli")


class ClassSpread(NamedTuple):
    """The spread of N samples over T classes; the leading axes `...` are replicas. All float64, in nats.

    A replica with unclassified samples (a diverged model) is `nan` everywhere.
    """

    table: Tensor
    """`(...)`: log T − H(p̂), the headline."""
    uniform: Tensor
    """`(...)`: KL[uniform ‖ p̂], smoothed."""
    bernoulli: Tensor
    """`(...)`: Σ_t KL[Be(1/T) ‖ Be(p̂_t)], smoothed."""
    proportions: Tensor
    """`(..., T)`: p̂."""


def diversity(labels: Tensor, classes: Sequence[int]) -> ClassSpread:
    """Return the diversity of samples with integer `labels` `(..., N)` over the `classes` seen.

    Labels of −1 are unclassified samples; any other label must be one of `classes`.

    >>> import torch
    >>> d = diversity(torch.tensor([3, 3, 3, 3]), classes=[3, 5])
    >>> round(d.table.item(), 4), d.proportions.tolist()
    (0.6931, [1.0, 0.0])
    """
    import torch

    if len(classes) == 0 or len(set(classes)) != len(classes):
        raise InputError(f"classes {list(classes)}: name every class seen exactly once")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"labels have type {labels.dtype}: give whole numbers, one class per sample")
    if labels.ndim < 1 or labels.shape[-1] == 0:
        raise InputError(f"labels have shape {tuple(labels.shape)}: at least one sample is needed")
    counts = torch.stack([(labels == label).sum(-1) for label in classes], -1).double()
    unclassified = (labels == -1).sum(-1)
    if bool((counts.sum(-1) + unclassified != labels.shape[-1]).any()):
        strange = sorted(set(labels.flatten().tolist()) - {*classes, -1})
        raise InputError(f"labels contain {strange}: restrict the classifier to the classes {list(classes)}")
    counts = counts.masked_fill((unclassified > 0).unsqueeze(-1), math.nan)  # float64, (..., T)
    number, samples = len(classes), labels.shape[-1]
    even = torch.tensor(1 / number, dtype=torch.float64, device=counts.device)
    share = counts / samples
    smooth = (counts + 0.5) / (samples + number / 2)
    # Rounding can leave −1e-16 for an even spread; clamp keeps nan.
    table = (math.log(number) + torch.xlogy(share, share).sum(-1)).clamp(min=0.0)
    uniform = (even * (even.log() - smooth.log())).sum(-1)
    # xlogy: with a single class the "other" outcome has probability 0 in both distributions and must count as 0.
    other = torch.xlogy(1 - even, 1 - even) - torch.xlogy(1 - even, 1 - smooth)
    return ClassSpread(table, uniform, uniform + other.sum(-1), share)


def class_terms(section: Diversity) -> Floats:
    """Return each class's term of KL[uniform ‖ p̂], R x T: positive for too few samples, negative for too many.

    It is (1/T) log((1/T) / p̂_t), with p̂ clipped at half a sample.
    """
    number = section.proportions.shape[1]
    least = 0.5 / (section.samples or 1)
    terms = -(math.log(number) + np.log(np.maximum(section.proportions, least))) / number
    return rounded(terms) + 0.0  # turn -0.0 into 0.0
