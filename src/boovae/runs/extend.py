"""Learn one more task with a finished run, from its checkpoint alone: the old data are not needed.

Extending a run of T tasks gives the same model, bit for bit, as training T + 1 tasks in one go: a task depends only on
the memory of the run, its settings and its own images (docs/extend.md).
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from boovae.config import Settings
from boovae.data import DATASETS, Stream, Task
from boovae.errors import InputError
from boovae.files import write_file
from boovae.metrics.cost import ledger
from boovae.metrics.features import check_names
from boovae.metrics.measure import sample_networks
from boovae.metrics.metric import USUAL, check_metrics
from boovae.replicas.devices import choose_device
from boovae.runs.data import Moved, Past, absolute, learned_images, load_data
from boovae.runs.environment import environment
from boovae.runs.folder import RunFolder
from boovae.runs.progress import Display
from boovae.runs.run import Run
from boovae.runs.trackers import check_trackers, tracked
from boovae.runs.train import advance, make_trainer, signals
from boovae.training.events import Event
from boovae.training.trainer import Trainer


def extend(
    folder: Path,
    data: str | None = None,
    *,
    name: str | None = None,
    data_dir: Path | None = None,
    moved: Moved | None = None,
    device: str = "auto",
    compile: Literal["auto", "on", "off"] = "auto",
    metrics: Sequence[str] = USUAL,
    log: Sequence[str] = (),
    features: Sequence[str] = ("classifier",),
    display: Display | None = None,
    command: str = "",
) -> Path:
    """Learn the images of `data` as one more task of the run in `folder`; without `data`, its dataset's next task.

    A stopped extension continues where it stopped. `log` names trackers to send numbers to. Returns the folder.
    """
    check_trackers(log)
    check_names(features)
    check_metrics(metrics)
    chosen = choose_device(device)
    with Run.open(folder, display) as run, signals(run):
        plan = _plan(run, _source(data), name, data_dir, moved)
        trainer = make_trainer(run, chosen, compile=_compiled(run.files, chosen, compile))
        run.restore(trainer)
        run.display.note(carried(trainer))
        if not plan.begun:
            _begin(run, trainer, plan, command)
        plan.past.parts.append(([plan.event["name"]], plan.stream))
        networks = sample_networks(plan.past.stream, trainer, metrics, run.say, features, data_dir)
        with tracked(run, log):
            advance(run, trainer, plan.past.tasks, networks, metrics)
        return folder


def carried(trainer: Trainer) -> str:
    """Describe what one replica keeps from the past: the method's memory and the networks, in bytes."""
    cost = ledger(trainer)
    parts = ", ".join(f"{name} {size:,}" for name, size in cost.memory.items())
    networks = sum(tensor[0].nbytes for tensor in trainer.replicas.parameters.values())
    return (
        f"carried from {trainer.tasks_done} tasks, per replica: memory {cost.memory_bytes:,} bytes"
        f"{f' ({parts})' if parts else ''}, networks {networks:,} bytes, stored images {cost.images_stored:,}"
    )


# --- what may be extended -------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What to learn; making a plan changes nothing on disk."""

    past: Past
    stream: Stream  # the new task alone
    event: Event
    begun: bool  # whether an earlier process has started it


def _plan(run: Run, source: str | None, name: str | None, data_dir: Path | None, moved: Moved | None) -> _Plan:
    """Work out what to learn, or refuse it."""
    log = run.read_saved()
    head, extensions = log[0], [event for event in log if event["event"] == "extend"]
    if "estimator" in head:
        raise InputError(
            f"{run.folder} is a saved estimator; extend it in Python: "
            f"BooVAE.load({str(run.folder)!r}).partial_fit(images).save({str(run.folder)!r})"
        )
    begun = _begun(run, log, extensions)
    if begun is not None and ((source is None) != (begun["source"] is None) or name not in (None, begun["name"])):
        raise _unfinished(run.folder, begun)  # another path is fine: the same images may have moved
    past = learned_images(run.settings, head, extensions, data_dir, download=source is None, moved=moved)
    stream = _new_task(past, run.settings, source, data_dir)
    if begun is not None and begun["split"]["digest"] != stream.digest:
        raise _unfinished(run.folder, begun)
    _check_fits(stream, head, source)
    taken = [*head["tasks"], *(event["name"] for event in extensions)]
    event = begun or _event(len(taken), stream, source, name, taken)
    named = replace(stream, tasks=(replace(stream[0], name=event["name"]),))
    return _Plan(past, named, event, begun is not None)


def _made(files: RunFolder) -> dict[str, Any]:
    """Return the content of `environment.json`."""
    made = files.read_environment()
    if not isinstance(made.get("extensions", {}), dict):
        raise InputError(
            f"{files.environment} cannot be read (its extensions are not a table): copy the whole run folder"
        )
    return made


def _begun(run: Run, log: Sequence[Event], extensions: list[Event]) -> Event | None:
    """Remove the unfinished extension from the list and return it, or None; refuse an unfinished run."""
    planned, done = len(log[0]["tasks"]), sum(event["event"] == "evaluation" for event in log)
    if done < planned:
        command = _made(run.files).get("command", "boovae train")
        raise InputError(
            f"{run.folder} is not finished ({done} of {planned} tasks): continue it first, with `{command}`"
        )
    return extensions.pop() if done < planned + len(extensions) else None


def _unfinished(folder: Path, begun: Event) -> InputError:
    """Return the error that asks to finish an extension before a different one starts."""
    words = "" if begun["source"] is None else f" --data {begun['source']}"
    return InputError(
        f"{folder} is still learning '{begun['name']}', a different task: "
        f"finish that first with `boovae extend {folder}{words}` and the same images"
    )


# --- the new task ---------------------------------------------------------------------------------------------------


def _source(data: str | None) -> str | None:
    """Return the name of a dataset as `load_stream` knows it; a path alone is a folder or an NPZ file.

    Paths become absolute, so that they hold in other folders too.
    """
    if data is None or data in DATASETS or not Path(data).expanduser().exists():
        return None if data is None else absolute(data)
    return absolute(f"{'folder' if Path(data).expanduser().is_dir() else 'npz'}:{data}")


def _new_task(past: Past, settings: Settings, source: str | None, data_dir: Path | None) -> Stream:
    """Return the images of `source`, or the task of the run's own dataset that follows those already learned."""
    if source is not None:
        try:
            return load_data(settings, data_dir, source)
        except InputError as error:
            raise InputError(f"{{data}} {source}: {error.text}") from error
    if isinstance(past.own, str):
        raise InputError(f"the run's own dataset is not available ({past.own}): name the new images with {{data}}")
    count, dataset = len(past.own), settings.data.dataset
    if past.own_tasks >= count:
        raise InputError(f"all {count} tasks of {dataset} are learned: name the new images with {{data}}")
    return past.own[past.own_tasks : past.own_tasks + 1]


def _check_fits(stream: Stream, head: Event, source: str | None) -> None:
    """Refuse images whose size or pixel range differs from what the run has learned."""
    shape, pixels = tuple(head["shape"]), tuple(head.get("pixel_range", (0.0, 1.0)))
    if stream.shape != shape:
        remedy = "resize them" if len(stream.shape) == len(shape) else "give them its size and its colours"
        raise InputError(
            f"{{data}} {source}: images of {_size(stream.shape)}, but this run has learned images of {_size(shape)}; "
            f"{remedy}"
        )
    if stream.pixel_range != pixels:
        raise InputError(
            f"{{data}} {source}: pixels in {list(stream.pixel_range)}, but this run has learned pixels in "
            f"{list(pixels)}; rescale them"
        )


def _size(shape: Sequence[int]) -> str:
    """Format the size of an image: 28 x 28 in grey, 3 x 32 x 32 in colour."""
    return " x ".join(map(str, shape)) + (" (colours first)" if len(shape) == 3 else "")


def _event(task: int, stream: Stream, source: str | None, name: str | None, taken: Sequence[str]) -> Event:
    new: Task = stream[0]
    return {
        "event": "extend",
        "task": task,
        "name": _chosen_name(name, new.name if source is None else _default_name(source), taken),
        "source": source,
        "images": {split: len(getattr(new, split).images) for split in ("train", "valid", "test")},
        "split": stream.split_record,
    }


def _default_name(source: str) -> str:
    """Return the default name of a task: that of its dataset, or of its file or folder without the suffix."""
    form, _, path = source.partition(":")
    whole = Path(path).expanduser().resolve()
    return (whole.stem if form == "npz" else whole.name) if path else source


def _chosen_name(wanted: str | None, default: str, taken: Sequence[str]) -> str:
    """Return the name of a task: a requested one must be new, the default gets a number if it is taken."""
    if wanted is None:
        numbered = (default if number == 1 else f"{default} ({number})" for number in range(1, len(taken) + 2))
        return next(name for name in numbered if name not in taken)
    if wanted in taken:
        raise InputError(f"{{name}} {wanted}: the run already has a task of that name; choose another")
    if not wanted.strip() or not wanted.isprintable():
        raise InputError(f"{{name}} is {wanted!r}; use printable characters")
    return wanted


# --- beginning ------------------------------------------------------------------------------------------------------


def _compiled(files: RunFolder, device: torch.device, compile: str) -> bool:
    """Whether to compile; by default as in training, because compiling changes the last bits of every number."""
    if compile != "auto":
        return compile == "on"
    made = _made(files)
    return made.get("compiled") is True and str(made.get("device")).startswith("cpu") == (device.type == "cpu")


def _begin(run: Run, trainer: Trainer, plan: _Plan, command: str) -> None:
    """Record the extension and its environment; from here on only the same extension can continue."""
    made, task = _made(run.files), plan.event["task"]
    here = environment(trainer.device, trainer.compile, command)
    made["extensions"] = {**made.get("extensions", {}), str(task): here}
    write_file(run.files.environment, json.dumps(made, indent=1).encode())
    run.event(plan.event)
    if plan.past.missing:
        run.event({"event": "note", "task": task, "text": plan.past.explain()})
    run.checkpoint(trainer)
