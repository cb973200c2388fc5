"""Headline numbers of a run, beside published numbers if there are any."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from boovae.metrics.distances import distance_name
from boovae.metrics.evaluation import Distances, Diversity, Evaluation
from boovae.metrics.forgetting import not_judged, of_earlier
from boovae.report.numbers import MISSING, change, duration, mean, number, percent, plus_minus, size
from boovae.report.run_record import RunRecord

#: Settings of the data for which there are published numbers.
USUAL: dict[str, str | None] = {"classes_per_task": "1", "binarize": "none", "limit": None, "class_order": None}
#: Stands for a number that was not measured.
NOTHING = np.array([np.nan])
UNMEASURED = "not measured on every task"


class PublishedNumber(NamedTuple):
    """A number of the paper: mean, deviation, the method's name there, and the printed decimals."""

    mean: float
    std: float
    method: str
    decimals: int


#: Published numbers by metric, dataset, method and tasks seen.
Published = Mapping[tuple[str, str, str, int], PublishedNumber]


class Headline(NamedTuple):
    """One number of the first section with an explanation."""

    label: str
    value: str
    detail: str


def published_for(run: RunRecord, metric: str, seen: int, published: Published) -> PublishedNumber | None:
    """Return the published number for the run's dataset and method after `seen` tasks; None if there is none.

    The paper has one class per task and unchanged grey values; for other data it has no numbers.
    """
    ours = {key: run.config.get(key, usual) for key, usual in USUAL.items()}
    return published.get((metric, run.head.dataset, run.head.method, seen)) if ours == USUAL else None


def headlines(run: RunRecord, published: Published) -> list[Headline]:
    """Return the numbers after the last evaluated task; empty if there is no evaluation yet."""
    if not run.evaluations:
        return []
    last = run.evaluations[-1]
    tasks = f"{last.learned} task{'s' if last.learned > 1 else ''}"

    def beside(metric: str) -> str:
        paper = published_for(run, metric, last.learned, published)
        return f"; the paper has {paper.mean:.{paper.decimals}f} ± {paper.std:g}" if paper else ""

    nll = last.nll.pooled if last.nll else NOTHING
    said = f"test images of {tasks}; lower is better{_effective(last)}{beside('nll')}"
    accuracy = last.classifier.accuracy if last.classifier else None
    sets = last.frechet.sets if last.frechet else {}
    return [
        Headline("NLL, nats per image", plus_minus(nll), said if np.isfinite(nll).any() else UNMEASURED),
        _diversity(last.diversity, beside("diversity")),
        Headline("Classifier accuracy", percent(accuracy), "the classifier that counts the classes for diversity"),
        *(_distances(name, found) for name, found in sets.items() if np.isfinite(found.frechet).any()),
        *_forgetting(run, last),
        *_costs(run, last),
    ]


def _effective(last: Evaluation) -> str:
    """Return on how many effective samples the NLL of the worst task rests."""
    lowest = np.nan if last.nll is None else np.min(mean(last.nll.typical_effective), initial=np.inf)
    if not np.isfinite(lowest):
        return ""
    of = f" of {last.nll.samples:,}" if last.nll and last.nll.samples else ""
    return f"; effective samples per image {number(float(lowest), 1)}{of}, in the worst task"


def _distances(name: str, found: Distances) -> Headline:
    detail = "samples against test images; lower is better"
    if found.kid is not None and math.isfinite(kid := float(mean(found.kid))):
        parts = (found.precision, found.recall, found.frechet_train)
        precision, recall, train = (float(mean(NOTHING if part is None else part)) for part in parts)
        shares = f"precision {percent(precision)}, recall {percent(recall)}"
        against = f"against training images {number(train)}"
        detail = f"{detail}; {against}; KID {number(kid, None if abs(kid) >= 1 else 4)}; {shares}"
    return Headline(distance_name(name), plus_minus(found.frechet), detail)


def _diversity(found: Diversity | None, paper: str) -> Headline:
    detail, table = "not measured", found.table if found else NOTHING
    total = found.proportions.shape[1] if found else 0
    effective = total * math.exp(-float(mean(table)))  # this many evenly drawn classes would be as diverse
    if math.isfinite(effective) and total:
        detail = f"as if {number(effective, 1)} of {total} classes were drawn evenly; 0 is best{paper}"
    return Headline("Diversity", plus_minus(table), detail)


def _forgetting(run: RunRecord, last: Evaluation) -> list[Headline]:
    labels = "Forgetting, worst task", "Forgetting, mean"
    found = last.forgetting
    lost = of_earlier(found) if found else NOTHING
    per_task = mean(lost)
    if found is None or last.task == 0 or not np.isfinite(per_task).all():  # do not present a part as the whole
        detail = "needs at least two tasks" if last.task == 0 else UNMEASURED
        if last.task and found is not None and (why := not_judged(found)):
            detail = f"{why}; longer training or more --samples help"
        return [Headline(label, MISSING, detail) for label in labels]
    worst = int(np.nanargmax(per_task))
    pooled, diluted = float(mean(mean(found.pooled[:-1]))), float(mean(found.dilution[:-1]))
    detail = "nats per earlier task, under its own part of the prior"
    if math.isfinite(pooled) and math.isfinite(diluted):
        detail = f"under the whole prior {change(pooled, 1)}, of which {change(diluted, 1)} is only dilution"
    return [
        Headline(labels[0], plus_minus(lost[worst], signed=True), f"nats, task “{run.task_name(worst)}”"),
        Headline(labels[1], plus_minus(mean(lost, axis=0), signed=True), detail),
    ]


def _costs(run: RunRecord, last: Evaluation) -> list[Headline]:
    kept = last.ledger.images_stored
    stored = "images not counted" if kept is None else f"{kept:,.0f} images"
    train, evaluate = (duration(run.seconds(what)) if run.timings else MISSING for what in ("train", "evaluate"))
    replicas = f"all {len(run.head.seeds)} replicas together" if len(run.head.seeds) > 1 else "one replica"
    return [
        Headline("Memory of the past", size(last.ledger.memory_bytes), f"per replica; {stored} kept"),
        Headline("Training time", train, f"{replicas}; evaluation took {evaluate}"),
    ]
