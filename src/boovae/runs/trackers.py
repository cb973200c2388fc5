"""Send a run's numbers and pictures to TensorBoard, Weights & Biases or Trackio, beside its `metrics.jsonl`.

Events are sent once they are safe in a checkpoint, so a run that was killed and resumed sends nothing twice. Tags are
paths that end with the seed: `valid/loss/seed_0`, `nll/task_03/seed_0`.
"""

import hashlib
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from boovae.errors import InputError, unknown_name
from boovae.metrics.evaluation import read_evaluation
from boovae.metrics.metric import numbers as metric_numbers
from boovae.runs.run import Run

Event = dict[str, Any]

#: The package of each tracker; each is an extra of this one.
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


class TensorBoard:
    """Event files in RUN/tensorboard; `tensorboard --logdir RUN` shows them."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.files.tensorboard))

    def numbers(self, values: dict[str, float], axis: str, step: int) -> None:
        """Log numbers; TensorBoard has one axis per tag."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def picture(self, tag: str, path: Path, axis: str, step: int) -> None:
        """Log a PNG file."""
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            self._writer.add_image(tag, np.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()


class Dashboard:
    """Weights & Biases, or Trackio, which has the same interface; a run folder is one run there."""

    def __init__(self, run: Run, package: ModuleType) -> None:
        self._package: Any = package
        identity = hashlib.blake2b(str(run.folder.resolve()).encode(), digest_size=8).hexdigest()
        options: dict[str, Any] = {"name": f"{run.folder.name}-{identity[:4]}", "resume": "allow"}
        if package.__name__ == "wandb":
            options |= {"id": identity, "dir": str(run.folder)}
        with redirect_stdout(sys.stderr):  # stdout is for results
            self._run: Any = self._package.init(project="boovae", config=run.settings.flat(), **options)
        if package.__name__ == "wandb":  # each axis has its own steps
            for axis in ("epoch", "tasks_seen"):
                self._run.define_metric(axis)
            self._run.define_metric("*", step_metric="tasks_seen")  # the default: metrics choose their own tags
            for tags in ("train/*", "valid/*", "learning_rate/*"):
                self._run.define_metric(tags, step_metric="epoch")

    def numbers(self, values: dict[str, float], axis: str, step: int) -> None:
        """Log numbers together with the step on their axis."""
        self._run.log({**values, axis: step})

    def picture(self, tag: str, path: Path, axis: str, step: int) -> None:
        """Log a PNG file."""
        self._run.log({tag: self._package.Image(str(path)), axis: step})

    def close(self) -> None:
        """Send what is left."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


# --- from events to numbers -----------------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """Numbers of an event by tag, and their step on an axis."""

    axis: str
    step: int
    values: dict[str, float]


def numbers_of(event: Event, epochs: int, seeds: Sequence[int]) -> Numbers | None:
    """Return the numbers of an event, or None if it has none; `epochs` have been logged before it.

    >>> event = {"event": "epoch", "train": {"boo.encoder": [2.0]}, "valid": {"loss": [None]}, "learning_rate": [0.1]}
    >>> numbers_of(event, 5, [7])
    Numbers(axis='epoch', step=5, values={'train/boo/encoder/seed_7': 2.0, 'learning_rate/seed_7': 0.1})
    """
    rows: dict[str, Sequence[Any]] = {}
    if event["event"] == "epoch":
        for split in ("train", "valid"):
            rows |= {f"{split}/{name.replace('.', '/')}": values for name, values in event[split].items()}
        rows["learning_rate"] = event["learning_rate"]
        return Numbers("epoch", epochs, _by_seed(rows, seeds))
    if event["event"] != "evaluation":
        return None
    evaluation = read_evaluation(event, "the evaluation", len(seeds))
    shared: dict[str, float] = {}
    for number in metric_numbers(evaluation):
        tag, values = number.tag, number.values.tolist()
        if tag and number.values.ndim == 0:
            shared[tag] = float(values)
        elif tag and number.values.ndim == 1:
            rows[tag] = values
        elif tag:
            rows |= {f"{tag}/task_{task:02d}": row for task, row in enumerate(values)}
    return Numbers("tasks_seen", evaluation.learned, _by_seed(rows, seeds) | shared)


def _by_seed(rows: dict[str, Sequence[Any]], seeds: Sequence[int]) -> dict[str, float]:
    """Return one number per tag and seed; what is not finite is left out."""
    return {
        f"{tag}/seed_{seed}": float(value)
        for tag, values in rows.items()
        for seed, value in zip(seeds, values, strict=False)
        if value is not None and math.isfinite(value)
    }


# --- following a run ------------------------------------------------------------------------------------------------


@contextmanager
def tracked(run: Run, names: Sequence[str]) -> Iterator[None]:
    """Send the events of a run to trackers, as long as the context is open."""
    trackers: list[TensorBoard | Dashboard] = []
    epochs = len(run.events("epoch"))  # of earlier processes

    def follow(events: Sequence[Event]) -> None:
        nonlocal epochs
        for event in events:
            found = numbers_of(event, epochs, run.settings.training.seeds)
            epochs += event["event"] == "epoch"
            if found is None:
                continue
            pictures: dict[str, Path] = {}
            if event["event"] == "evaluation":
                samples = run.files.sample_grid(event["task"])
                pictures = {"pictures/samples": samples, "pictures/components": run.files.components_picture}
            for tracker in trackers:
                tracker.numbers(found.values, found.axis, found.step)
                for tag, path in pictures.items():
                    if path.is_file():
                        tracker.picture(tag, path, found.axis, found.step)

    with ExitStack() as stack:
        for name in dict.fromkeys(names):
            trackers.append(TensorBoard(run) if name == "tensorboard" else Dashboard(run, _package(name)))
            stack.callback(trackers[-1].close)
        if trackers:
            run.follow = follow
            stack.callback(setattr, run, "follow", None)
        yield


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that do not exist or are not installed, before any work is done."""
    for name in names:
        if name not in PACKAGES:
            raise unknown_name("tracker ({log})", name, PACKAGES)
        _package(name)


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(PACKAGES[name])
    except ImportError:
        raise InputError(
            f"{{log}} {name} needs a package that is not installed: pip install 'boovae[{name}]'"
        ) from None
