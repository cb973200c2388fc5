"""Evaluation of a trained model: all requested metrics in one record."""

from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from boovae.data import Stream, Task
from boovae.errors import InputError
from boovae.metrics.classifier import Classifier
from boovae.metrics.classifier_training import trained_classifier
from boovae.metrics.evaluation import ClassifierUsed, Evaluation
from boovae.metrics.features import make_features
from boovae.metrics.metric import USUAL, Context, plain_section, requested
from boovae.metrics.partial_results import PartialResult
from boovae.metrics.reference import Reference
from boovae.replicas.devices import matmul_precision
from boovae.training.trainer import Trainer


class SampleNetworks(NamedTuple):
    """The networks that samples are scored with: the classifier that counts classes, and those that give features."""

    classifier: Classifier | None = None
    references: Sequence[Reference] = ()


def sample_networks(
    stream: Stream | None,
    trainer: Trainer,
    metrics: Sequence[str],
    say: Callable[[str], None],
    features: Sequence[str] = ("classifier",),
    data_dir: Path | None = None,
) -> SampleNetworks:
    """Return the networks that these metrics need; a dataset with a single class has no classifier.

    Without images there are none. A classifier that must be trained first reports its progress to `say`.
    """
    if stream is None:
        return SampleNetworks()
    needs = {need for metric in requested(metrics) for need in metric.needs}
    names = features if "features" in needs else ()
    classifier = None
    if ("classifier" in needs or "classifier" in names) and len(stream.full.class_names) > 1:
        classifier = trained_classifier(stream, device=trainer.device, progress=say)
    if classifier is None:
        names = [name for name in names if name != "classifier"]
    networks = [make_features(name, stream.spec, trainer.device, classifier, data_dir) for name in names]
    return SampleNetworks(classifier, [Reference(network) for network in networks])


@torch.no_grad()
def evaluate(
    trainer: Trainer,
    tasks: Sequence[Task | None],
    classifier: Classifier | None,
    history: Sequence[Evaluation],
    *,
    metrics: Sequence[str] = USUAL,
    references: Sequence[Reference] = (),
    partial_results: MutableMapping[str, PartialResult] | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Evaluation:
    """Return the evaluation after the tasks seen; `history` holds the earlier ones, for forgetting.

    A task is None if its images are not available: its numbers are NaN, and metrics that need all images are left out.
    `references` compare samples with real images on features. `progress` is called after every step of a long
    computation, and `partial_results` then hold everything computed so far; pass them in again to continue from there.
    """
    if len(tasks) != trainer.tasks_done:
        raise InputError(f"tasks: {len(tasks)} of them, but {trainer.tasks_done} are learned; pass exactly those")
    kept = {} if partial_results is None else partial_results
    context = Context(trainer, tasks, history, classifier, references, progress, kept)
    others: dict[str, Any] = {}
    with matmul_precision(trainer.device):
        for metric in requested(metrics):
            if all(map(context.has, metric.needs)):
                found = metric.measure(context)
                if metric.section:
                    context.sections[metric.section] = found
                else:
                    others[metric.name] = plain_section(metric.name, found, len(tasks), len(trainer.replicas))
    if classifier is not None and "samples" in vars(context):
        context.sections["classifier"] = ClassifierUsed(classifier.accuracy, classifier.digest)
    return Evaluation(task=len(tasks) - 1, seen=len(tasks), **context.sections, others=others)
