"""What do the defaults reach on data that nobody tuned? The continual model against all data at once.

    python benchmarks/defaults.py omniglot --mode continual --seeds 3 --out results/choosing/defaults.jsonl
    python benchmarks/defaults.py omniglot --mode joint --seeds 3 --out results/choosing/defaults.jsonl

`continual` learns the tasks one after another with no settings but those that name the data. `joint` learns all
images in one task: method `joint`, a VampPrior with as many pseudo-inputs as the continual model may have, the settings
chosen for the first task, and the sum of the steps of all tasks. `hand` is `joint` with settings chosen by hand. Each
line of the result is one seed: NLL of the test images (nats, and bits per value of an 8-bit picture), KID, what was
forgotten, and for `shapes` the share of pictures drawn and reconstructed as the shape they should be, judged by a
classifier. Data are found as everywhere (BOOVAE_DATA).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from boovae.config import Settings
from boovae.config.choose import choose_model, choose_task
from boovae.data import Stream, Task
from boovae.data.summary import summarise
from boovae.methods import resolve
from boovae.metrics.classifier_training import trained_classifier
from boovae.metrics.evaluation import Evaluation
from boovae.metrics.measure import evaluate, sample_networks
from boovae.replicas.devices import choose_device
from boovae.runs.data import load_data
from boovae.runs.train import planned_tasks, trainer_for
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer
from speed import machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from shapes import SHAPES, shapes

#: Grey values for the whole range of an 8-bit picture.
STEPS = 255
#: Settings of the hand-set joint model: those that documentation and older recipes recommend for grey pictures.
HAND = {
    **{"net": "mlp:300", "latent_dim": 40, "bound_samples": 10, "deform": 0.1},
    **{"epochs": 400, "epoch_steps": 20, "kl_warmup": 20, "early_stop": 80, "learning_rate": 1e-3},
}


def rows(folder: Path = Path()) -> dict[str, dict[str, Any]]:
    """Return the settings that name the data of each row; `folder` holds the made ones."""
    data = Path(os.environ.get("BOOVAE_DATA", "."))
    limited = {
        f"{name}-{limit}": {"dataset": name, "limit": limit}
        for name in ("mnist", "fashion_mnist")
        for limit in (1000, 200)
    }
    return {
        **limited,
        **{name: {"dataset": name} for name in ("digits", "mnist", "fashion_mnist", "notmnist")},
        "omniglot": {"dataset": f"npz:{data}/omniglot/omniglot_28.npz", "classes_per_task": 5},
        "cifar5": {"dataset": f"npz:{data}/cifar5/cifar5_32.npz"},
        "shapes": {"dataset": f"npz:{folder}/shapes.npz"},
    }


def write_shapes(path: Path, count: int, seed: int) -> Path:
    """Write `count` pictures of each shape; return the path."""
    pictures = np.concatenate([shapes(name, count, seed) for name in SHAPES])
    np.savez(path, images=pictures, labels=np.repeat(np.arange(len(SHAPES)), count))
    return path


def main() -> None:
    """Measure one row and add its lines to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=rows())
    parser.add_argument("--mode", choices=("continual", "joint", "hand"), default="continual")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="for a quick look")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder), began)


def measure(options: argparse.Namespace, folder: Path, began: float) -> None:
    """Measure one row; `folder` is for made data."""
    if options.row == "shapes":
        write_shapes(folder / "shapes.npz", 200, seed=0)
    given = {**rows(folder)[options.row], "replicas": options.seeds, "seed": options.first_seed}
    if options.epochs:
        given["epochs"] = options.epochs
    settings = resolve(given)
    planned = planned_tasks(load_data(settings), settings)
    if options.mode != "continual":
        settings, planned = joint(settings, planned, HAND if options.mode == "hand" else {})
    device = choose_device(options.device)
    trainer = trainer_for(settings, planned, device, options.compile)
    evaluation, seconds = learned(trainer, planned)
    record = {"row": options.row, "mode": options.mode, **machine(device)}
    record |= {"seconds": round(time.monotonic() - began), "train_seconds": seconds}
    record["chosen"] = {name: trainer.settings.flat()[name] for name in ("net", "latent_dim", "likelihood", "epochs")}
    numbers = per_seed(trainer, planned, evaluation)
    if options.row == "shapes" and options.mode == "continual":
        judge = load_data(resolve({"dataset": f"npz:{write_shapes(folder / 'judge.npz', 1000, seed=1)}"}))
        for one, shares in zip(numbers, shape_shares(trainer, planned, judge), strict=True):
            one["shapes"] = shares
    lines = [json.dumps({**record, **one}) for one in numbers]
    print("\n".join(lines))
    if options.out:
        with options.out.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))


def joint(settings: Settings, planned: Stream, hand: dict[str, Any]) -> tuple[Settings, Stream]:
    """Return the settings and the stream of one task with all images, with the same number of steps in total."""
    first = summarise(planned[0].train.images, planned.spec)
    chosen = choose_model(settings, first)[0]
    by_task = [choose_task(chosen, summarise(task.train.images, planned.spec))[0].training for task in planned]
    sizes = [len(task.train.images) for task in planned]
    steps = sum(part.epochs * (size // part.batch_of(size)) for part, size in zip(by_task, sizes, strict=True))
    chosen = choose_task(chosen, first)[0]
    fixed = {name: chosen.flat()[name] for name in settings.chosen if name in Settings().flat()}
    batch = by_task[0].batch_of(sizes[0])
    epochs = max(steps // (sum(sizes) // batch), 1)
    fixed |= {"batch_size": batch, "epoch_steps": 1, "epochs": epochs, "early_stop": max(epochs // 4, 20)}
    fixed |= {"kl_warmup": max(epochs // 10, 1), **hand}
    given = {name: value for name, value in settings.flat().items() if name not in settings.chosen} | fixed
    given |= {"method": "joint", "prior": "vamp", "components": chosen.model.components * len(planned)}
    given |= {"classes_per_task": len(planned.full.class_names)}
    settings = resolve(given)
    return settings, planned_tasks(load_data(settings), settings)


def learned(trainer: Trainer, planned: Stream) -> tuple[Evaluation, list[float]]:
    """Learn all tasks, score each one when it has been learned, and evaluate everything at the end."""
    history: list[Evaluation] = []
    seconds = []
    metrics = ("nll", "forgetting", "diversity", "frechet")
    networks = sample_networks(planned, trainer, metrics, lambda text: None)
    for index, task in enumerate(planned):
        began = time.monotonic()
        trainer.learn(task)
        seconds.append(round(time.monotonic() - began, 1))
        if index + 1 < len(planned):
            only: list[Task | None] = [*[None] * index, task]
            history.append(evaluate(trainer, only, None, history, metrics=("nll",)))
    found = evaluate(
        trainer, list(planned), networks.classifier, history, metrics=metrics, references=networks.references
    )
    return found, seconds


def per_seed(trainer: Trainer, planned: Stream, evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the numbers of each seed."""
    assert evaluation.nll is not None
    found: list[dict[str, Any]] = []
    low, high = planned.pixel_range
    bins = 0.0 if trainer.likelihood.discrete else math.log(STEPS / (high - low)) * planned.spec.pixels
    for replica, seed in enumerate(trainer.settings.training.seeds):
        nll = float(evaluation.nll.pooled[replica])
        numbers: dict[str, Any] = {"seed": seed, "nll": round(nll, 3)}
        if trainer.settings.model.likelihood != "bernoulli":  # which is no density of grey values
            numbers["bits"] = round((nll + bins) / math.log(2) / planned.spec.pixels, 4)
        numbers["nll_per_task"] = [round(float(value), 2) for value in evaluation.nll.per_task[:, replica]]
        numbers["effective"] = [round(float(value), 1) for value in evaluation.nll.typical_effective[:, replica]]
        if evaluation.forgetting is not None:
            change = evaluation.forgetting.own_claimed[:, replica]
            numbers["forgotten"] = [None if np.isnan(value) else round(float(value), 2) for value in change]
        for name, distances in evaluation.frechet.sets.items() if evaluation.frechet else ():
            numbers[f"{name} features"] = {"frechet": round(float(distances.frechet[replica]), 4)}
            if distances.kid is not None:
                numbers[f"{name} features"]["kid"] = round(float(distances.kid[replica]), 5)
        if evaluation.diversity is not None:
            numbers["diversity"] = round(float(evaluation.diversity.table[replica]), 4)
        if evaluation.classifier is not None:
            numbers["classifier_accuracy"] = evaluation.classifier.accuracy
        found.append({**numbers, "collapsed": bool(trainer.collapsed[replica])})
    return found


def shape_shares(trainer: Trainer, planned: Stream, judge: Stream, count: int = 400) -> list[dict[str, Any]]:
    """Return for each seed the shares of reconstructions and samples that a classifier takes for their task's shape.

    Pictures of `judge` train the classifier; its test pictures are reconstructed.
    """
    classifier = trained_classifier(judge, device=trainer.device)
    shares: list[dict[str, Any]] = [{"reconstructed": [], "drawn": []} for _ in trainer.settings.training.seeds]
    for index, task in enumerate(judge):
        x = task.test.images.to(trainer.device).expand(len(shares), -1, -1)
        with torch.no_grad():
            again = trainer.view(index).map(lambda model, x: model.images(model.posterior(x).mean), x)
        for name, images in (("reconstructed", again), ("drawn", generate(trainer, count, "shapes", index))):
            features = classifier.features(images.clamp(*planned.pixel_range))
            right = classifier.classify_features(features, classifier.classes) == index
            for replica, share in enumerate(right.float().mean(1).tolist()):
                shares[replica][name].append(round(share, 3))
    return [{**share, "classifier": round(classifier.accuracy, 3)} for share in shares]


if __name__ == "__main__":
    main()
