"""What the tables say in short: against the paper, cell by cell, and method against method, seed by seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from boovae.bench.published import FACES_NAMES, METHOD_NAMES, is_distance, numbers
from boovae.bench.results import Measured
from boovae.bench.statistics import paired
from boovae.bench.tables import Entry, rows_of, table, title_of

#: A diversity cell also counts as reached where it is as near to the joint model's, measured by the same classifier.
NEAR_JOINT = 0.01
#: Methods that are compared with all others, seed by seed.
COMPARED = ("boo", "boo+distill")
#: The methods of the paper that have a network per task.
SEVERAL_NETWORKS = ("multihead", "multihead+ewc")
#: How far above the joint model's a distance of our default may lie.
NEAR_JOINT_DISTANCE = 1.1
DIFFERENCES = ("dataset", "metric", "tasks_seen", "method", "other", "difference", "low", "high", "seeds")


def findings(measured: Sequence[Measured], metrics: Sequence[str]) -> dict[str, str]:
    """Return in how many cells we are at or below the paper, method by method, and our default against all of it."""
    found: dict[str, str] = {}
    for metric in metrics:
        for method in METHOD_NAMES:
            reached = [good for each in measured for good in _reached(each, metric, method)]
            if reached:
                found[f"{method}: {title_of(metric)} at or better than the paper's"] = _share(reached)
    for name, wins in {**_default_wins(measured), **_order(measured, metrics)}.items():
        if wins:
            found[name] = _share(wins)
    return found


def _share(good: Sequence[bool]) -> str:
    return f"{sum(good)} of {len(good)} cells"


def _reached(measured: Measured, metric: str, method: str) -> Iterator[bool]:
    for seen, row in table(measured, metric).rows:
        entry = dict(zip(measured.labels, row, strict=True)).get(method)
        if entry is not None and entry.better:
            yield entry.better != "paper" or (metric == "diversity" and _near_joint(measured, entry, seen))


def _near_joint(measured: Measured, entry: Entry, seen: int) -> bool:
    joint = measured.spread("joint", seen, "diversity")
    return entry.ours is not None and joint is not None and entry.ours.mean <= joint.mean + NEAR_JOINT


def _default_wins(measured: Sequence[Measured]) -> dict[str, list[bool]]:
    """Compare `boo+distill` with every NLL the paper prints: one network for all tasks, or one per task at the end."""
    one: list[bool] = []
    several: list[bool] = []
    for each in measured:
        for (dataset, method, seen), printed in numbers("nll").items():
            same = dataset == each.dataset and each.by_class("boo+distill")
            ours = each.spread("boo+distill", seen, "nll") if same else None
            if ours is None:
                continue
            if method not in SEVERAL_NETWORKS:
                one.append(ours.mean < printed.mean)
            elif seen == 10:
                several.append(ours.mean < printed.mean)
    return {
        "boo+distill: NLL better than each of the paper's with one network": one,
        "boo+distill: NLL better than each of the paper's with a network per task, after ten tasks": several,
    }


def _order(measured: Sequence[Measured], metrics: Sequence[str]) -> dict[str, list[bool]]:
    """Say after how many tasks distances stand in the paper's order: `boo` first, the joint model not far from ours."""
    found: dict[str, list[bool]] = {}
    for each in measured:
        for metric in filter(is_distance, metrics):
            first = found.setdefault(f"boo: {title_of(metric)} below every other method of the paper's table", [])
            near = found.setdefault(f"boo+distill: {title_of(metric)} within 10 % of joint", [])
            for seen in rows_of(each, metric):
                means = {label: spread.mean for label in each.labels if (spread := each.spread(label, seen, metric))}
                others = [means[label] for label in FACES_NAMES if label != "boo" and label in means]
                if "boo" in means and others:
                    first.append(means["boo"] < min(others))
                if "boo+distill" in means and "joint" in means:
                    near.append(means["boo+distill"] <= NEAR_JOINT_DISTANCE * means["joint"])
    return found


def differences(measured: Sequence[Measured], metrics: Sequence[str]) -> Iterator[tuple[object, ...]]:
    """Yield method minus other after the last task, by seed, with its bootstrap interval; below 0: it is better."""
    for each in measured:
        for metric in metrics:
            for method in COMPARED:
                for other in each.labels:
                    ours, theirs = (each.seeds(label, each.tasks, metric) for label in (method, other))
                    found = paired(ours, theirs) if other != method else None
                    if found is not None:
                        interval = [f"{value:.4g}" for value in (found.mean, found.low, found.high)]
                        yield each.dataset, metric, each.tasks, method, other, *interval, found.seeds


def differences_markdown(records: Sequence[tuple[object, ...]]) -> str:
    """Return the differences as a table; those whose interval does not hold 0 are bold."""
    lines = [
        "# Method against method, seed by seed",
        "",
        "Mean of method minus other over seeds after the last task, and its 95 % bootstrap interval; negative: the",
        "method is better. Bold: the interval does not hold 0.",
        "",
        "| dataset | metric | method | other | difference | interval |",
        "|---|---|---|---|---|---|",
    ]
    for dataset, metric, _, method, other, difference, low, high, _ in records:
        clear = float(str(low)) > 0 or float(str(high)) < 0
        shown = f"**{difference}**" if clear else difference
        lines.append(f"| {dataset} | {metric} | {method} | {other} | {shown} | {low} to {high} |")
    return "\n".join(lines) + "\n"
