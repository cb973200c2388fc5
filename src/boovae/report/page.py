"""One self-contained page about one run, or about several side by side."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from boovae.errors import InputError
from boovae.files import write_file
from boovae.report.charts import curves, digest, gains, kind_of, plotly_script, training
from boovae.report.components import rows
from boovae.report.findings import Headline, Published, headlines
from boovae.report.frame import environment, own_file
from boovae.report.latents import latent_map, task_legend
from boovae.report.matrices import ledger, matrices
from boovae.report.numbers import MISSING, change, mean, plus_minus
from boovae.report.run_record import RunRecord
from boovae.report.series import COLOURS


def write_report(
    runs: Sequence[RunRecord], out: Path, *, warnings: Sequence[Sequence[str]] = (), published: Published | None = None
) -> Path:
    """Write the page about these runs and return its path.

    `warnings` holds for each run what to know before reading its numbers, `published` the numbers to show beside them.
    The page makes no requests; without JavaScript its tables replace the charts. The same runs and the same version of
    plotly give the same bytes.
    """
    if not runs:
        raise InputError("no run given: name at least one run folder, as written by 'boovae train'")
    if out.is_dir():
        raise InputError(f"{out} is a folder: give the name of a file, for example {out / 'report.html'}")
    script = own_file("page.js")
    plotly, plotly_digest = plotly_script()
    page = environment().get_template("report/page.html")
    text = page.render(
        _content(runs, warnings or [()] * len(runs), published or {}),
        style=own_file("style.css"),
        script=script,
        digests=(digest(script.encode("utf-8")), plotly_digest),
        plotly=plotly,
    )
    # JSON allows names with a lone surrogate, which UTF-8 cannot encode.
    write_file(out, text.encode("utf-8", errors="replace"))
    return out


def _content(runs: Sequence[RunRecord], warnings: Sequence[Sequence[str]], published: Published) -> dict[str, Any]:
    """Return everything the parts of the page show."""
    labels = _labels(runs)
    charts = curves(runs, labels, published)
    return {
        "title": "Comparison of runs" if len(runs) > 1 else labels[0],
        "runs": [
            {
                "record": run,
                "label": label,
                "colour": index % COLOURS,
                "dashed": index >= COLOURS,
                "about": _about(run),
                "joint": kind_of(run) == "joint",
                "headlines": headlines(run, published),
                "components": rows(run),
                "gains": gains(run),
                "latents": latent_map(run),
                "tasks": task_legend(run),
                "ledger": ledger(run, label),
                "choices": _choices(run),
            }
            for index, (run, label) in enumerate(zip(runs, labels, strict=True))
        ],
        "headline_table": _headline_table(runs, published),
        "notices": _notices(runs, labels, warnings),
        "curves": charts,
        "paper": any(line.kind == "paper" for chart in charts for line in chart.lines),
        "matrices": matrices(runs, labels),
        "training": training(runs, labels),
        "settings": _side_by_side([run.config for run in runs]),
        "surroundings": _side_by_side([run.environment for run in runs]),
    }


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """Name each run by its folder; if names repeat, add the folder above, or else a number."""
    for names in ([run.name for run in runs], ["/".join(run.path.split("/")[-2:]) for run in runs]):
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({index})" for index, run in enumerate(runs, start=1)]


def _about(run: RunRecord) -> str:
    numbers = {"task": run.planned, "replica": len(run.head.seeds)}
    counts = ", ".join(f"{n} {what}{'s' if n != 1 else ''}" for what, n in numbers.items())
    return f"{run.head.method} on {run.head.dataset}, {counts}"


#: A command, or a flag with its value, in the text of a remedy.
COMMAND = re.compile(
    r"boovae (?:tune \w+|eval|inspect)(?: RUN --[a-z]+ [\d.]+\d)?|--[a-z][a-z-]+(?: (?:[\d.]*\d|\w+\+\w+|nll)\b)?"
)


def _with_code(text: str) -> Markup:
    """Mark commands and flags in a text as code, which is not wrapped."""
    return Markup(COMMAND.sub(r"<code>\g<0></code>", str(escape(text))))


def _notices(
    runs: Sequence[RunRecord], labels: Sequence[str], warnings: Sequence[Sequence[str]]
) -> list[tuple[str, Markup]]:
    """Return notices as pairs of labels and text; a notice that several runs share comes once."""
    found: dict[str, list[str]] = {text: [] for text in _remarks(runs)}
    for run, label, said in zip(runs, labels, warnings, strict=True):
        for text in (_state(run), *said, *run.notes):
            if text:
                found.setdefault(text, []).append(label)
    return [(", ".join(whose) if len(runs) > 1 else "", _with_code(text)) for text, whose in found.items()]


def _state(run: RunRecord) -> str:
    """Describe the progress of an unfinished run in a sentence; empty for a finished one."""
    if run.finished:
        return ""
    if run.head.estimator is not None:
        how = "in Python, BooVAE.load(...).score(images) does"
        return f"A saved estimator keeps no images, so it is not measured: {how}."
    if not run.evaluations:
        return f"This run is unfinished: none of its {run.planned} tasks has been evaluated yet."
    seen = run.evaluations[-1].task + 1
    return f"This run is unfinished: the numbers are those after {seen} of its {run.planned} tasks."


def _remarks(runs: Sequence[RunRecord]) -> list[str]:
    """Name the reasons why a comparison is unfair."""
    remarks = []
    if len({run.head.dataset for run in runs}) > 1:
        remarks.append("The runs use different datasets: their NLLs cannot be compared.")
    if len({run.evaluations[-1].task if run.evaluations else -1 for run in runs}) > 1:
        how = "compare the curves at the same place, not the final numbers"
        remarks.append(f"The runs have seen different numbers of tasks: {how}.")
    return remarks


def _headline_table(runs: Sequence[RunRecord], published: Published) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each label with a (value, detail) per run."""
    bound = next((run for run in runs if kind_of(run) == "joint"), None)
    columns = []
    for run in runs:
        lines = headlines(run, published)
        if bound is not None and lines:
            lines.insert(1, _above(run, bound))
        columns.append({line.label: (line.value, line.detail) for line in lines})
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, (MISSING, "")) for column in columns]) for name in names]


def _above(run: RunRecord, bound: RunRecord) -> Headline:
    """Return the gap to the NLL of joint training after the largest number of tasks that both runs have."""
    label = "NLL above the joint bound"
    if run is bound:
        return Headline(label, MISSING, "this is the bound")
    ours, theirs = (
        {each.task: each.nll.pooled for each in one.evaluations if each.nll and one.head.dataset == run.head.dataset}
        for one in (run, bound)
    )
    for task in sorted(ours.keys() & theirs.keys(), reverse=True):
        gap = float(mean(ours[task])) - float(mean(theirs[task]))
        if math.isfinite(gap):
            detail = f"nats, after {task + 1} tasks; the bound is {plus_minus(theirs[task])}"
            return Headline(label, change(gap), detail)
    return Headline(label, MISSING, "the runs have no number of tasks in common")


def _choices(run: RunRecord) -> list[tuple[str, str, str, str]]:
    """Return the settings that were chosen from the data: name, value, reason, and the tasks that had this value."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for event in run.choices:
        for each in event.choices:
            found.setdefault((each.setting, str(each.value), each.reason), []).append(event.task)
    often = {name: sum(key[0] == name for key in found) for name, _, _ in found}
    return [
        (*key, "all" if often[key[0]] == 1 else ", ".join(run.task_name(task) for task in tasks))
        for key, tasks in sorted(found.items(), key=lambda item: list(often).index(item[0][0]))
    ]


def _side_by_side(columns: Sequence[dict[str, str]]) -> list[tuple[str, list[str], bool]]:
    """Return (key, values, whether they differ), differing settings first."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, [column.get(key, MISSING) for column in columns]) for key in keys]
    marked = [(key, values, len(set(values)) > 1) for key, values in rows]
    return sorted(marked, key=lambda row: not row[2])
