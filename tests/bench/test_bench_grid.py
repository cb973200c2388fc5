"""The plan of a bench: which runs it needs, what they are called, and what is refused before any work."""

from __future__ import annotations

import errno
import functools
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_parts import GIVEN, made_up_record, request
from boovae.bench import request as request_module
from boovae.bench import studies as bench
from boovae.bench.cells import Cell, Variant, plan
from boovae.bench.paper import Paper
from boovae.bench.published import METHODS
from boovae.bench.request import open_folder
from boovae.bench.results import Summary, read_summary
from boovae.boosting.fit import FitSettings
from boovae.cli.main import main
from boovae.config import folder_name
from boovae.errors import InputError
from boovae.methods import from_mapping, resolve
from boovae.methods.si import SISettings
from boovae.runs.data import load_data


def finished(cell: Cell) -> Summary:
    return made_up_record(cell, lambda seen, seed: 90.0, lambda seen: [1 / seen] * seen)


def test_a_folder_is_named_by_what_decides_its_numbers() -> None:
    names = {folder_name(resolve({"dataset": "digits", "epochs": epochs})) for epochs in (3, 4)}
    assert len(names) == 2
    explicit = resolve({"dataset": "digits"}).flat()
    assert folder_name(from_mapping(explicit)) == folder_name(resolve({"dataset": "digits"}))
    assert folder_name(resolve({"dataset": "folder:/a b/c"})).startswith("folder--a-b-c-boo+distill-")


def test_compared_methods_have_the_papers_schedule_and_our_default_its_own() -> None:
    cells = {cell.label: cell.settings for cell in plan(["mnist"], ["ewc", "boo", "boo+distill"], {}, 10)}
    for label in ("ewc", "boo"):
        training = cells[label].training
        assert (training.schedule, training.epochs, training.early_stop) == ("plateau", 500, 50)
    assert cells["boo"].of(FitSettings).boo_objective == "literal"
    assert cells["boo+distill"] == resolve({"dataset": "mnist", "tasks": 10}, preset="tuned")


def test_the_tuned_strengths_hold_in_the_bench() -> None:
    (cell,) = plan(["digits"], ["si"], {}, 10)
    alone = resolve({"dataset": "digits", "method": "si"})
    assert cell.settings.of(SISettings) == alone.of(SISettings)
    assert alone.of(SISettings).si_strength == 100.0 != SISettings().si_strength  # or the test says nothing


def test_joint_is_trained_once_for_each_number_of_tasks_on_the_images_of_them_all() -> None:
    cells = plan(["digits"], ["joint"], {"limit": 20}, 10)
    assert [cell.tasks for cell in cells] == [2, 5, 10]
    assert [cell.settings.model.components for cell in cells] == [30, 75, 150]
    one_by_one = load_data(resolve({"dataset": "digits", "limit": 20}))
    for cell in cells:
        (together,) = load_data(cell.settings)[:1]
        apart = torch.cat([task.train.images for task in one_by_one[: cell.tasks]])
        assert sorted(together.train.images.sum(1).tolist()) == sorted(apart.sum(1).tolist())
        assert len(together.classes) == cell.tasks
    assert [cell.tasks for cell in plan(["digits"], ["joint"], {}, 3)] == [2, 3]
    asked = plan(["digits"], ["joint"], {"limit": 20}, 10, [10, 7, 2])
    assert [cell.tasks for cell in asked] == [2, 7, 10]
    assert [cell.name for cell in asked if cell.tasks != 7] == [cell.name for cell in cells if cell.tasks != 5]


def test_all_methods_of_the_bench_make_sense_on_all_its_datasets() -> None:
    cells = plan(["mnist", "notmnist", "fashion_mnist"], METHODS, {"replicas": 5}, 10)
    assert len(cells) == 3 * (13 + 3) == len({cell.name for cell in cells})


def test_a_variant_is_a_method_with_other_settings() -> None:
    (cell,) = plan(["digits"], ["wide=boo:components=40,boo-start=mean"], GIVEN, 2)
    assert (cell.label, cell.settings.method) == ("wide", "boo")
    assert (cell.settings.model.components, cell.settings.of(FitSettings).boo_start) == (40, "mean")
    assert Variant.parse("boo+vcl") == Variant("boo+vcl", "boo+vcl", {})


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["papre"], "did you mean 'paper'"),
        (["paper", "--datasets", "mnits"], "did you mean 'mnist'"),
        (["paper", "--datasets", "mnist", "mnist"], "names a dataset twice"),
        (["paper", "--methods", "bo"], "did you mean 'boo'"),
        (["paper", "--methods", "boo", "boo"], "twice"),
        (["paper", "--methods", "x=boo:component=3"], "did you mean 'components'"),
        (["paper", "--methods", "boo:components=3"], "a name of its own"),
        (["paper", "--methods", "x=boo:components"], "is not a setting"),
        (["paper", "--methods", "x=boo:dataset=digits"], "a bench takes --datasets"),
        (["paper", "--methods", "x=boo:method=ewc"], "a bench takes --methods"),
        (["paper", "--methods", "x=joint:classes_per_task=2"], "classes_per_task cannot be set for joint"),
        (["paper", "--methods", "joint+ewc"], "joint keeps everything"),
        (["paper", "--metrics", "nlll"], "did you mean 'nll'"),
        (["paper", "--tasks", "0"], "--tasks"),
        (["paper", "--joint-tasks", "2", "11"], "has 11, but this bench of mnist has 10 tasks; use 1 to 10"),
        (["paper", "--joint-tasks", "0"], "--joint-tasks has 0"),
        (["paper", "--methods", "boo", "--joint-tasks", "2"], "joint, which is not among --methods"),
        (["paper", "--joint-tasks"], "--joint-tasks has no value"),
        (["paper", "--datasets", "digits", "--tasks", "11"], "--tasks is 11, but digits has 10 tasks"),
        (["paper", "--methods", "a|b=boo:components=3"], "no '|'"),
        (["paper", "--methods", "new\nline=boo:components=3"], "printable"),
        (["paper", "--methods", "#hash=boo:components=3"], "no '#' first"),
        (["paper", "--methods", " =boo:components=3"], "a name of its own"),
        (["paper", "--methods", "x=boo:components=3,components=4"], "components is given twice"),
        (["paper", "--methods", "ewc=boo"], "'ewc' is the name of a method, but this variant is boo"),
        (["paper", "--datasets"], "--datasets has no value"),
        (["paper", "--datasets", "folder:a/b", "folder:a-b"], "would have the same file name"),
        (["paper", "--replicas", "0"], "--replicas"),
        (["paper", "--workers", "0"], "--workers"),
        (["paper", "--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *words, "--out", str(tmp_path / "cells"), "--results", str(tmp_path / "results")])
    assert left.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.glob("cells/*-*"))


def test_the_last_task_may_have_fewer_classes_and_borders_make_any_number_of_tasks() -> None:
    assert len(plan(["digits"], ["standard"], {**GIVEN, "classes_per_task": 3}, 4)) == 1
    assert len(plan(["digits"], ["standard"], {**GIVEN, "borders": tuple(range(100, 1200, 100))}, 12)) == 1
    with pytest.raises(InputError, match="tasks is 12, but digits has 10 tasks"):
        plan(["digits"], ["joint"], GIVEN, 12)
    with pytest.raises(InputError, match="tasks is 11, but digits has 10 tasks"):
        plan(["digits"], ["standard"], GIVEN, 11)
    for name in ("tasks", "seed", "replicas", "dataset", "method"):
        with pytest.raises(InputError, match=f"{name} cannot be set in a variant; a bench takes {name}"):
            plan(["digits"], [f"x=standard:{name}=1"], GIVEN, 2)


def cells_of(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> list[Cell]:
    """Return the cells that a command would run."""
    found: list[Cell] = []

    def run(request: object, cells: Sequence[Cell]) -> dict[str, str]:
        found.extend(cells)
        return {}

    monkeypatch.setattr(bench, "_run", run)
    main(["bench", *words, "--out", str(folder / "cells"), "--results", str(folder / "results")])
    return found


def test_quick_leaves_alone_what_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "own.toml"
    config.write_text("epochs = 3\nsamples = 7\n")
    (cell,) = cells_of(monkeypatch, tmp_path, "paper", "--quick", "--methods", "ewc", "--config", str(config))
    assert (cell.settings.training.epochs, cell.settings.evaluation.samples) == (3, 7)
    assert cell.settings.evaluation.generated == bench.QUICK["generated"]


@pytest.mark.parametrize("line", ['dataset = "mnist"', 'method = "ewc"', "tasks = 3", "replicas = 2", "seed = 4"])
def test_settings_with_a_flag_of_the_bench_are_refused_in_its_file(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config := tmp_path / "own.toml").write_text(line)
    with pytest.raises(SystemExit):
        main(["bench", "paper", "--quick", "--config", str(config), "--out", str(tmp_path / "cells")])
    name = line.split()[0]
    assert f"sets {name}: a bench takes --{name}" in capsys.readouterr().err


def test_the_prior_of_joint_can_be_another() -> None:
    assert {cell.settings.model.prior for cell in plan(["digits"], ["joint"], {}, 3)} == {"vamp"}
    assert {cell.settings.model.prior for cell in plan(["digits"], ["plain=joint:prior=normal"], {}, 3)} == {"normal"}
    assert {cell.settings.model.prior for cell in plan(["digits"], ["joint"], {"prior": "normal"}, 3)} == {"normal"}


def test_a_folder_of_another_version_or_bench_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder(tmp_path, "out", "cells")
    open_folder(tmp_path, "out", "cells")
    with pytest.raises(InputError, match="holds cells there, paper here"):
        open_folder(tmp_path, "results", "paper")
    monkeypatch.setattr(request_module, "FORMAT", 2)
    with pytest.raises(InputError, match="format 1 there, 2 here"):
        open_folder(tmp_path, "out", "cells")
    (tmp_path / "bench.json").write_text("[")
    with pytest.raises(InputError, match=r"cannot read .*bench.json.*; remove only this file"):
        open_folder(tmp_path, "out", "cells")


def test_tables_alone_need_the_summaries_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = plan(["mnist"], ["ewc", "boo"], {"replicas": 2, "seed": 0}, 10)
    out, results = tmp_path / "cells", tmp_path / "results"
    out.mkdir()
    (out / f"{cells[1].name}.json").write_text(json.dumps(finished(cells[1])))
    words = ["bench", "paper", "--datasets", "mnist", "--methods", "ewc", "boo", "--replicas", "2", "--only-tables"]
    before = sorted(out.iterdir())
    main([*words, "--out", str(out), "--results", str(results)])
    assert sorted(out.iterdir()) == before  # it may be somebody else's
    said = capsys.readouterr()
    assert "boo: NLL at or better than the paper's" in said.out
    assert "not finished, so left out: mnist ewc" in said.err
    assert "| 10 | **90.0 (0.0)** / " in (results / "nll.md").read_text()
    assert "left out: mnist ewc." in (results / "report.html").read_text()
    (out / "bench.json").write_text('{"format": 99}')
    with pytest.raises(SystemExit):
        main([*words, "--out", str(out), "--results", str(results)])
    assert "format 99 there, 1 here" in capsys.readouterr().err


def test_tables_show_what_is_finished_of_joint_beyond_the_usual_numbers(tmp_path: Path) -> None:
    for cell in plan(["digits"], ["joint"], {}, 10, [5, 7]):
        (tmp_path / f"{cell.name}.json").write_text(json.dumps(finished(cell)))

    def numbers(asked: tuple[int, ...] | None) -> list[int]:
        wanted = request(tmp_path, out=tmp_path, methods=("boo", "joint"), joint_tasks=asked)
        return sorted(cell.tasks for cell in Paper().plan(wanted) if cell.label == "joint")

    assert numbers(None) == [2, 5, 7, 10]
    assert numbers((2, 3)) == [2, 3]  # who names them gets those


def test_tables_of_nothing_do_not_replace_good_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (table := tmp_path / "nll.md").write_text("good")
    with pytest.raises(SystemExit) as left:
        main(["bench", "paper", "--only-tables", "--out", str(tmp_path / "mistyped"), "--results", str(tmp_path)])
    assert left.value.code == 2
    assert "none of the 48 cells of this bench is finished" in (said := capsys.readouterr().err)
    assert "run it without --only-tables, or name the --out that has them" in said
    assert not (tmp_path / "mistyped").exists()
    assert table.read_text() == "good"


def test_a_variant_by_what_its_method_never_reads_is_refused() -> None:
    with pytest.raises(InputError, match="methods x: boo_steps is a setting of method 'boo'"):
        plan(["digits"], ["x=ewc:boo_steps=7"], GIVEN, 2)


def test_a_setting_that_a_method_never_reads_asks_for_no_cell_anew(tmp_path: Path) -> None:
    for method, same in {"ewc": True, "boo+ewc": False}.items():
        before, after = (plan(["digits"], [method], {**GIVEN, "boo_prune": share}, 2)[0] for share in (0.001, 0.1))
        assert (before.name == after.name) is same
    (cell,) = plan(["digits"], ["ewc"], GIVEN, 2)
    old = cell.settings.flat() | {"mog_fit": "gradient"}
    (tmp_path / f"{cell.name}.json").write_text(json.dumps(finished(cell) | {"settings": old}))
    assert read_summary(tmp_path, cell) is not None


def test_a_summary_of_other_settings_is_not_taken(tmp_path: Path) -> None:
    (cell,) = plan(["digits"], ["ewc"], GIVEN, 2)
    assert read_summary(tmp_path, cell) is None
    other = cell.settings.changed(epochs=99).flat()
    (tmp_path / f"{cell.name}.json").write_text(json.dumps(finished(cell) | {"settings": other}))
    with pytest.raises(InputError, match="other settings"):
        read_summary(tmp_path, Cell("ewc", cell.settings))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 99}, "has format 99, this version reads 1"),
        ({"settings": 3}, "damaged"),
        ({"settings": {"nope": 1}}, "unknown setting 'nope'"),
        ({"settings": None}, "damaged|other settings"),
        ({"evaluations": None}, "'evaluations' must be a list"),
        ({"evaluations": []}, "'evaluations' must be one after each of 2 tasks"),
        ({"evaluations.0": 3}, r"'evaluations\[0\]' must be an object"),
        ({"evaluations.1.nll.pooled": [1.0]}, "after 2 tasks: 'nll.pooled' has shape"),
        ({"evaluations.1.nll.pooled": ["a", "b"]}, "'nll.pooled' is not a list of numbers"),
        ({"evaluations.1.diversity.proportions": [[1.0]]}, "'diversity.proportions' has shape"),
        ({"seeds": [0]}, "'seeds' is"),
        ({"tasks": []}, "'tasks' has 0 names of 2"),
        ({"seconds": None}, "'seconds' must be an object"),
        ({"environment.commit": None}, "'environment.commit' must be a text"),
        ({"samples": ["zzz"]}, r"'samples\[0\]' must be a text matching regex '\^iVBORw0KGgo'"),
        ({"components": {"a": 3}}, r"'components\[\.\.\.\]' must be a list"),
    ],
)
def test_a_damaged_record_is_named_with_what_to_do(changes: dict[str, object], complaint: str, tmp_path: Path) -> None:
    (cell,) = plan(["digits"], ["ewc"], GIVEN, 2)
    record: Any = json.loads(json.dumps(finished(cell)))
    for name, value in changes.items():
        *path, last = [int(part) if part.isdigit() else part for part in name.split(".")]
        functools.reduce(operator.getitem, path, record)[last] = value
    (tmp_path / f"{cell.name}.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=f"{cell.name}.json.*{complaint}.*remove it, and its cell runs again"):
        read_summary(tmp_path, cell)


def test_a_value_of_a_variant_may_be_a_list() -> None:
    variant = Variant.parse("x=boo:log_variance_range=[-5.0, 1.0],components=3")
    assert variant.changes == {"log_variance_range": [-5.0, 1.0], "components": 3}


def test_tasks_of_several_classes_count_as_tasks() -> None:
    (pairs,) = plan(["digits"], ["boo"], {"classes_per_task": 2}, 3)
    assert pairs.tasks == 3


def test_folders_that_cannot_be_written_are_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder(tmp_path, "results", "paper")

    def refuse(path: Path, *rest: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(InputError, match=r"\(results\): Read-only file system"):
        open_folder(tmp_path, "results", "paper")
