"""Which settings learn better? Variants of a method, scored on validation images after the last task.

    python benchmarks/variants.py --dataset mnist boo+distill warm=boo+distill:kl_warmup=20
    python benchmarks/variants.py --dataset celeba boo+distill held=boo+distill:distill_weight=2 --features classifier

Each variant is METHOD or NAME=METHOD:setting=value,…, as in a bench, with the recipe of its dataset (or `--preset`).
All have the same seeds, so compare them seed by seed. Test images are never used; with `--features`, samples are also
compared with the validation images (Fréchet distance, under the name of the features). `boovae tune` is faster for the
strength of a method, since it trains several values at once; this takes any setting.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

from boovae.bench.cells import Variant
from boovae.cli.terminal import print_rows
from boovae.config import Settings
from boovae.data import Stream
from boovae.errors import InputError, as_flag
from boovae.methods import make_method, resolve
from boovae.metrics.features import check_names
from boovae.metrics.measure import sample_networks
from boovae.metrics.reference import Reference
from boovae.replicas.devices import choose_device
from boovae.runs.data import load_data
from boovae.runs.progress import Lines
from boovae.runs.train import planned_tasks, trainer_for
from boovae.runs.tune import learn_and_score
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--tasks", type=int, default=None, help="learn only the first N tasks")
    parser.add_argument("--replicas", type=int, default=2, help="seeds of each variant")
    parser.add_argument("--preset", default=None)
    parser.add_argument("--images", type=int, default=400, help="validation images per task")
    parser.add_argument("--samples", type=int, default=500, help="importance samples per image")
    parser.add_argument("--features", nargs="+", default=(), help="also compare samples on these: classifier, …")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    options = parser.parse_args()
    try:
        compare(options)
    except InputError as error:
        sys.exit(f"variants.py: {error.spelled(as_flag)}")


def compare(options: argparse.Namespace) -> None:
    """Train every variant, one after another, and print a table; check all of them before training the first."""
    variants = [Variant.parse(text) for text in options.variants]
    settings = [settings_of(variant, options) for variant in variants]
    for each in settings:
        make_method(each)
    if options.features:
        check_names(options.features)
    rows = []
    for variant, each in zip(variants, settings, strict=True):
        began = time.perf_counter()
        scores, distances = score(each, options)
        by_seed = [statistics.fmean(seed) for seed in zip(*scores, strict=True)]
        rows.append(
            [
                variant.label,
                f"{statistics.fmean(by_seed):.2f}",
                " ".join(f"{value:.2f}" for value in by_seed),
                " ".join(f"{statistics.fmean(task):.1f}" for task in scores),
                *(f"{statistics.fmean(seeds):.2f}" for seeds in distances),
                f"{time.perf_counter() - began:.0f}",
            ]
        )
        print(*rows[-1], sep="  ", flush=True)  # keep what is finished if the comparison is stopped
    print_rows(["variant", "NLL", "by seed", "by task", *options.features, "seconds"], rows)


def settings_of(variant: Variant, options: argparse.Namespace) -> Settings:
    """Return the settings of a variant, with the recipe of the dataset or the preset."""
    given = {"dataset": options.dataset, "method": variant.method, "tasks": options.tasks, "replicas": options.replicas}
    return resolve({**given, **variant.changes}, preset=options.preset)


def score(settings: Settings, options: argparse.Namespace) -> tuple[list[list[float]], list[list[float]]]:
    """Return, after the last task, the NLL of each task's validation images and the distances on features, by seed."""
    stream, device = load_data(settings), choose_device(options.device)
    planned = planned_tasks(stream, settings)
    trainer = trainer_for(settings, planned, device, options.compile)
    parts = [task.valid.images[: options.images] for task in planned]
    metrics = ["frechet"] if options.features else []
    # Load the networks first, so that a missing one is reported before training.
    references = sample_networks(planned, trainer, metrics, Lines().note, options.features).references
    scores = learn_and_score(trainer, planned, parts, options.samples, Lines())
    return [nll.mean(1).tolist() for nll in scores], distances_of(trainer, planned, references)


def distances_of(trainer: Trainer, planned: Stream, references: Sequence[Reference]) -> list[list[float]]:
    """Return the Fréchet distance between samples and all validation images on each kind of features, by seed."""
    if not references:
        return []
    tasks = [dataclasses.replace(task, test=task.valid) for task in planned]
    samples = generate(trainer, trainer.settings.evaluation.generated)
    return [reference.scores(reference.features(samples), tasks).frechet.tolist() for reference in references]


if __name__ == "__main__":
    main()
