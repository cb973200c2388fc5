"""Diversity: how evenly the samples of a model spread over the classes it has seen.

A classifier names N samples; `p̂_t` is the share of class t among the T classes seen. Three readings of
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
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from boovae.errors import InputError


class Diversity(NamedTuple):
    """The spread of N samples over T classes; the leading axes `...` are replicas. All float64, in nats.

    A replica with unclassified samples (a diverged model) is `nan` everywhere.
    """

    table: Tensor
    """`(...)`: log T − H(p̂), the headline."""
    uniform: Tensor
    """`(...)`: KL[uniform ‖ p̂], smoothed."""
    bernoulli: Tensor
    """`(...)`: Σ_t KL[Be(1/T) ‖ Be(p̂_t)], smoothed."""
    effective_classes: Tensor
    """`(...)`: T.exp(−table), the number of classes an even spread of equal entropy would have."""
    proportions: Tensor
    """`(..., T)`: p̂."""
    terms: Tensor
    """`(..., T)`: (1/T) log((1/T) / p̂_t), p̂ clipped at 1/(2N): positive is too few, negative too many."""
    samples: int
    """N."""


def diversity(labels: Tensor, classes: Sequence[int]) -> Diversity:
    """Return the diversity of samples with integer `labels` `(..., N)` over the `classes` seen.

    Labels of −1 are unclassified samples; any other label must be one of `classes`.

    >>> d = diversity(torch.tensor([3, 3, 3, 3]), classes=[3, 5])
    >>> round(d.table.item(), 4), d.effective_classes.item(), d.proportions.tolist()
    (0.6931, 1.0, [1.0, 0.0])
    """
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
    return _of_counts(counts.masked_fill((unclassified > 0).unsqueeze(-1), math.nan), labels.shape[-1])


def diversity_of_counts(counts: Tensor) -> Diversity:
    """Return the diversity of class `counts` `(..., T)`; every replica has the same number of samples N > 0.

    >>> diversity_of_counts(torch.tensor([[25, 25], [50, 0]])).effective_classes.tolist()
    [2.0, 1.0]
    """
    if counts.ndim < 1 or counts.shape[-1] == 0:
        raise InputError(f"counts have shape {tuple(counts.shape)}: the last axis must be the classes")
    if bool((counts < 0).any()) or not bool((counts == counts.round()).all()):
        raise InputError("counts: give numbers of samples per class, whole and not negative")
    totals = sorted(set(counts.sum(-1).flatten().tolist()))
    if len(totals) != 1 or totals[0] == 0:
        raise InputError(f"counts sum to {totals} samples: all replicas need the same number, at least 1")
    return _of_counts(counts.double(), int(totals[0]))


def _of_counts(counts: Tensor, samples: int) -> Diversity:
    """The formulas, for float64 counts `(..., T)`."""
    number = counts.shape[-1]
    even = torch.tensor(1 / number, dtype=torch.float64, device=counts.device)
    share = counts / samples
    smooth = (counts + 0.5) / (samples + number / 2)
    # Rounding can leave −1e-16 for an even spread; clamp keeps nan.
    table = (math.log(number) + torch.xlogy(share, share).sum(-1)).clamp(min=0.0)
    uniform = (even * (even.log() - smooth.log())).sum(-1)
    # xlogy: with one class the "other" outcome has probability 0 on both sides and must count as 0.
    other = torch.xlogy(1 - even, 1 - even) - torch.xlogy(1 - even, 1 - smooth)
    return Diversity(
        table=table,
        uniform=uniform,
        bernoulli=uniform + other.sum(-1),
        effective_classes=number * (-table).exp(),
        proportions=share,
        terms=even * (even.log() - share.clamp(min=0.5 / samples).log()),
        samples=samples,
    )
