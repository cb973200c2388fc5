"""One self-contained page about one run, or about several side by side."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from boovae.errors import InputError
from boovae.files import write_file
from boovae.report.charts import COLOURS, Series, distance_over_tasks, line_chart, over_epochs, over_tasks
from boovae.report.findings import distance_name, headlines, warnings
from boovae.report.gallery import chart_lines, rows
from boovae.report.numbers import number
from boovae.report.read import Run, read_run
from boovae.report.tables import ledger, matrices

if TYPE_CHECKING:
    from markupsafe import Markup


#: Networks whose distances are drawn; the names of others are not ours, they appear as text only.
KNOWN_FEATURES = ("inception", "efficientnet-lite0", "classifier")


@dataclass(frozen=True)
class Picture:
    """One frame of the film strip."""

    source: str
    caption: str
    alt: str


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page about these run folders and return its path.

    One run is written to `RUN/report.html` unless `out` says otherwise; several need `out`. The page makes no
    request to anywhere and needs no JavaScript; the same folders give the same bytes.
    """
    folders = [Path(run) for run in runs]
    if not folders:
        raise InputError("no run given: name at least one run folder, as written by 'boovae train'")
    if out is None and len(folders) > 1:
        raise InputError("several runs need a file to write to: give out, for example out=comparison.html")
    target = folders[0] / "report.html" if out is None else Path(out)
    if target.is_dir():
        raise InputError(f"{target} is a folder: give the name of a file, for example {target / 'report.html'}")
    page = render([read_run(folder) for folder in folders])
    # A name may hold half a character (JSON allows it), which UTF-8 cannot write.
    write_file(target, page.encode("utf-8", errors="replace"))
    return target


def render(runs: Sequence[Run]) -> str:
    """Return the page as text."""
    import jinja2
    from markupsafe import Markup

    # The folder may come from a stranger, so every text is escaped; a misspelt variable is an error.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    files = resources.files("boovae.report")
    template = environment.from_string(files.joinpath("template.html").read_text(encoding="utf-8"))
    style = Markup(files.joinpath("style.css").read_text(encoding="utf-8"))
    return template.render(style=style, **_context(runs))


def _context(runs: Sequence[Run]) -> dict[str, Any]:
    """Return everything the template shows."""
    labels = _labels(runs)
    several = len(runs) > 1
    return {
        "title": "Comparison of runs" if several else labels[0],
        "several": several,
        "runs": [
            {
                "label": label,
                "colour": index % COLOURS,
                "dashed": index >= COLOURS,
                "about": _about(run),
                "state": _state(run),
                "warnings": warnings(run),
                "notes": run.notes,
                "headlines": headlines(run),
                "film": _film(run),
                "components": rows(run),
                "gains": _gains(run, label),
                "ledger": ledger(run, label),
            }
            for index, (run, label) in enumerate(zip(runs, labels, strict=True))
        ],
        "headline_table": _headline_table(runs),
        "remarks": _remarks(runs),
        "curves": _curves(runs),
        "matrices": matrices(runs, labels),
        "training": _training(runs),
        "settings": _side_by_side([run.config for run in runs]),
        "surroundings": _side_by_side([run.environment for run in runs]),
    }


def _labels(runs: Sequence[Run]) -> list[str]:
    """Name each run by its folder; where names repeat, by the folder above too, else by number."""
    for names in (
        [run.name for run in runs],
        [f"{run.path.resolve().parent.name}/{run.name}" for run in runs],
    ):
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({index})" for index, run in enumerate(runs, start=1)]


def _about(run: Run) -> str:
    replicas = f"{len(run.seeds)} replicas" if len(run.seeds) != 1 else "1 replica"
    tasks = f"{run.planned} tasks" if run.planned != 1 else "1 task"
    return f"{run.method} on {run.dataset}, {tasks}, {replicas}"


def _state(run: Run) -> str:
    """Say in a sentence how far an unfinished run is; empty for a finished one."""
    if run.finished:
        return ""
    if not run.evaluations:
        return f"This run is unfinished: none of its {run.planned} tasks has been evaluated yet."
    seen = run.evaluations[-1].task + 1
    return f"This run is unfinished: the numbers are those after {seen} of its {run.planned} tasks."


def _remarks(runs: Sequence[Run]) -> list[str]:
    """Say what makes a comparison unfair."""
    remarks = []
    if len({run.dataset for run in runs}) > 1:
        remarks.append("The runs use different datasets: their NLLs cannot be compared.")
    if len({run.evaluations[-1].task if run.evaluations else -1 for run in runs}) > 1:
        remarks.append(
            "The runs have seen different numbers of tasks: compare the curves at the same place, "
            "not the final numbers."
        )
    return remarks


def _headline_table(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return label and (value, detail) per run, for runs side by side."""
    columns = [{line.label: (line.value, line.detail) for line in headlines(run)} for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, ("–", "")) for column in columns]) for name in names]


def _film(run: Run) -> list[Picture]:
    frames = []
    for task, content in run.samples.items():
        source = "data:image/png;base64," + base64.b64encode(content).decode("ascii")
        name = run.task_name(task)
        frames.append(Picture(source, f"{task + 1} · {name}", f"Grid of samples after task {task + 1}, {name}"))
    return frames


def _curves(runs: Sequence[Run]) -> list[Markup]:
    """Draw NLL, diversity and distances over the tasks seen."""
    charts = []
    for key, label in (("nll", "NLL of all tasks seen, nats"), ("diversity", "diversity (0 is best)")):
        series = [over_tasks(run, key, index) for index, run in enumerate(runs) if run.evaluations]
        charts.append(_chart(series, label, "tasks seen"))
    for features in KNOWN_FEATURES:
        series = [distance_over_tasks(run, features, index) for index, run in enumerate(runs)]
        charts.append(_chart(series, distance_name(features), "tasks seen"))
    return [chart for chart in charts if chart]


def _gains(run: Run, label: str) -> dict[str, Any]:
    """Draw what each further component of a task gained."""
    series, legend = chart_lines(run)
    name = "gained over the smallest mixture, nats"
    return {"chart": _chart(series, name, "components", salt=label), "legend": legend}


def _training(runs: Sequence[Run]) -> list[Markup]:
    """Draw validation loss and KL over the epochs; for a single run the training loss too."""
    loss = [over_epochs(run, "valid_loss", index) for index, run in enumerate(runs)]
    label = "validation loss"
    if len(runs) == 1:
        loss.append(over_epochs(runs[0], "train_loss", 1, dashed=True))
        label = "loss: validation (line), training (dashed)"
    divergence = [over_epochs(run, "valid_kl", index) for index, run in enumerate(runs)]
    charts = [
        _chart(loss, label, "tasks done", clip=True),
        _chart(divergence, "validation KL", "tasks done"),
    ]
    return [chart for chart in charts if chart]


def _chart(series: Sequence[Series], label: str, x_label: str, clip: bool = False, salt: str = "") -> Markup:
    """Draw the series that have any number; an empty text where none has."""
    from markupsafe import Markup

    full = [line for line in series if np.isfinite(line.y).any()]
    if not full:
        return Markup("")
    ends = ", ".join(f"from {number(first)} to {number(last)}" for first, last in map(_ends, full))
    describe = f"{label} over {x_label}: {ends}"
    return Markup(line_chart(full, describe, x_label, label, clip, salt))  # text in it is ours alone


def _ends(line: Series) -> tuple[float, float]:
    finite = line.y[np.isfinite(line.y)]
    return float(finite[0]), float(finite[-1])


def _side_by_side(columns: Sequence[dict[str, str]]) -> list[tuple[str, list[str], bool]]:
    """Return (key, values, whether they differ); differing settings first."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, [column.get(key, "–") for column in columns]) for key in keys]
    marked = [(key, values, len(set(values)) > 1) for key, values in rows]
    return sorted(marked, key=lambda row: not row[2])
