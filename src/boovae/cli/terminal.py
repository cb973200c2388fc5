"""Tables on the terminal."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boovae.runs.inspection import Component


def print_table(evaluations: Sequence[dict[str, Any]]) -> None:
    """Print one row per task seen."""
    features = list(dict.fromkeys(name for event in evaluations for name in event.get("frechet", {}).get("sets", {})))
    distances = ["FID" if name == "inception" else f"Fréchet ({name})" for name in features]
    rows = [
        (
            str(event["seen"]),
            _nll(event),
            spread(event.get("diversity", {}).get("table"), digits=3),
            *(spread(_distance(event, name), digits=1) for name in features),
            spread(_mean_forgetting(event)),
            f"{event['ledger']['memory_bytes']:,}",
        )
        for event in evaluations
    ]
    print_rows(("tasks seen", "NLL", "diversity", *distances, "forgotten", "bytes kept"), rows)
    accuracy = evaluations[-1].get("classifier", {}).get("accuracy")
    if accuracy is not None:
        print(f"Mean ± deviation over replicas. The classifier behind diversity is {accuracy:.1%} accurate.")


def print_components(found: Sequence[Component], names: Mapping[int, str]) -> None:
    """Print one row per component."""
    rows = [
        (
            names.get(component.task, str(component.task)),
            str(component.place),
            f"{component.weight:.1%}",
            f"{component.mass:.1%}",
            *(("the only one", "-") if component.only else (_nats(component.cost), f"{component.share:.1%}")),
        )
        for component in found
    ]
    print_rows(("task", "component", "weight in task", "in the prior", "nats to drop it", "share of them"), rows)


def _nll(event: dict[str, Any]) -> str:
    """Return the NLL of all tasks together; where the images of some are gone, of the tasks that can be measured."""
    numbers = event.get("nll", {})
    at_hand = [row for row in numbers.get("per_task", []) if any(value is not None for value in row)]
    if any(value is not None for value in numbers.get("pooled", [])) or not at_hand:
        return spread(numbers.get("pooled"))
    return f"{spread(_by_replica(at_hand))} (of {'one task' if len(at_hand) == 1 else f'{len(at_hand)} tasks'})"


def _nats(cost: float) -> str:
    return "< 0.0001" if cost < 1e-4 else f"{cost:.4f}"


def _distance(event: dict[str, Any], features: str) -> list[float | None] | None:
    numbers = event.get("frechet", {}).get("sets", {}).get(features, {})
    found: list[float | None] | None = numbers.get("frechet")
    return found


def _mean_forgetting(event: dict[str, Any]) -> list[float | None]:
    """Return each replica's mean change of the old tasks' NLL."""
    return _by_replica(event.get("forgetting", {}).get("own", [])[:-1])


def _by_replica(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return each replica's mean over tasks, of rows (tasks, R)."""
    return [statistics.fmean(column) if None not in column else None for column in zip(*rows, strict=True)]


def spread(values: Sequence[float | None] | None, digits: int = 2) -> str:
    """Return mean ± deviation over replicas; "-" where there is no number."""
    good = [value for value in values or () if value is not None]
    if not good:
        return "-"
    deviation = f" ± {statistics.stdev(good):.{digits}f}" if len(good) > 1 else ""
    return f"{statistics.fmean(good):.{digits}f}{deviation}"


def grouped(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], values: Sequence[str], digits: int
) -> list[tuple[str, ...]]:
    """Return the rows of all seeds that agree in `keys` as one, with mean and deviation of `values`."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[key]) for key in keys), []).append(row)
    return [
        (*names, *(spread([row[value] for row in group], digits) for value in values))
        for names, group in groups.items()
    ]


def print_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a plain table, as wide as the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    # Names of tasks are the user's: "[old]" and ":cat:" are not markup.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    console.print(table, highlight=False)
