"""What a run says in a few numbers, and what a reader should be warned of, in plain words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from boovae.report.log import Floats
from boovae.report.numbers import MISSING, change, duration, mean, number, percent, plus_minus, size
from boovae.report.read import Evaluation, Fidelity, Run

LEAST_ACCURACY = 0.9
LEAST_EFFECTIVE_SAMPLES = 10.0
MOST_FORGETTING = 20.0  # nats


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
            f"test images of {tasks}; lower is better" if np.isfinite(last.nll).any() else "not measured on every task",
        ),
        _diversity(last),
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
        detail = f"{detail}; {against}; KID {number(float(mean(numbers.kid)), 4)}; {shares}"
    return Headline(distance_name(name), plus_minus(numbers.frechet), detail)


def _diversity(last: Evaluation) -> Headline:
    effective, total = effective_classes(last), len(last.classes)
    detail = "not measured"
    if math.isfinite(effective) and total:
        detail = f"as if {number(effective, 1)} of {total} classes were drawn evenly; 0 is best"
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


def warnings(run: Run) -> list[str]:
    """Return what makes the numbers of a run less than they seem."""
    found = [*_divergences(run), *(_sentence(f"{text} (task “{run.task_name(task)}”)") for task, text in run.remarks)]
    if not run.evaluations:
        return found
    last = run.evaluations[-1]
    if last.accuracy < LEAST_ACCURACY:
        found.append(
            f"The classifier is right on only {percent(last.accuracy)} of the test images, so the class "
            "proportions and the diversity are rough."
        )
    return found + _pruned_since(run) + _thin_samples(run, last) + _forgotten(run, last)


def _sentence(text: str) -> str:
    """Return what a method noted as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def _pruned_since(run: Run) -> list[str]:
    tasks = sorted({pruning.task for pruning in run.prunings if pruning.late})
    if not tasks:
        return []
    return [
        f"Components of {_names(run, tasks)} were pruned after the last evaluation: the numbers are those of the model "
        "before; boovae eval measures it as it is now."
    ]


def _divergences(run: Run) -> list[str]:
    found = []
    for index, seed in enumerate(run.seeds):
        mine = [d for d in run.divergences if d.replica == index]
        frozen = next((d for d in mine if d.frozen), None)
        who = f"Replica {index + 1} (seed {seed})"
        if frozen is not None:
            found.append(
                f"{who} diverged in task “{run.task_name(frozen.task)}” and was frozen there; it counts in "
                "the averages wherever its numbers are finite."
            )
        elif mine:
            where = ", ".join(dict.fromkeys(f"“{run.task_name(d.task)}”" for d in mine))
            times = "once" if len(mine) == 1 else f"{len(mine)} times"
            found.append(
                f"{who} diverged {times} (task {where}), went back to its best state and trained on more slowly."
            )
    return found


def _thin_samples(run: Run, last: Evaluation) -> list[str]:
    effective = mean(last.effective_samples)
    thin = [task for task in range(last.task + 1) if effective[task] < LEAST_EFFECTIVE_SAMPLES]
    if not thin:
        return []
    lowest = number(float(np.nanmin(effective)), 1)
    return [
        f"The NLL of {_names(run, thin)} rests on few effective importance samples (down to {lowest} of "
        f"{number(last.nll_samples, 0)}); the true value is probably lower. Evaluate with more samples."
    ]


def _forgotten(run: Run, last: Evaluation) -> list[str]:
    lost = mean(forgetting(last))
    tasks = [task for task in range(last.task) if lost[task] > MOST_FORGETTING]
    if not tasks:
        return []
    return [
        f"More than {MOST_FORGETTING:.0f} nats were forgotten of {_names(run, tasks)} "
        f"(at worst {change(float(np.nanmax(lost)))})."
    ]


def _names(run: Run, tasks: list[int]) -> str:
    """Name up to four tasks."""
    listed = ", ".join(f"“{run.task_name(task)}”" for task in tasks[:4])
    more = f" and {len(tasks) - 4} more" if len(tasks) > 4 else ""
    return f"task{'s' if len(tasks) > 1 else ''} {listed}{more}"
