"""A run's numbers as one CSV: every seed, task and metric, with the command, the commit and the device on top."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from boovae.errors import InputError
from boovae.report.log import checked, read_bytes, read_events
from boovae.report.outputs import write_rows

COLUMNS = ("tasks_seen", "metric", "task", "seed", "value")


def write_csv(run: Path, out: Path) -> Path:
    """Write all evaluations of a run folder to `out`; lines that start with # say how they were made."""
    try:
        environment = dict(json.loads(read_bytes(run / "environment.json")))
        events = list(checked(read_events(run / "metrics.jsonl", []), run / "metrics.jsonl"))
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{run} is no readable run folder: {error}") from error
    if not events:
        raise InputError(f"{run / 'metrics.jsonl'} is empty: the run has not begun; `boovae train` begins it")
    seeds = events[0].data["seeds"]
    evaluations = [event.data for event in events if event.value("event") == "evaluation"]
    head = {**environment, "seeds": " ".join(map(str, seeds)), "seconds": _seconds(run)}
    return write_rows(out, COLUMNS, (row for event in evaluations for row in rows(event, seeds)), head)


def rows(event: dict[str, Any], seeds: list[int]) -> Iterator[tuple[Any, ...]]:
    """Yield the numbers of one evaluation; a number about all tasks has no task."""
    whole = {
        "nll": event.get("nll", {}).get("pooled"),
        "diversity": event.get("diversity", {}).get("table"),
        "diversity_uniform": event.get("diversity", {}).get("uniform"),
        "diversity_bernoulli": event.get("diversity", {}).get("bernoulli"),
        **_distances(event.get("frechet", {})),
    }
    for metric, values in whole.items():
        for seed, value in zip(seeds, values or (), strict=False):
            yield event["seen"], metric, "", seed, value
    per_task = {
        "nll": event.get("nll", {}).get("per_task", []),
        "nll_own": event.get("nll", {}).get("own", []),
        "effective_samples": event.get("nll", {}).get("effective_samples", []),
        "forgetting": event.get("forgetting", {}).get("own", []),
    }
    for metric, tasks in per_task.items():
        for task, values in enumerate(tasks):
            for seed, value in zip(seeds, values, strict=True):
                yield event["seen"], metric, task, seed, value
    yield event["seen"], "memory_bytes", "", "", event["ledger"]["memory_bytes"]


def _distances(found: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers on features by name: frechet_classifier, kid_efficientnet-lite0, …, fid for Inception."""
    sets = found.get("sets") or {found.get("features"): {"frechet": found.get("pooled")}}
    keys = ("frechet", "frechet_train", "kid", "precision", "recall")
    names = {(key, features): f"{key}_{features}" for features in sets for key in keys}
    names |= {("frechet", "inception"): "fid", ("frechet_train", "inception"): "fid_train"}
    return {names[key, features]: numbers.get(key) for features, numbers in sets.items() for key in keys}


def _seconds(run: Path) -> str:
    """Return what training and evaluation took, all replicas together."""
    path = run / "timing.jsonl"
    # An evaluation that was cut off is timed again.
    latest = {time.task(): time for time in read_events(path, [])} if path.is_file() else {}
    sums = {key: sum(time.number(f"{key}_seconds") for time in latest.values()) for key in ("train", "evaluate")}
    return ", ".join(f"{key} {value:.1f}" for key, value in sums.items())
