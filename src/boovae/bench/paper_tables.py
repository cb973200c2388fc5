"""The paper's tables with our number and the paper's in each cell, comparisons of methods, and findings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Literal, NamedTuple

from boovae.bench import published
from boovae.bench.published import Printed, dataset_title, is_distance, numbers
from boovae.bench.results import Measured, Spread, paired

TITLES = {"nll": "NLL", "diversity": "Diversity", "fid": "FID"}
Better = Literal["ours", "paper", "same", ""]
#: Shown above tables and charts whose numbers cannot be compared with the paper's.
NOT_COMPARABLE = (
    "The paper's numbers are FIDs, on Inception features and all images: they cannot be compared with ours, only the "
    "order of the methods can."
)
#: Columns of a table as CSV.
HEAD = ("dataset", "method", "tasks_seen", "mean", "std", "seeds", "paper_mean", "paper_std", "better")
#: A diversity cell also counts as reached if it is this close to the joint model's, measured by the same classifier.
NEAR_JOINT = 0.01
#: Methods that are compared with every other, seed by seed.
COMPARED = ("boo", "boo+distill")
#: Methods of the paper that have a network per task.
SEVERAL_NETWORKS = ("multihead", "multihead+ewc")
#: How many times the joint model's distance our default's may be.
NEAR_JOINT_DISTANCE = 1.1


@dataclass(frozen=True)
class Grid:
    """Texts, or pictures as PNG in base64, in rows that begin with a label; the column `strong` is emphasised."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: str = ""


def as_markdown(head: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a table as Markdown."""
    body = "".join("| " + " | ".join(map(str, row)) + " |\n" for row in rows)
    return f"| {head} |\n|" + "---|" * (head.count("|") + 1) + f"\n{body}"


def title_of(metric: str) -> str:
    """Return the display name of a metric; that of a distance includes the name of its features.

    >>> title_of("nll"), title_of("frechet_classifier")
    ('NLL', 'Fréchet distance (classifier)')
    """
    return TITLES.get(metric) or f"Fréchet distance ({metric.removeprefix('frechet_')})"


def rows_of(measured: Measured, metric: str) -> range:
    """Return the numbers of tasks that a table has rows for, as in the paper.

    The tables of grey images start at two tasks, that of faces at one. The diversity of a single class means nothing.
    """
    alone = is_distance(metric) or (measured.dataset in published.FACES and metric == "nll")
    return range(1 if alone else min(2, measured.tasks), measured.tasks + 1)


@dataclass(frozen=True)
class Entry:
    """A cell of a table: our number, the paper's, and which is better (lower)."""

    ours: Spread | None
    paper: Printed | None
    decimals: int
    comparable: bool = True  # not so a distance and the paper's FID

    @property
    def better(self) -> Better:
        """Whose mean is lower at the paper's precision; empty if the two cannot be compared."""
        if self.ours is None or self.paper is None or not self.comparable:
            return ""
        difference = round(self.ours.mean, self.decimals) - self.paper.mean
        if abs(difference) < 0.5 * 10**-self.decimals:
            return "same"
        return "ours" if difference < 0 else "paper"

    @property
    def texts(self) -> tuple[str, str]:
        """Our number and the paper's in the paper's format, mean (standard deviation); empty if missing."""
        return self.ours.text(self.decimals) if self.ours else "", self.paper.text if self.paper else ""

    @property
    def markdown(self) -> str:
        """Both numbers, with the better one in bold."""
        pairs = zip(("ours", "paper"), self.texts, strict=True)
        ours, paper = (f"**{text}**" if self.better in (whose, "same") else text for whose, text in pairs)
        return " / ".join(filter(None, (ours or "–", paper))) if ours or paper else ""


@dataclass(frozen=True)
class Table:
    """A metric of a dataset: rows are numbers of tasks seen, columns are methods."""

    dataset: str
    metric: str
    methods: Sequence[str]
    rows: Sequence[tuple[int, Sequence[Entry]]]

    @property
    def title(self) -> str:
        """Metric and dataset."""
        return f"{title_of(self.metric)} on {dataset_title(self.dataset)}"

    @property
    def compared(self) -> bool:
        """Whether the paper has numbers for it."""
        return any(entry.paper for _, entries in self.rows for entry in entries)

    @property
    def note(self) -> str:
        """A warning about comparing the two numbers of an entry; empty if none is needed."""
        return NOT_COMPARABLE if self.compared and is_distance(self.metric) else ""

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rows = ([seen, *(entry.markdown for entry in row)] for seen, row in self.rows)
        note = f"{self.note}\n\n" if self.note else ""
        return f"## {self.title}\n\n{note}" + as_markdown(" | ".join(["tasks", *self.methods]), rows)

    def records(self) -> Iterator[tuple[object, ...]]:
        """Yield one record per cell, for a CSV."""
        for seen, row in self.rows:
            for method, entry in zip(self.methods, row, strict=True):
                ours = entry.ours.record if entry.ours else ("", "", "")
                paper = (entry.paper.mean, entry.paper.std) if entry.paper else ("", "")
                if entry.ours or entry.paper:
                    yield self.dataset, method, seen, *ours, *paper, entry.better


def beside(measured: Measured, metric: str) -> dict[tuple[str, int], Printed]:
    """Return the paper's numbers by method and tasks seen, for methods that learned the same tasks here."""
    return {
        (method, seen): number
        for (dataset, method, seen), number in numbers(metric).items()
        if dataset == measured.dataset and measured.by_class(method)
    }


def table(measured: Measured, metric: str) -> Table:
    """Return a metric's table."""
    printed, labels = beside(measured, metric), measured.labels
    how = published.DECIMALS.get(metric, 1), not is_distance(metric)
    rows = [
        (seen, [Entry(measured.spread(one, seen, metric), printed.get((one, seen)), *how) for one in labels])
        for seen in rows_of(measured, metric)
    ]
    return Table(measured.dataset, metric, labels, rows)


# --- findings -------------------------------------------------------------------------------------------------------


def findings(measured: Sequence[Measured], metrics: Sequence[str]) -> dict[str, str]:
    """Count the cells where each method is at or below the paper, and those where our default beats the whole paper."""
    reached = (_reached(each, *one) for one in product(metrics, published.PAPER_METHODS) for each in measured)
    ordered = (_ordered(each, metric) for each in measured for metric in filter(is_distance, metrics))
    wins: dict[str, list[bool]] = {}
    for name, good in chain(*reached, *map(_beaten, measured), *ordered):
        wins.setdefault(name, []).append(good)
    return {name: f"{sum(good)} of {len(good)} cells" for name, good in wins.items()}


def _reached(measured: Measured, metric: str, method: str) -> Iterator[tuple[str, bool]]:
    """Yield whether each cell of a method is at or below the paper; a diversity near the joint model's also counts."""
    for seen, row in table(measured, metric).rows:
        for entry in (entry for label, entry in zip(measured.labels, row, strict=True) if label == method):
            if entry.ours and entry.better:
                joint = measured.spread("joint", seen, metric) if metric == "diversity" else None
                good = entry.better != "paper" or (joint is not None and entry.ours.mean <= joint.mean + NEAR_JOINT)
                yield f"{method}: {title_of(metric)} at or better than the paper's", good


def _beaten(measured: Measured) -> Iterator[tuple[str, bool]]:
    """Compare `boo+distill` with every NLL in the paper; with networks per task, only after the last task."""
    for (dataset, method, seen), printed in numbers("nll").items():
        same = dataset == measured.dataset and measured.by_class("boo+distill")
        ours = measured.spread("boo+distill", seen, "nll") if same else None
        if ours is None:
            continue
        whose = "boo+distill: NLL better than each of the paper's with"
        if method not in SEVERAL_NETWORKS:
            yield f"{whose} one network", ours.mean < printed.mean
        elif seen == 10:
            yield f"{whose} a network per task, after ten tasks", ours.mean < printed.mean


def _ordered(measured: Measured, metric: str) -> Iterator[tuple[str, bool]]:
    """Yield whether distances have the paper's order, `boo` first, and whether our default is near the joint model."""
    for seen in rows_of(measured, metric):
        spreads = {label: measured.spread(label, seen, metric) for label in measured.labels}
        means = {label: spread.mean for label, spread in spreads.items() if spread}
        others = [means[label] for label in published.FACES_PAPER_METHODS if label != "boo" and label in means]
        if "boo" in means and others:
            yield f"boo: {title_of(metric)} below every other method of the paper's table", means["boo"] < min(others)
        if "boo+distill" in means and "joint" in means:
            near = means["boo+distill"] <= NEAR_JOINT_DISTANCE * means["joint"]
            yield f"boo+distill: {title_of(metric)} within 10 % of joint", near


# --- method against method ------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Method minus other after the last task, by seed, with its bootstrap interval; negative: the method is better."""

    dataset: str
    metric: str
    tasks_seen: int
    method: str
    other: str
    difference: str
    low: str
    high: str
    seeds: int

    @property
    def interval(self) -> str:
        """Both ends of the interval."""
        return f"{self.low} to {self.high}"

    @property
    def markdown(self) -> tuple[str, ...]:
        """The row of a table; the difference is bold if the interval excludes 0."""
        clear = float(self.low) > 0 or float(self.high) < 0
        shown = f"**{self.difference}**" if clear else self.difference
        return self.dataset, self.metric, self.method, self.other, shown, self.interval


def differences(measured: Sequence[Measured], metrics: Sequence[str]) -> Iterator[Comparison]:
    """Yield the comparisons of each method in `COMPARED` with every other."""
    for each, metric, method in product(measured, metrics, COMPARED):
        for other in each.labels:
            ours, theirs = (each.seeds(label, each.tasks, metric) for label in (method, other))
            found = paired(ours, theirs) if other != method else None
            if found is not None:
                mean, low, high = (f"{value:.4g}" for value in found[:3])
                yield Comparison(each.dataset, metric, each.tasks, method, other, mean, low, high, found.seeds)


def differences_markdown(found: Sequence[Comparison]) -> str:
    """Return the differences as a page of Markdown."""
    return (
        "# Method against method, seed by seed\n\n"
        "Mean of method minus other over seeds after the last task, and its 95 % bootstrap interval; negative: the\n"
        "method is better. Bold: the interval does not hold 0.\n\n"
        + as_markdown("dataset | metric | method | other | difference | interval", (one.markdown for one in found))
    )
