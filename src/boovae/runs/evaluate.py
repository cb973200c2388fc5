"""Evaluate the model of a run again, as it is now, and change nothing in its folder."""

from collections.abc import Sequence
from pathlib import Path

from boovae.errors import InputError
from boovae.metrics.evaluation import Evaluation
from boovae.metrics.features import check_names
from boovae.metrics.measure import evaluate, sample_networks
from boovae.metrics.metric import USUAL, check_metrics
from boovae.runs.data import Moved, learned_images
from boovae.runs.progress import Display
from boovae.runs.reading import read_record
from boovae.runs.train import load_trainer
from boovae.runs.warnings import find_warnings


def evaluate_run(
    folder: Path,
    *,
    samples: int | None = None,
    generated: int | None = None,
    fit_posterior: bool = False,
    metrics: Sequence[str] = USUAL,
    features: Sequence[str] = ("classifier",),
    data_dir: Path | None = None,
    moved: Moved | None = None,
    device: str = "auto",
    display: Display,
) -> Evaluation:
    """Measure the model of the run in `folder` on the images that are available; None keeps the run's setting.

    What went wrong in the run, and makes its numbers misleading, is said first.
    """
    check_names(features)
    check_metrics(metrics)
    run, trainer = load_trainer(folder, device, display)
    with run:
        past = learned_images(run.settings, run.head(), run.events("extend"), data_dir, moved=moved)
        tasks = past.tasks[: trainer.tasks_done]
        if not any(tasks):
            why = "; ".join(dict.fromkeys(past.missing.values())) or "no task is finished yet"
            raise InputError(f"none of the images that {folder} has learned can be found: {why}")
        for warning in find_warnings(read_record(folder)):
            display.note(f"warning: {warning.text}")
        asked = {"samples": samples, "generated": generated, "fit_posterior": "always" if fit_posterior else None}
        changes = {name: value for name, value in asked.items() if value is not None}
        trainer.settings = trainer.settings.changed(**changes)
        if past.missing:
            display.note(past.explain())
        classifier, references = sample_networks(past.stream, trainer, metrics, display.note, features, data_dir)
        history, show = run.evaluations[: trainer.tasks_done - 1], display.evaluating
        return evaluate(trainer, tasks, classifier, history, metrics=metrics, references=references, progress=show)
