"""What a run says in a few numbers, beside the paper's where it has them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from boovae.bench.published import DECIMALS, Printed, numbers
from boovae.report.log import Floats
from boovae.report.numbers import MISSING, change, duration, mean, number, percent, plus_minus, size
from boovae.report.read import Evaluation, Fidelity, Run

#: Settings of the stream for which the paper has numbers.
USUAL: dict[str, str | None] = {"classes_per_task": "1", "binarize": "none", "limit": None, "class_order": None}


@dataclass(frozen=True)
class Headline:
    """One number of the first section: `label`, `value`, and what the value means."""

    label: str
    value: str
    detail: str


def forgetting(evaluation: Evaluation) -> Floats:
    """Return the change per earlier task ((seen - 1) x [R]).

    The last task was only just learned, so it cannot have been forgotten. Methods without components per task
    have no own part of the prior; there the change under the whole prior stands in.
    """
    own = evaluation.forgetting[:-1]
    return np.where(np.isfinite(own).any(), own, evaluation.forgetting_pooled[:-1])


def effective_classes(evaluation: Evaluation) -> float:
    """Return how many classes, drawn evenly, would be as diverse as the samples: T exp(-diversity)."""
    return len(evaluation.classes) * math.exp(-float(mean(evaluation.diversity)))


def printed(run: Run, metric: str, seen: int) -> Printed | None:
    """Return the paper's number for the run's dataset and method after `seen` tasks; None where it has none.

    The paper has one class per task and grey values as they are; other streams have no number there.
    """
    ours = {key: run.config.get(key, usual) for key, usual in USUAL.items()}
    return numbers(metric).get((run.dataset, run.method, seen)) if ours == USUAL else None


def beside_paper(run: Run, metric: str, seen: int) -> str:
    """Return the paper's number as the end of a remark; empty where it has none."""
    paper = printed(run, metric, seen)
    return f"; the paper has {paper.mean:.{DECIMALS[metric]}f} ± {paper.std:g}" if paper else ""


def headlines(run: Run) -> list[Headline]:
    """Return the numbers after the last evaluated task; empty where there is no evaluation yet."""
    if not run.evaluations:
        return []
    last = run.evaluations[-1]
    seen = last.task + 1
    tasks = f"{seen} task{'s' if seen > 1 else ''}"
    rows = [
        Headline(
            "NLL, nats per image",
            plus_minus(last.nll),
            f"test images of {tasks}; lower is better{beside_paper(run, 'nll', seen)}"
            if np.isfinite(last.nll).any()
            else "not measured on every task",
        ),
        _diversity(last, beside_paper(run, "diversity", seen)),
        Headline(
            "Classifier accuracy",
            percent(last.accuracy),
            "the classifier that counts the classes for diversity",
        ),
    ]
    rows += [_fidelity(name, numbers) for name, numbers in last.fidelity.items() if np.isfinite(numbers.frechet).any()]
    return [*rows, *_forgetting_rows(run, last), *_cost_rows(run, last)]


def distance_name(features: str) -> str:
    """Return what a Fréchet distance on these features is called: only on those of Inception it is an FID.

    >>> distance_name("inception"), distance_name("classifier")
    ('FID', 'Fréchet distance (classifier)')
    """
    return "FID" if features == "inception" else f"Fréchet distance ({features})"


def _fidelity(name: str, numbers: Fidelity) -> Headline:
    detail = "samples against test images; lower is better"
    if math.isfinite(float(mean(numbers.kid))):
        shares = f"precision {percent(float(mean(numbers.precision)))}, recall {percent(float(mean(numbers.recall)))}"
        against = f"against training images {number(float(mean(numbers.frechet_train)))}"
        kid = float(mean(numbers.kid))
        detail = f"{detail}; {against}; KID {number(kid, None if abs(kid) >= 1 else 4)}; {shares}"
    return Headline(distance_name(name), plus_minus(numbers.frechet), detail)


def _diversity(last: Evaluation, paper: str) -> Headline:
    effective, total = effective_classes(last), len(last.classes)
    detail = "not measured"
    if math.isfinite(effective) and total:
        detail = f"as if {number(effective, 1)} of {total} classes were drawn evenly; 0 is best{paper}"
    return Headline("Diversity", plus_minus(last.diversity), detail)


def _forgetting_rows(run: Run, last: Evaluation) -> list[Headline]:
    worst_label, mean_label = "Forgetting, worst task", "Forgetting, mean"
    lost = forgetting(last)
    per_task = mean(lost)
    if last.task == 0 or not np.isfinite(per_task).all():  # a part must not look like the whole
        detail = "needs at least two tasks" if last.task == 0 else "not measured on every task"
        return [Headline(worst_label, MISSING, detail), Headline(mean_label, MISSING, detail)]
    worst = int(np.nanargmax(per_task))
    pooled, diluted = float(mean(mean(last.forgetting_pooled[:-1]))), float(mean(last.dilution[:-1]))
    detail = "nats per earlier task, under its own part of the prior"
    if math.isfinite(pooled) and math.isfinite(diluted):
        detail = f"under the whole prior {change(pooled, 1)}, of which {change(diluted, 1)} is only dilution"
    return [
        Headline(worst_label, plus_minus(lost[worst], signed=True), f"nats, task “{run.task_name(worst)}”"),
        Headline(mean_label, plus_minus(mean(lost, axis=0), signed=True), detail),
    ]


def _cost_rows(run: Run, last: Evaluation) -> list[Headline]:
    stored = f"{last.images_stored:,.0f} images" if math.isfinite(last.images_stored) else "images not counted"
    train = sum(timing.train_seconds for timing in run.timings.values())
    evaluate = sum(timing.evaluate_seconds for timing in run.timings.values())
    wall = duration(train) if run.timings else MISSING
    replicas = f"all {len(run.seeds)} replicas together" if len(run.seeds) > 1 else "one replica"
    return [
        Headline("Memory of the past", size(last.memory_bytes), f"per replica; {stored} kept"),
        Headline(
            "Training time",
            wall,
            f"{replicas}; evaluation took {duration(evaluate) if run.timings else MISSING}",
        ),
    ]
