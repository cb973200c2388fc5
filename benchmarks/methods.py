"""How long does a training step of each method take, and how does it grow with the tasks seen?

    python benchmarks/methods.py --device cuda --compile on

Random images of MNIST's size, the paper's network for MNIST (mlp:300, 40 latents), batches of 250, five replicas; or of
another dataset (`--dataset celeba`), with its network and batches. Tasks follow each other as in a run; steps are
timed in the tasks given by `--tasks`, and the median epoch counts. Work between epochs, such as learning components, is
not part of a step; `seconds` of a run include it. `--profile` also lists the kernels of one epoch.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
from torch.profiler import profile

from boovae.bench.cells import schedule
from boovae.cli.terminal import print_rows
from boovae.config import Settings
from boovae.data import ImageSpec
from boovae.training.events import Event
from boovae.training.trainer import Observer, Trainer
from speed import IMAGES, machine, task_of

METHODS = (
    *("standard", "ewc", "si", "vcl", "coreset", "mog", "replay", "multihead", "multihead+ewc", "multihead+vcl"),
    *("boo", "boo+ewc", "boo+vcl", "boo+replay", "boo+distill"),
)
#: The size and range of images of each dataset.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[float, float]]] = {
    **dict.fromkeys(("mnist", "notmnist", "fashion_mnist"), ((28, 28), (0.0, 1.0))),
    "celeba": ((3, 32, 32), (-1.0, 1.0)),
}
EPOCHS, UNTIMED = 8, 3  # of a timed task; the first epochs compile and capture the step


class StepClock(Observer):
    """An observer that times each epoch, from its first block until its numbers are available.

    Epoch number `profiled` is profiled instead of timed: `profiler` has its kernels.
    """

    def __init__(self, profiled: int | None = None) -> None:
        self.seconds: list[float] = []  # of each epoch's steps
        self.profiler = profile()
        self._profiled = profiled
        self._began = 0.0

    def block(self, trainer: Trainer) -> None:
        """Start the clock at the first block of an epoch."""
        if trainer.block == 0:
            if trainer.epoch == self._profiled:
                self.profiler.start()
            self._began = time.perf_counter()

    def event(self, event: Event) -> None:
        """Stop the clock: once the numbers of an epoch are available, the device has finished its steps."""
        if event["event"] == "epoch":
            if event["epoch"] == self._profiled:
                self.profiler.stop()
            else:
                self.seconds.append(time.perf_counter() - self._began)

    def epoch(self, trainer: Trainer, event: Event) -> None:
        """Ignore what follows the numbers: it is not part of a step."""


def main() -> None:
    """Time all methods and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", choices=("on", "off"), default="off")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--dataset", choices=sorted(SHAPES), default="mnist", help="its recipe and image size are used")
    parser.add_argument("--tasks", nargs="+", type=int, default=(2, 5, 10), help="tasks to time")
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--images", type=int, default=IMAGES, help="images per task")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one epoch of each timed task")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    options = parser.parse_args()
    device = torch.device(options.device)
    steps: dict[str, dict[int, float]] = {}
    for method in options.methods:
        settings = settings_of(method, options.dataset, options.replicas)
        steps[method] = time_method(settings, device, options)
        print(method, {task: round(value, 3) for task, value in steps[method].items()}, flush=True)
    print_rows(["method", *(f"ms at task {task}" for task in options.tasks), "times standard"], rows(steps))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": machine(device), "compile": options.compile, "replicas": options.replicas, "ms": steps}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def settings_of(method: str, dataset: str, replicas: int) -> Settings:
    """Return the settings of a cell of a bench, without early stopping and with short fits between epochs."""
    return schedule({"dataset": dataset, "method": method, "replicas": replicas, "early_stop": 10**6}, {"boo_steps": 1})


def time_method(settings: Settings, device: torch.device, options: argparse.Namespace) -> dict[int, float]:
    """Return milliseconds per step of all replicas, the median over epochs, by task."""
    shape, pixel_range = SHAPES[settings.data.dataset]
    trainer = Trainer(settings, ImageSpec(shape, pixel_range), device=device, compile=options.compile == "on")
    result = {}
    for number in range(1, max(options.tasks) + 1):
        timed = number in options.tasks
        clock = StepClock(EPOCHS if timed and options.profile else None)
        trainer.settings = settings.changed(epochs=EPOCHS + options.profile if timed else 1)
        data = torch.rand(options.images, math.prod(shape), generator=torch.Generator().manual_seed(number))
        trainer.learn(task_of(data, number - 1), clock)
        if timed:
            result[number] = 1000 * statistics.median(clock.seconds[UNTIMED:]) / trainer.engine.steps_per_epoch
        if timed and options.profile:
            order = f"self_{device.type}_time_total"
            print(clock.profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=90))
    return result


def rows(steps: dict[str, dict[int, float]]) -> list[list[str]]:
    """Return the table: milliseconds, and the ratio to `standard` at the last task if that was timed."""
    last = {method: list(times.values())[-1] for method, times in steps.items()}
    unit = last.get("standard")
    return [
        [method, *(f"{value:.3f}" for value in times.values()), f"{last[method] / unit:.2f}" if unit else "-"]
        for method, times in steps.items()
    ]


if __name__ == "__main__":
    main()
