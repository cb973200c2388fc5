"""Read run folders as typed records, for reports, warnings and tables."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from boovae.config.resolve import flattened
from boovae.metrics.evaluation import Evaluation
from boovae.metrics.forgetting import judged
from boovae.report import run_record as records
from boovae.report.run_record import RunRecord, TaskStart
from boovae.runs.folder import LOG_FORMAT, Log, RunFolder


def read_record(path: Path) -> RunRecord:
    """Read a run folder; if that is impossible, InputError names the file and a remedy."""
    folder, notes = RunFolder(Path(path)), list[str]()
    folder.require()
    config = flatten(flattened(folder.read_config()))
    found = record_of_log(folder.path, Log(folder.log, folder.read_log(notes)), config)
    if found.head.format > LOG_FORMAT:
        newer = f"The run was written in format {found.head.format}; this version of boovae reads format {LOG_FORMAT}"
        notes.append(f"{newer} and may miss things.")
    return dataclasses.replace(
        found,
        environment=flatten(folder.read_environment()),
        timings=folder.read_timings(notes),
        samples=folder.read_samples(notes),
        components=folder.read_components(notes),
        latents=folder.read_latents(notes),
        notes=notes,
    )


def record_of_log(folder: Path, log: Log, config: dict[str, str]) -> RunRecord:
    """Build the record from the log alone."""
    head: records.Head = log.require().typed[0]
    # If an epoch or an evaluation was written twice, the last one counts.
    epochs = {(epoch.task, epoch.epoch): epoch for epoch in log.all_of(records.Epoch)}
    evaluations = {evaluation.task: evaluation for evaluation in log.all_of(Evaluation)}
    components = log.all_of(records.ComponentsLearned)
    last = max((at for at, event in enumerate(log.typed) if isinstance(event, Evaluation)), default=len(log.typed))
    late = {id(event) for event in log.typed[last:]}
    named = {event.task: event.name for event in log.typed if isinstance(event, (records.Extension, TaskStart))}
    return RunRecord(
        path=str(folder.resolve()),
        head=head,
        planned=len(head.tasks) + len({event.task for event in log.all_of(records.Extension)}),
        task_names={**dict(enumerate(head.tasks)), **named},
        class_names=_class_names(head, log.all_of(TaskStart)),
        epochs=[epochs[key] for key in sorted(epochs)],
        divergences=log.all_of(records.Divergence),
        evaluations=_judged([evaluations[task] for task in sorted(evaluations)]),
        gains=_gains(components),
        kept={event.task: event for event in components if event.kept is not None},
        prunings=[replace(event, late=id(event) in late) for event in log.all_of(records.Pruning)],
        remarks=log.all_of(records.Note),
        choices=log.all_of(records.Choices),
        config=config,
    )


def _judged(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Hide forgetting that rests on few effective samples in logs that were written before this was recorded."""
    nll, found = {each.learned: each.nll for each in evaluations}, []
    for each in evaluations:
        if each.forgetting is not None:
            change = judged(each.forgetting, [nll.get(seen) for seen in range(1, each.learned + 1)])
            each = replace(each, forgetting=change)
        found.append(each)
    return found


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Turn nested settings into `section.key -> text`.

    >>> flatten({"a": {"b": 1}, "c": [1, 2]})
    {'a.b': '1', 'c': '[1, 2]'}
    """
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
            flat[f"{prefix}{key}"] = text
    return flat


def _class_names(head: records.Head, begun: list[TaskStart]) -> dict[int, str]:
    """Name classes after tasks if every task is one class; otherwise return no names.

    Tasks that were cut at borders have no class of their own.
    """
    classes = [(event.classes, event.name) for event in begun if event.classes is not None]
    if head.split.borders is not None or any(len(own) != 1 for own, _ in classes):
        return {}
    return {own[0]: name for own, name in reversed(classes)}  # a class that comes back keeps its first name


def _gains(components: list[records.ComponentsLearned]) -> dict[int, records.Gain]:
    """Return the divergence by number of components, for each task; if a size was measured twice, the last counts."""
    latest: dict[int, dict[float, Any]] = {}
    for event in components:
        if event.sizes is not None:
            rows = zip(event.sizes.tolist(), event.divergence, strict=True)
            latest.setdefault(event.task, {}).update({size: row for size, row in rows if size == size})
    return {
        task: records.Gain(np.array(sorted(found)), np.array([found[size] for size in sorted(found)]))
        for task, found in sorted(latest.items())
    }
