"""A bench from end to end: plan the cells, run what is not finished, write tables and figures of what is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boovae.bench import component_count, coreset_size
from boovae.bench import paper as paper_bench
from boovae.bench.board import make_board
from boovae.bench.cells import BY_ARGUMENT, Cell, read_summary, summary_path
from boovae.bench.executors import check_executor, make_executor
from boovae.bench.marker import check_folder, open_folder
from boovae.bench.options import BenchOptions
from boovae.bench.published import is_distance
from boovae.bench.request import Request
from boovae.bench.results import Measured
from boovae.bench.scheduler import Matrix, stoppable
from boovae.bench.worker import Job, make_job
from boovae.config.resolve import read_settings
from boovae.errors import InputError, unknown_name
from boovae.files import write_file
from boovae.metrics.features import check_present


@dataclass(frozen=True)
class Study:
    """An experiment: what it runs on if not told, which cells it needs, and what it writes of them.

    Without `methods` they depend on the dataset.
    """

    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    plan: Callable[[Request], list[Cell]]
    write: Callable[[Request, Sequence[Measured], Sequence[str]], dict[str, str]]


STUDIES: dict[str, Study] = {
    "paper": Study(paper_bench.DATASETS, (), paper_bench.plan, paper_bench.write),
    "coreset-size": Study(coreset_size.DATASETS, coreset_size.METHODS, coreset_size.plan, coreset_size.write),
    "components": Study(component_count.DATASETS, component_count.METHODS, component_count.plan, component_count.write),
}
#: A matrix for a few minutes on two cores: the embedded digits, all methods, three seeds.
QUICK: dict[str, Any] = {"epochs": 32, "boo_steps": 10, "samples": 200, "generated": 2000}
REPLICAS = 5
QUICK_DATASETS, QUICK_REPLICAS = ("digits",), 3


@dataclass(frozen=True)
class Outcome:
    """What a bench has come to: its cells, which failed and why, which tables lack, and what it found in short."""

    study: str
    cells: int
    failed: dict[str, str]
    missing: list[str]
    findings: dict[str, str]
    results: str


def bench(arguments: BenchOptions, command: str) -> Outcome:
    """Run a study as the command line asks for it; all names and settings are checked before the first cell begins."""
    if arguments.study not in STUDIES:
        raise unknown_name("study", arguments.study, STUDIES)
    check_executor(arguments)
    study = STUDIES[arguments.study]
    request = _request(arguments, study, command)
    cells = study.plan(request)
    if arguments.only_tables:
        _check_finished(request, cells)
    else:
        _check_places(arguments, request.datasets)
        open_folder(request.cells, "out", "cells")
    open_folder(request.results, "results", request.study)
    _check_features(request, cells)
    failed: dict[str, str] = {}
    if not arguments.only_tables:
        _check_data(request, cells, arguments.data_dir)
        failed = _run(arguments, request, cells)
    missing, findings = _missing(request, cells), {}
    if len(missing) < len(cells):  # empty tables would replace good ones
        findings = study.write(request, collect(cells, request.cells), missing)
        _keep(request, cells)
    return Outcome(arguments.study, len(cells), failed, missing, findings, str(request.results))


def _request(arguments: BenchOptions, study: Study, command: str) -> Request:
    quick = arguments.quick
    for name in ("datasets", "methods", "metrics", "features", "joint_tasks"):
        if getattr(arguments, name) == ():
            raise InputError(f"{{{name}}} has no value; name some, or leave it out")
    usual = QUICK_REPLICAS if quick else REPLICAS
    named = read_settings(arguments.config) if arguments.config else {}
    for name in filter(BY_ARGUMENT.__contains__, named):
        raise InputError(
            f"{{config}} {arguments.config} sets {name}: in a bench that is {BY_ARGUMENT[name]}; leave it out there"
        )
    replicas = usual if arguments.replicas is None else arguments.replicas
    results = Path("results") / (f"{arguments.study}-quick" if quick else arguments.study)
    return Request(
        study=arguments.study,
        datasets=arguments.datasets or (QUICK_DATASETS if quick else study.datasets),
        methods=arguments.methods or study.methods,
        asked=arguments.metrics,
        features=arguments.features,
        tasks=arguments.tasks,
        joint_tasks=arguments.joint_tasks,
        given={**(QUICK if quick else {}), **named, "replicas": replicas, "seed": arguments.seed},
        cells=arguments.out,
        results=arguments.results or results,
        command=command,
    )


def _check_finished(request: Request, cells: Sequence[Cell]) -> None:
    """Refuse to make tables of nothing; the folder of the cells is only read, it may be somebody else's."""
    check_folder(request.cells, "out", "cells")
    if len(_missing(request, cells)) == len(cells):
        raise InputError(
            f"none of the {len(cells)} cells of this bench is finished in {request.cells} ({{out}}): "
            "run it without {only_tables}, or name the {out} that has them"
        )


def _check_places(arguments: BenchOptions, datasets: Sequence[str]) -> None:
    """Refuse a device, a folder of data or own data that are not there; a cluster's machines have their own devices."""
    from boovae.data import DATASETS
    from boovae.data.readers import check_path
    from boovae.replicas.devices import choose_device, named_device

    if arguments.executor == "local":
        choose_device(arguments.device)
    elif arguments.device != "auto":
        named_device(arguments.device)
    if arguments.data_dir is not None and not arguments.data_dir.expanduser().is_dir():
        raise InputError(
            f"{{data_dir}} {arguments.data_dir}: no such folder; name the one with the datasets, or leave it out"
        )
    for dataset in datasets:
        if dataset not in DATASETS:
            form, _, path = dataset.partition(":")
            check_path(form, Path(path).expanduser())


def _missing(request: Request, cells: Sequence[Cell]) -> list[str]:
    """Name the cells that are not finished."""
    return [cell.title for cell in cells if read_summary(request.cells, cell) is None]


def _keep(request: Request, cells: Sequence[Cell]) -> None:
    """Put the records of finished cells beside the results: copied to `--out`, a bench goes on from them anywhere."""
    for name in sorted({cell.name for cell in cells}):
        record = summary_path(request.cells, name)
        if record.exists():
            write_file(summary_path(request.results / "cells", name), record.read_bytes())


def _check_features(request: Request, cells: Sequence[Cell]) -> None:
    """Refuse finished cells that were compared on other features than the tables are to be made of."""
    for cell in cells if any(map(is_distance, request.metrics)) else ():
        summary = read_summary(request.cells, cell)
        evaluations = summary["evaluations"] if summary is not None else []
        found = (
            set.intersection(*(set(e.frechet.sets if e.frechet else ()) for e in evaluations)) if evaluations else set()
        )
        lacking = {name.partition(":")[0] for name in request.features_of(cell.settings.data.dataset)} - found
        if summary is not None and lacking:
            raise InputError(
                f"{request.cells / cell.name}: finished without {', '.join(sorted(lacking))} ({{features}}); "
                f"choose another {{out}}, remove {cell.name}.json and its folder, or name the features it has: "
                f"{', '.join(sorted(found))}"
            )


def _check_data(request: Request, cells: Sequence[Cell], data_dir: Path | None) -> None:
    """Refuse finished cells of the user's own data that were made of other images than lie there now."""
    from boovae.data import DATASETS
    from boovae.runs.data import load_data

    digests: dict[tuple[object, ...], str] = {}
    for cell in cells:
        settings, summary = cell.settings, read_summary(request.cells, cell)
        if settings.data.dataset in DATASETS or summary is None or "split" not in summary:
            continue
        same = settings.data.dataset, settings.data.data_seed, settings.data.limit
        if same not in digests:
            digests[same] = load_data(settings, data_dir).digest
        if summary["split"]["digest"] != digests[same]:
            raise InputError(
                f"{request.cells / cell.name}: {settings.data.dataset} has other images now than when this cell was "
                f"finished; choose another {{out}}, or remove {cell.name}.json and its folder"
            )


def _run(arguments: BenchOptions, request: Request, cells: Sequence[Cell]) -> dict[str, str]:
    """Run the cells that are not finished; return those that failed."""
    for name in {name for dataset in request.datasets for name in request.features_of(dataset)}:
        check_present(name)
    options: dict[str, Any] = {name: getattr(arguments, name) for name in ("data_dir", "device", "compile")}
    board = make_board(request.cells, quiet=arguments.quiet)

    def job(cell: Cell) -> Job:
        features = request.features_of(cell.settings.data.dataset)
        return make_job(cell, request.cells, command=request.command, features=features, **options)

    with closing(board):
        executor = make_executor(arguments, len(cells))  # before `stoppable`: Ray has its own idea of SIGTERM
        with stoppable(request.cells), closing(executor):
            matrix = Matrix(cells, request.cells, executor, job, board)
            matrix.run()
    return matrix.failed


def collect(cells: Sequence[Cell], folder: Path) -> list[Measured]:
    """Return the numbers of all finished cells, dataset by dataset."""
    found: dict[str, Measured] = {}
    for cell in cells:
        summary = read_summary(folder, cell)
        if summary is not None:
            found.setdefault(cell.settings.data.dataset, Measured(cell.settings.data.dataset)).add(cell, summary)
    return list(found.values())
