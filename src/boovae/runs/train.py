"""Train a run: learn one task after another, evaluate after each, and keep everything in its folder."""

import io
import json
import signal
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from boovae.config import Settings
from boovae.config.choose import choose
from boovae.config.resolve import read_toml
from boovae.data import ImageSpec, Stream, Task
from boovae.data.summary import summarise
from boovae.errors import InputError, RunError
from boovae.files import write_file
from boovae.methods import from_mapping, outside_digest
from boovae.metrics.features import check_names
from boovae.metrics.latent import codes, latent_map
from boovae.metrics.measure import SampleNetworks, evaluate, sample_networks
from boovae.metrics.metric import USUAL, check_metrics
from boovae.metrics.schema import to_json
from boovae.replicas.devices import choose_device, compiles
from boovae.runs.data import is_own, recorded
from boovae.runs.environment import environment
from boovae.runs.folder import LOG_FORMAT, RunFolder
from boovae.runs.inspection import has_components, save_components
from boovae.runs.progress import Display, TimeEstimate
from boovae.runs.run import Run
from boovae.runs.trackers import check_trackers, tracked
from boovae.runs.warnings import URGENT, find_warnings
from boovae.training.events import Event, Interrupted
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer

#: Images in a sample grid.
GRID_IMAGES = 64
#: Names of tasks in the line that shows their order.
MOST_NAMES = 12
#: File types of samples.
SAMPLE_FILES = (".png", ".npy")


def train(
    settings: Settings,
    stream: Stream,
    out: Path,
    *,
    device: str = "auto",
    compile: Literal["auto", "on", "off"] = "auto",
    resume: Literal["auto", "always", "never"] = "auto",
    metrics: Sequence[str] = USUAL,
    log: Sequence[str] = (),
    features: Sequence[str] = ("classifier",),
    data_dir: Path | None = None,
    display: Display | None = None,
    command: str = "",
) -> Path:
    """Learn the tasks of `stream` one after another, evaluate after each, and keep everything in the folder `out`.

    A stopped run continues where it stopped. `log` names trackers to send numbers to. Returns the folder.
    """
    out = Path(out)
    check_trackers(log)
    check_names(features)
    check_metrics(metrics)
    chosen = choose_device(device)
    planned = planned_tasks(stream, settings)
    before = None if resume == "never" else recorded_settings(out)
    trainer = trainer_for(settings, planned, chosen, compile, recorded=before)
    settings = recorded(trainer.settings, stream)
    with _opened(out, settings, resume, trainer, command, display) as run, signals(run):
        if not run.restore(trainer):
            run.event(run_event(settings, planned.spec, [task.name for task in planned], planned.split_record))
        _check_same(run, planned)
        if len(run.evaluations) >= len(planned):
            run.display.note(f"{out} is finished; `boovae extend {out}` learns one more task")
            return out
        introduce(run, planned)
        networks = sample_networks(planned, trainer, metrics, run.say, features, data_dir)
        with tracked(run, log):
            advance(run, trainer, planned, networks, metrics)
        return out


def introduce(run: Run, planned: Stream) -> None:
    """Show the order of the tasks and how their images were read."""
    names = [task.name for task in planned]
    shown = names if len(names) <= MOST_NAMES else [*names[: MOST_NAMES - 1], "…", names[-1]]
    if len(names) > 1:
        run.display.note(textwrap.shorten(f"{len(names)} tasks in order: {', '.join(shown)}", 160, placeholder=" …"))
    if note := planned.split_record.get("note"):
        run.display.note(note)


def advance(
    run: Run, trainer: Trainer, tasks: Sequence[Task | None], networks: SampleNetworks, metrics: Sequence[str]
) -> None:
    """Learn and evaluate until all tasks are done, starting where trainer and log are.

    A finished task is None if its images are missing.
    """
    said: set[str] = set()
    if to_learn := [len(task.train.images) for task in tasks[trainer.tasks_done :] if task is not None]:
        run.estimate = TimeEstimate(to_learn, run.display)
    while len(run.evaluations) < len(tasks):
        evaluated = len(run.evaluations) < trainer.tasks_done
        if evaluated:
            _evaluate(run, trainer, tasks[: trainer.tasks_done], networks, metrics)
        else:
            task = tasks[trainer.tasks_done]
            assert task is not None
            trainer.prepare(task)
            if run.estimate is not None:
                run.estimate.task()
            run.display.task(trainer.tasks_done, len(tasks), task.name, trainer.settings.training.epochs)
            run.learn(trainer, task)
        run.checkpoint(trainer)
        if evaluated and len(run.evaluations) < len(tasks):  # at the end of a run all warnings are shown
            warn(run, said)


def _evaluate(
    run: Run, trainer: Trainer, tasks: Sequence[Task | None], networks: SampleNetworks, metrics: Sequence[str]
) -> None:
    """Measure the model after a task, and write numbers and pictures to the run folder."""

    def progress(share: float) -> None:
        run.block(trainer)
        run.display.evaluating(share)

    began = time.monotonic()
    evaluation = evaluate(
        trainer,
        tasks,
        networks.classifier,
        run.evaluations,
        metrics=metrics,
        references=networks.references,
        partial_results=run.partial_results,
        progress=progress,
    )
    run.event(to_json(evaluation))
    run.partial_results.clear()
    save_samples(trainer, run.files.sample_grid(evaluation.task))
    if has_components(trainer):
        save_components(run, trainer)
    write_file(run.files.latents, json.dumps(latent_map(trainer, codes(trainer, tasks))).encode())
    seconds = {"train_seconds": run.task_seconds, "evaluate_seconds": time.monotonic() - began}
    run.timing({"event": "task", "task": evaluation.task, **seconds, "steps": trainer.task_steps})


def warn(run: Run, said: set[str]) -> None:
    """Show urgent warnings as soon as they arise, each kind once."""
    for warning in find_warnings(run.record()):
        if warning.kind in URGENT and warning.kind not in said:
            said.add(warning.kind)
            run.display.note(f"warning: {warning.text}")


def save_samples(
    trainer: Trainer, path: Path, task: int | None = None, count: int = GRID_IMAGES, replica: int = 0, seed: int = 0
) -> None:
    """Write one replica's samples: a grid as PNG, or the images (n, height, width[, colours]) as a NumPy file."""
    from boovae.report.pictures import save_grid, tile_scale

    spec, purpose = trainer.spec, f"grid {seed}" if seed else "grid"
    images = generate(trainer, count, purpose, task)[replica].cpu().numpy()
    if path.suffix == ".npy":
        pixels, file = images.reshape(-1, *spec.shape), io.BytesIO()
        np.save(file, np.moveaxis(pixels, 1, -1) if pixels.ndim == 4 else pixels, allow_pickle=False)
        write_file(path, file.getvalue())
    else:
        save_grid(path, images, spec.shape, scale=tile_scale(spec.shape), pixel_range=spec.pixel_range)


def load_trainer(folder: Path, device: str = "auto", display: Display | None = None) -> tuple[Run, Trainer]:
    """Open a finished or stopped run without its data; the caller closes it."""
    with ExitStack() as stack:
        run = stack.enter_context(Run.open(Path(folder), display))
        tensors, record = run.saved()
        trainer = make_trainer(run, choose_device(device))
        trainer.load_state(tensors, record)
        stack.pop_all()
        return run, trainer


def make_trainer(run: Run, device: torch.device, *, compile: bool = False) -> Trainer:
    """Return a trainer for the images that the log of a run describes."""
    head = run.head()
    low, high = head.get("pixel_range") or (0.0, 1.0)
    spec = ImageSpec(tuple(head["shape"]), (low, high), head["split"]["binarize"])
    return Trainer(run.settings, spec, device=device, compile=compile)


def planned_tasks(stream: Stream, settings: Settings) -> Stream:
    """Return the tasks that the settings select."""
    if settings.data.tasks is not None and settings.data.tasks > len(stream):
        raise InputError(
            f"{{tasks}} is {settings.data.tasks}, but {stream.name} has {len(stream)} tasks; use at most that many"
        )
    if settings.data.binarize != stream.binarize:
        raise InputError(
            f"{{binarize}} is {settings.data.binarize}, but the images of {stream.name} are {stream.binarize}: it "
            "belongs to the data, so pass it to load_stream or Stream.from_tasks too"
        )
    return stream[: settings.data.tasks]


def trainer_for(
    settings: Settings,
    planned: Stream,
    device: torch.device,
    compile: str,
    *,
    recorded: Settings | None = None,
    **options: Any,
) -> Trainer:
    """Return a trainer for the planned tasks; its steps are compiled if asked for or worthwhile.

    Settings that nobody gave are chosen from the first task, or taken from a run that is continued (`recorded`).
    """
    settings, choices = choose(settings, summarise(planned[0].train.images, planned.spec))
    if recorded is not None:
        settings = _continued(settings, recorded)
    compiled = compiles(compile, sum(len(task.train.images) for task in planned), settings, device)
    return Trainer(settings, planned.spec, device=device, compile=compiled, choices=choices, **options)


def _continued(settings: Settings, recorded: Settings) -> Settings:
    """Return the settings with what a run chose, or all it recorded if it is from before settings were chosen."""
    taken = {name for name in settings.chosen if name in recorded.chosen or not recorded.chosen}
    values = {name: value for name, value in recorded.flat().items() if name in taken}
    own = tuple((name, value) for name, value in settings.own if name not in taken)  # not recorded: the default
    chosen = tuple(name for name in settings.chosen if name in recorded.chosen)
    return replace(settings, own=own, chosen=chosen).changed(**values)


def recorded_settings(folder: Path) -> Settings | None:
    """Return the settings of the run in a folder; None if it holds none."""
    files = RunFolder(folder)
    return from_mapping(read_toml(files.config)) if files.exists else None


def _opened(out: Path, settings: Settings, resume: str, trainer: Trainer, command: str, display: Display | None) -> Run:
    exists = RunFolder(out).exists
    if resume == "always" and not exists:
        raise InputError(f"{{resume=always}}: {out} does not hold a run; use {{resume=auto}} to start one")
    if resume == "never" or not exists:
        return Run.create(out, settings, environment(trainer.device, trainer.compile, command), display)
    run = Run.open(out, display)
    # A default may have been given explicitly.
    there, here = run.settings.flat(), from_mapping(settings.flat()).flat()
    if is_own(settings.data.dataset) and is_own(run.settings.data.dataset):
        there["dataset"] = here["dataset"]  # they may have moved: `_check_same` compares their content
    different = [name for name in there | here if there.get(name) != here.get(name)]
    if different:
        run.close()
        shown = {name: [values.get(name, "the default") for values in (there, here)] for name in different}
        what = ", ".join(f"{{{name}}} {before} there, {now} here" for name, (before, now) in shown.items())
        raise InputError(f"{out} holds a run with other settings ({what}): choose another {{out}} or the same settings")
    return run


def run_event(settings: Settings, spec: ImageSpec, tasks: Sequence[str], split: dict[str, Any]) -> Event:
    """Return the first event of a run: method, seeds and data."""
    digest = outside_digest(settings.method)
    return {
        "event": "run",
        "format": LOG_FORMAT,
        "replicas": settings.training.replicas,
        "seeds": list(settings.training.seeds),
        "method": settings.method,
        **({"method_digest": digest} if digest else {}),
        "dataset": settings.data.dataset,
        "shape": list(spec.shape),
        "pixel_range": list(spec.pixel_range),
        "tasks": list(tasks),
        "split": split,
    }


def _check_same(run: Run, stream: Stream) -> None:
    """Refuse to continue a run with other data, or if the file that defines its method has changed."""
    head, names = run.head(), [task.name for task in stream]
    if head["tasks"] != names:
        raise InputError(f"{run.folder} was started with tasks {', '.join(head['tasks'])}, not {', '.join(names)}")
    if _content(head["split"]) != _content(json.loads(json.dumps(stream.split_record))):
        raise InputError(
            f"{run.folder} was started with different data than {stream.name} has now: use the same data, or choose "
            "another {out}"
        )
    if head.get("method_digest", "") != outside_digest(run.settings.method):
        raise InputError(
            f"{run.folder} was started with another version of the file that defines {run.settings.method}: "
            "restore that version, or choose another {out}"
        )


def _content(record: Event) -> Event:
    """Return the record of a split without the words for the data, which may be typed differently."""
    return {key: value for key, value in record.items() if key not in ("dataset", "note")}


@contextmanager
def signals(run: Run) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into a checkpoint and a clean end; a second Ctrl-C ends at once."""

    def stop(number: int, frame: object) -> None:
        run.stop_requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    ours = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop) for number in ours}
    try:
        yield
    except Interrupted:
        raise RunError(f"stopped; everything is in {run.folder}: the same command continues it") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
