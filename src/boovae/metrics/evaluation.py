"""All metrics of a trained model after a task, as one event: likelihood, diversity, Fréchet, forgetting, cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from boovae.metrics.cost import ledger
from boovae.metrics.diversity import diversity
from boovae.metrics.forgetting import forgetting
from boovae.metrics.frechet import frechet_distance, moments
from boovae.metrics.likelihood import log_likelihood
from boovae.training.randomness import Draw, Generators
from boovae.training.trainer import listed, matmul_precision

if TYPE_CHECKING:
    from boovae.data import Task
    from boovae.metrics.classifier import Classifier
    from boovae.training.replicas import Replicas
    from boovae.training.trainer import Trainer

METRICS = ("nll", "diversity", "frechet")
#: Generated images that are decoded at once.
SAMPLE_CHUNK = 10_000


@torch.no_grad()
def generate(replicas: Replicas, count: int, purpose: str = "samples", task: int | None = None) -> Tensor:
    """Return `count` mean images from each replica's prior, (R, count, D); with `task`, from that task's part alone.

    The random numbers depend on the replica's seed and the purpose only: every task is shown with the same ones.
    """
    generators = Generators(replicas.seeds, replicas.device)
    draws = {
        "uniform": Draw("uniform", (count,)),
        "normal": Draw("normal", (count, replicas.model.latent_dim)),
    }
    noise = generators.draw_all(draws, purpose)

    def sample(model: Any, uniform: Tensor, normal: Tensor) -> Tensor:
        images: Tensor = model.images(model.prior(model.posterior, task).sample(uniform, normal))
        return images

    parts = [
        replicas.map(
            sample,
            noise["uniform"][:, start : start + SAMPLE_CHUNK],
            noise["normal"][:, start : start + SAMPLE_CHUNK],
        )
        for start in range(0, count, SAMPLE_CHUNK)
    ]
    return torch.cat(parts, dim=1)


def evaluate(
    trainer: Trainer,
    tasks: Sequence[Task],
    classifier: Classifier | None,
    history: Sequence[dict[str, Any]],
    *,
    metrics: Sequence[str] = METRICS,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Return the evaluation event after the tasks seen; `history` holds the earlier ones, for forgetting."""
    settings = trainer.settings
    event: dict[str, Any] = {"event": "evaluation", "task": len(tasks) - 1, "seen": len(tasks)}
    with matmul_precision(trainer.device):
        if "nll" in metrics:
            event["nll"] = _nll(trainer, tasks, settings.samples, progress)
            event["forgetting"] = _forgetting([*history, event], trainer)
        if classifier is not None and {"diversity", "frechet"} & set(metrics):
            features = classifier.features(generate(trainer.replicas, settings.generated))
            if "diversity" in metrics:
                event["diversity"] = _diversity(features, tasks, classifier)
            if "frechet" in metrics:
                event["frechet"] = _frechet(features, tasks, classifier)
            event["classifier"] = {"accuracy": classifier.accuracy, "digest": classifier.digest}
    event["ledger"] = ledger(trainer)
    return event


def _nll(
    trainer: Trainer, tasks: Sequence[Task], samples: int, progress: Callable[[float], None] | None
) -> dict[str, Any]:
    images = torch.cat([task.test.images for task in tasks]).to(trainer.device)
    sizes = [len(task.test.images) for task in tasks]
    owners = torch.repeat_interleave(torch.tensor(sizes)).to(trainer.device)
    result = log_likelihood(trainer.replicas, images, samples, tasks=owners, compile=trainer.compile, progress=progress)

    def per_task(values: Tensor) -> list[list[float | None]]:
        return [listed(part.mean(1).numpy()) for part in values.double().cpu().split(sizes, dim=1)]

    return {
        "pooled": listed(-result.log_prob.double().mean(1).cpu().numpy()),
        "per_task": per_task(-result.log_prob),
        "own": per_task(-result.own),
        "effective_samples": per_task(result.effective_samples),
        "samples": samples,
    }


def _forgetting(history: Sequence[dict[str, Any]], trainer: Trainer) -> dict[str, Any]:
    """Return the change of each task's NLL since it was learned; tasks learned before the log began are left out."""
    own, pooled = ([event["nll"][key] for event in history] for key in ("own", "per_task"))
    change = forgetting(own, pooled, trainer.sizes, shared_mass=trainer.replicas.model.prior.shares_mass)
    return {
        "own": [listed(row.numpy()) for row in change.own],
        "pooled": [listed(row.numpy()) for row in change.pooled],
        "dilution": listed(change.dilution.numpy()),
    }


def _diversity(features: Tensor, tasks: Sequence[Task], classifier: Classifier) -> dict[str, Any]:
    """Return the spread of the samples with features (R, N, F) over the classes seen."""
    classes = [label for task in tasks for label in task.classes]
    result = diversity(classifier.classify_features(features, classes), classes)
    return {
        "table": listed(result.table.cpu().numpy()),
        "uniform": listed(result.uniform.cpu().numpy()),
        "bernoulli": listed(result.bernoulli.cpu().numpy()),
        "proportions": [listed(row.numpy()) for row in result.proportions.cpu()],
        "classes": classes,
        "samples": features.shape[1],
    }


def _frechet(features: Tensor, tasks: Sequence[Task], classifier: Classifier) -> dict[str, Any]:
    """Return the distance between samples with features (R, N, F) and the test images of the tasks seen."""
    real = torch.cat([task.test.images for task in tasks]).to(features.device)
    distances = frechet_distance(moments(features), moments(classifier.features(real)))
    return {"pooled": listed(distances.cpu().numpy()), "features": "classifier"}
