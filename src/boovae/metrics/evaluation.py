"""All metrics of a trained model after a task, as one event: likelihood, diversity, Fréchet, forgetting, cost."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from boovae.errors import InputError, unknown_name
from boovae.metrics.cost import ledger
from boovae.metrics.diversity import diversity
from boovae.metrics.features import ClassifierFeatures
from boovae.metrics.forgetting import forgetting
from boovae.metrics.likelihood import LogLikelihood, log_likelihood
from boovae.metrics.partial import Tally
from boovae.metrics.posterior import posterior_health
from boovae.metrics.reference import Reference
from boovae.replicas.devices import matmul_precision
from boovae.replicas.stacked import Replicas
from boovae.training.events import listed
from boovae.training.sampling import generate as generate

if TYPE_CHECKING:
    from boovae.data import Task
    from boovae.metrics.classifier import Classifier
    from boovae.training.trainer import Trainer

METRICS = ("nll", "diversity", "frechet")
#: What asks for distances on features; `fid` is what the world calls them, whatever the features.
ON_FEATURES = frozenset({"frechet", "fid"})


def check_metrics(metrics: Sequence[str]) -> None:
    """Refuse what cannot be measured."""
    for name in metrics:
        if name not in (known := {*METRICS, *ON_FEATURES}):
            raise unknown_name("metric", str(name), known)


def evaluate(
    trainer: Trainer,
    tasks: Sequence[Task | None],
    classifier: Classifier | None,
    history: Sequence[dict[str, Any]],
    *,
    metrics: Sequence[str] = METRICS,
    references: Sequence[Reference] | None = None,
    tallies: MutableMapping[str, Tally] | None = None,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Return the evaluation event after the tasks seen; `history` holds the earlier ones, for forgetting.

    A task is None where its images are not at hand: its numbers are None, and so is what would need them. `references`
    are what samples are compared with on features; the classifier's, if not given. `progress` is called after every
    step of what takes long, and `tallies` then hold all that was done so far: handed in again, it is not repeated.
    """
    check_metrics(metrics)
    if len(tasks) != trainer.tasks_done:
        raise InputError(f"tasks: {len(tasks)} of them, but {trainer.tasks_done} are learned; hand in just those")
    settings = trainer.settings
    progress, tallies = progress or (lambda share: None), {} if tallies is None else tallies
    present = [task for task in tasks if task is not None]
    if references is None:
        references = [Reference(ClassifierFeatures(classifier))] if classifier is not None else []
    if len(present) < len(tasks):
        classifier, references = None, []  # samples of all tasks must not be judged by a part of them
    event: dict[str, Any] = {"event": "evaluation", "task": len(tasks) - 1, "seen": len(tasks)}
    with matmul_precision(trainer.device):
        if "nll" in metrics:
            event["nll"] = _nll(trainer, tasks, settings.evaluation.samples, progress, tallies)
            event["forgetting"] = _forgetting([*history, event], trainer)
        counts_classes = "diversity" in metrics and classifier is not None
        compares = bool(ON_FEATURES & set(metrics)) and bool(references)
        samples = generate(trainer, settings.evaluation.generated) if counts_classes or compares else torch.empty(0)
        if counts_classes and classifier is not None:
            event["diversity"] = _diversity(classifier.features(samples), present, classifier)
        if compares:
            event["frechet"] = _frechet(samples, present, references, progress, tallies)
        if classifier is not None and (counts_classes or compares):
            event["classifier"] = {"accuracy": classifier.accuracy, "digest": classifier.digest}
    event["posterior"] = posterior_health(trainer, tasks)
    event["ledger"] = ledger(trainer)
    return event


def _nll(
    trainer: Trainer,
    tasks: Sequence[Task | None],
    samples: int,
    progress: Callable[[float], None],
    tallies: MutableMapping[str, Tally],
) -> dict[str, Any]:
    parts = [None if task is None else task.test.images for task in tasks]
    images = torch.cat([part for part in parts if part is not None]).to(trainer.device)
    sizes = [0 if part is None else len(part) for part in parts]
    owners = torch.repeat_interleave(torch.tensor(sizes)).to(trainer.device)
    result = log_likelihood_of_tasks(trainer, images, owners, samples, progress, tallies)

    def per_task(values: Tensor) -> list[list[float | None]]:
        return [listed(part.mean(1).numpy()) for part in values.double().cpu().split(sizes, dim=1)]

    pooled = listed(-result.log_prob.double().mean(1).cpu().numpy())
    return {
        "pooled": pooled if all(sizes) else [None] * len(pooled),
        "per_task": per_task(-result.log_prob),
        "own": per_task(-result.own),
        "effective_samples": per_task(result.effective_samples),
        "samples": samples,
    }


def log_likelihood_of_tasks(
    trainer: Trainer,
    images: Tensor,
    owners: Tensor,
    samples: int,
    progress: Callable[[float], None],
    tallies: MutableMapping[str, Tally] | None = None,
) -> LogLikelihood:
    """Return the likelihood of images (n, D) of tasks (n,), each under the model as it is for its task."""
    replicas, method, tallies = trainer.replicas, trainer.method, {} if tallies is None else tallies
    present, counts = (column.tolist() for column in owners.unique(return_counts=True))
    parts: list[tuple[str, Replicas, Tensor | slice]]
    if method.knows_task:
        parts = [(f"nll {task}", method.view(replicas, task), owners == task) for task in present]
    else:  # a tally is of just these images: other tasks may be at hand when it goes on
        name = " ".join(["nll", *(f"{task}:{count}" for task, count in zip(present, counts, strict=True))])
        parts = [(name, replicas, slice(None))]
    found = [
        log_likelihood(
            view,
            images[mine],
            samples,
            tasks=owners[mine],
            compile=trainer.compile,
            tally=tallies.setdefault(name, Tally()),
            progress=_within(progress, done, len(parts)),
        )
        for done, (name, view, mine) in enumerate(parts)
    ]
    return LogLikelihood(*(torch.cat(columns, dim=1) for columns in zip(*found, strict=True)))


def _within(progress: Callable[[float], None], done: int, parts: int) -> Callable[[float], None]:
    """Return what tells `progress` of one part, when so many of the parts are done."""
    return lambda share: progress((done + share) / parts)


def _forgetting(history: Sequence[dict[str, Any]], trainer: Trainer) -> dict[str, Any]:
    """Return the change of each task's NLL since it was learned; None where one of the two was not measured.

    Fewer importance samples give a higher NLL, so one from another number of them does not count as measured.
    """
    nothing: list[float | None] = [None] * len(trainer.replicas)
    last = history[-1]
    alike = {
        event["seen"]: event["nll"]
        for event in history
        if event.get("nll", {}).get("samples") == last["nll"]["samples"]
    }

    def rows(key: str) -> list[list[list[float | None]]]:
        return [alike[seen][key] if seen in alike else [nothing] * seen for seen in range(1, last["seen"] + 1)]

    own, pooled = rows("own"), rows("per_task")
    sizes = [1] * last["seen"] if trainer.method.equal_masses else trainer.sizes
    change = forgetting(own, pooled, sizes, shared_mass=trainer.replicas.model.prior.shares_mass)
    return {
        "own": [listed(row.numpy()) for row in change.own],
        "pooled": [listed(row.numpy()) for row in change.pooled],
        "dilution": listed(change.dilution.numpy()),
    }


def _diversity(features: Tensor, tasks: Sequence[Task], classifier: Classifier) -> dict[str, Any]:
    """Return the spread of the samples with features (R, N, F) over the classes seen."""
    classes = list(dict.fromkeys(label for task in tasks for label in task.classes))
    result = diversity(classifier.classify_features(features, classes), classes)
    return {
        "table": listed(result.table.cpu().numpy()),
        "uniform": listed(result.uniform.cpu().numpy()),
        "bernoulli": listed(result.bernoulli.cpu().numpy()),
        "proportions": [listed(row.numpy()) for row in result.proportions.cpu()],
        "classes": classes,
        "samples": features.shape[1],
    }


def _frechet(
    samples: Tensor,
    tasks: Sequence[Task],
    references: Sequence[Reference],
    progress: Callable[[float], None],
    tallies: MutableMapping[str, Tally],
) -> dict[str, Any]:
    """Return how near samples (R, N, D) are to the images of the tasks seen, on the features of each network."""
    sets: dict[str, dict[str, Any]] = {}
    for reference in references:
        tally = tallies.setdefault(f"frechet {reference.network.name}", Tally())
        # The likelihood took most of the time: the share that is done stays at all.
        scores = reference.scores(reference.features(samples), tasks, tally, lambda share: progress(1.0))
        numbers = {name: listed(values.cpu().numpy()) for name, values in scores._asdict().items()}
        images = sum(len(task.test.images) for task in tasks)
        sets[reference.network.name] = {
            **numbers,
            "images": images,
            "samples": samples.shape[1],
            "digest": reference.network.digest,
        }
    first = next(iter(sets))
    return {"pooled": sets[first]["frechet"], "features": first, "sets": sets}
