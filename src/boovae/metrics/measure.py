"""Measuring a trained model: all metrics that are asked for, as one evaluation."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from boovae.errors import InputError
from boovae.metrics.classifier import Classifier
from boovae.metrics.classifier_cache import trained_classifier
from boovae.metrics.evaluation import ClassifierUsed, Evaluation
from boovae.metrics.features import ClassifierFeatures, make_features
from boovae.metrics.metric import USUAL, Context, asked, plain_section
from boovae.metrics.partial_sums import PartialSums
from boovae.metrics.reference import Reference
from boovae.replicas.devices import matmul_precision

if TYPE_CHECKING:
    from boovae.data import Stream, Task
    from boovae.training.trainer import Trainer


class SampleNetworks(NamedTuple):
    """What samples are looked at with: the classifier that counts classes, and networks whose features are compared."""

    classifier: Classifier | None = None
    references: Sequence[Reference] = ()


def sample_networks(
    stream: Stream,
    trainer: Trainer,
    metrics: Sequence[str],
    say: Callable[[str], None],
    features: Sequence[str] = ("classifier",),
    data_dir: Path | None = None,
) -> SampleNetworks:
    """Return the networks that these metrics need, made once per run; one class alone has no classifier.

    A classifier that must be trained first tells `say` how far it is.
    """
    needs = {need for metric in asked(metrics) for need in metric.needs}
    names = features if "features" in needs else ()
    classifier = None
    if ("classifier" in needs or "classifier" in names) and len(stream.full.class_names) > 1:
        classifier = trained_classifier(stream, device=trainer.device, progress=say)
    options = (stream.shape, stream.pixel_range, trainer.device)
    networks = [
        make_features(name, *options, classifier=classifier, data_dir=data_dir)
        for name in names
        if name != "classifier" or classifier is not None
    ]
    return SampleNetworks(classifier, [Reference(network) for network in networks])


@torch.no_grad()
def evaluate(
    trainer: Trainer,
    tasks: Sequence[Task | None],
    classifier: Classifier | None,
    history: Sequence[Evaluation],
    *,
    metrics: Sequence[str] = USUAL,
    references: Sequence[Reference] | None = None,
    partial_sums: MutableMapping[str, PartialSums] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Evaluation:
    """Return the evaluation after the tasks seen; `history` holds the earlier ones, for forgetting.

    A task is None where its images are not at hand: its numbers are NaN, and what would need them is left out.
    `references` are what samples are compared with on features; the classifier's, if not given. `progress` is called
    after every step of what takes long, and `partial_sums` then hold all that was done so far: handed in again, it is
    not repeated.
    """
    chosen = asked(metrics)
    if len(tasks) != trainer.tasks_done:
        raise InputError(f"tasks: {len(tasks)} of them, but {trainer.tasks_done} are learned; hand in just those")
    if references is None:
        references = [Reference(ClassifierFeatures(classifier))] if classifier is not None else []
    context = Context(trainer, tasks, history, classifier, references)
    context.partial_sums = {} if partial_sums is None else partial_sums
    context.progress = progress or context.progress
    others: dict[str, Any] = {}
    with matmul_precision(trainer.device):
        for metric in chosen:
            if all(map(context.has, metric.needs)):
                found = metric.measure(context)
                if metric.section:
                    context.sections[metric.section] = found
                else:
                    others[metric.name] = plain_section(metric.name, found, len(tasks), len(trainer.replicas))
    if classifier is not None and "samples" in vars(context):
        context.sections["classifier"] = ClassifierUsed(classifier.accuracy, classifier.digest)
    return Evaluation(task=len(tasks) - 1, seen=len(tasks), **context.sections, others=others)
