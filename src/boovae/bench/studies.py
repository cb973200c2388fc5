"""A bench from end to end: plan the cells, run what is not finished, write tables and figures of what is."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from boovae.bench.cells import BY_ARGUMENT, Cell
from boovae.bench.executors import check_executor, make_executor
from boovae.bench.paper import Paper
from boovae.bench.published import dataset_title, is_distance
from boovae.bench.request import BenchOptions, Request, check_folder, file_name, open_folder
from boovae.bench.results import Measured, Summary, by_dataset, finished, summary_path
from boovae.bench.scheduler import Board, Matrix, stoppable
from boovae.bench.sweeps import COMPONENTS, CORESET_SIZE, Sweep
from boovae.bench.webpage import render
from boovae.bench.worker import make_job
from boovae.config.resolve import read_settings
from boovae.data import DATASETS
from boovae.data.readers import check_path
from boovae.errors import InputError, unknown_name
from boovae.files import write_file
from boovae.metrics.features import check_present
from boovae.replicas.devices import choose_device, named_device
from boovae.runs.data import load_data

Finished = Sequence[tuple[Cell, Summary]]
Study = Paper | Sweep
STUDIES: dict[str, Study] = {"paper": Paper(), "coreset-size": CORESET_SIZE, "components": COMPONENTS}
#: A matrix for a few minutes on two cores: the embedded digits, all methods, three seeds.
QUICK: dict[str, Any] = {"epochs": 32, "boo_steps": 10, "samples": 200, "generated": 2000, "replicas": 3}
QUICK_DATASETS = ("digits",)
#: Settings of the whole matrix, unless a flag or a file has others.
USUAL: dict[str, Any] = {"replicas": 5}
#: How to measure a finished cell again.
AFRESH = "choose another {{out}}, or remove {}.json and its folder"


@dataclass(frozen=True)
class Outcome:
    """The result of a bench: its cells, those that failed and why, those missing from the tables, and findings."""

    study: str
    cells: int
    failed: dict[str, str]
    missing: list[str]
    findings: dict[str, str]
    results: str


def bench(arguments: BenchOptions, command: str) -> Outcome:
    """Run a study as the command line asks; check all names and settings before the first cell begins."""
    if arguments.study not in STUDIES:
        raise unknown_name("study", arguments.study, STUDIES)
    check_executor(arguments)
    study = STUDIES[arguments.study]
    request = _request(arguments, study, command)
    cells = study.plan(request)
    if request.only_tables:
        check_folder(request.out, "out", "cells")  # and write nothing: it may belong to somebody else
    else:
        _check_places(request)
        open_folder(request.out, "out", "cells")
    done, failed = finished(request.out, cells), dict[str, str]()
    if request.only_tables and not done:
        raise InputError(
            f"none of the {len(cells)} cells of this bench is finished in {request.out} ({{out}}): "
            "run it without {only_tables}, or name the {out} that has them"
        )
    open_folder(request.results, "results", request.study)
    _check_features(request, done)
    if not request.only_tables:
        _check_data(request, done)
        failed = _run(request, cells)
        done = finished(request.out, cells)
    missing = [cell.title for cell in cells if cell not in dict(done)]
    findings = {}
    if done:  # empty tables would replace good ones
        findings = write(request, by_dataset(done), missing)
        for name in sorted({cell.name for cell, _ in done}):  # copied to another `--out`, they are finished there
            write_file(summary_path(request.results / "cells", name), summary_path(request.out, name).read_bytes())
    return Outcome(request.study, len(cells), failed, missing, findings, str(request.results))


def write(request: Request, measured: Sequence[Measured], missing: Sequence[str]) -> dict[str, str]:
    """Write every number, tables, figures and the page; return the findings."""
    study, folder = STUDIES[request.study], request.results
    for each in measured:
        each.write_csv(folder / f"{file_name(each.dataset)}.csv", request.command)
    last, chapters = study.write_tables(request, measured), [study.chapter(request, each) for each in measured]
    findings = study.findings(request, measured)
    parts = [(key.partition(": "), text) for key, text in findings.items()]
    titled = {dataset_title(head) + colon + rest: text for (head, colon, rest), text in parts}
    write_file(folder / "report.html", render(study.title, chapters, titled, last, missing))
    write_file(folder / "findings.json", (json.dumps(findings, indent=1) + "\n").encode())
    return findings


def _request(arguments: BenchOptions, study: Study, command: str) -> Request:
    """Return the request: the options with the defaults of the study, and the settings of all cells."""
    quick, name = arguments.quick, arguments.study
    options: dict[str, Any] = {one.name: getattr(arguments, one.name) for one in fields(BenchOptions)}
    for option in (option for option, value in options.items() if value == ()):
        raise InputError(f"{{{option}}} has no value; name some, or leave it out")
    file = read_settings(arguments.config) if arguments.config else {}
    for setting in (name for name in file if name in BY_ARGUMENT):
        flag = f"{{{BY_ARGUMENT[setting]}}}"
        raise InputError(f"{{config}} {arguments.config} sets {setting}: a bench takes {flag} instead; remove it there")
    given = {**(QUICK if quick else USUAL), **file, "seed": arguments.seed}
    options |= {
        "datasets": arguments.datasets or (QUICK_DATASETS if quick else study.datasets),
        "methods": arguments.methods or study.methods,
        "results": arguments.results or Path("results") / (f"{name}-quick" if quick else name),
        "given": given if arguments.replicas is None else given | {"replicas": arguments.replicas},
    }
    return Request(**options, command=command)


def _check_places(request: Request) -> None:
    """Refuse a missing device, data folder or dataset; the machines of a cluster have their own devices."""
    if request.executor == "local":
        choose_device(request.device)
    elif request.device != "auto":
        named_device(request.device)
    place = request.data_dir
    if place is not None and not place.expanduser().is_dir():
        raise InputError(f"{{data_dir}} {place}: no such folder; name the one with the datasets, or leave it out")
    for dataset in (name for name in request.datasets if name not in DATASETS):
        form, _, path = dataset.partition(":")
        check_path(form, Path(path).expanduser())


def _check_features(request: Request, done: Finished) -> None:
    """Refuse finished cells that lack features which the tables need."""
    for cell, summary in done if any(map(is_distance, request.shown)) else ():
        found = set.intersection(*(set(e.frechet.sets if e.frechet else ()) for e in summary["evaluations"]))
        lacking = {name.partition(":")[0] for name in request.features_of(cell.settings.data.dataset)} - found
        if lacking:
            without, there = (", ".join(sorted(names)) for names in (lacking, found))
            remedy = f"{AFRESH.format(cell.name)}, or name the features it has: {there}"
            raise InputError(f"{request.out / cell.name}: finished without {without} ({{features}}); {remedy}")


def _check_data(request: Request, done: Finished) -> None:
    """Refuse finished cells of the user's own data if the images have changed since."""
    digests: dict[tuple[object, ...], str] = {}
    for cell, summary in done:
        data = cell.settings.data
        if data.dataset in DATASETS or "split" not in summary:
            continue
        same = data.dataset, data.data_seed, data.limit
        if same not in digests:
            digests[same] = load_data(cell.settings, request.data_dir).digest
        if summary["split"]["digest"] != digests[same]:
            problem = f"the images of {data.dataset} have changed since this cell was finished"
            raise InputError(f"{request.out / cell.name}: {problem}; {AFRESH.format(cell.name)}")


def _run(request: Request, cells: Sequence[Cell]) -> dict[str, str]:
    """Run the cells that are not finished; return the errors of those that failed."""
    for name in {name for dataset in request.datasets for name in request.features_of(dataset)}:
        check_present(name)
    with closing(Board(request.out, quiet=request.quiet)) as board:
        executor = make_executor(request, len(cells))  # before `stoppable`: Ray installs its own handler of SIGTERM
        with stoppable(request.out), closing(executor):
            matrix = Matrix(cells, request.out, executor, partial(make_job, request=request), board)
            matrix.run()
    return matrix.failed
