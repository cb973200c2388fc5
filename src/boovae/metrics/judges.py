"""Who judges samples: chosen once per run, from what is to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from boovae.metrics.classifier import Classifier, trained_classifier
from boovae.metrics.evaluation import ON_FEATURES, check_metrics
from boovae.metrics.features import make_features
from boovae.metrics.reference import Reference

if TYPE_CHECKING:
    from boovae.data import Stream
    from boovae.training.trainer import Trainer


class Judges(NamedTuple):
    """Who judges samples: the classifier that counts classes, and networks on whose features they are compared."""

    classifier: Classifier | None = None
    references: Sequence[Reference] = ()


def judge(
    stream: Stream,
    trainer: Trainer,
    metrics: Sequence[str],
    say: Callable[[str], None],
    features: Sequence[str] = ("classifier",),
    data_dir: Path | None = None,
) -> Judges:
    """Return who judges samples as these metrics want it; one class alone has no classifier.

    A classifier that must be trained first tells `say` how far it is.
    """
    check_metrics(metrics)
    compares = bool(ON_FEATURES & set(metrics))
    wanted = "diversity" in metrics or (compares and "classifier" in features)
    classifier = None
    if wanted and len(stream.full.class_names) > 1:
        classifier = trained_classifier(stream, device=trainer.device, progress=say)
    names = [name for name in features if compares and (name != "classifier" or classifier is not None)]
    options = (stream.shape, stream.pixel_range, trainer.device)
    networks = [make_features(name, *options, classifier=classifier, data_dir=data_dir) for name in names]
    return Judges(classifier, [Reference(network) for network in networks])
