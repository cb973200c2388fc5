"""The plan of the house: which room may import which, what lies where, how long a function may be."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import boovae

SOURCE = Path(boovae.__file__).parent
#: A room imports only rooms before it, and the files at the top that know nothing of rooms.
ROOMS = (
    *("config", "data", "model", "replicas", "boosting", "methods", "training", "metrics", "report", "runs"),
    *("estimator", "bench", "experiments", "serve", "cli"),
)
TOP = ("errors", "files")
LONGEST = 60
FILES = {path.relative_to(SOURCE).with_suffix(""): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every module of the package that a file names, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("boovae."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("boovae."):
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if Path(*inner.split(".")[1:]) in FILES else str(node.module)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    allowed = {*ROOMS[: ROOMS.index(room) + 1], *TOP}
    found = {
        f"{path} imports {module}"
        for path, tree in FILES.items()
        if path.parts[0] == room
        for module in imported(tree)
        if module.split(".")[1] not in allowed
    }
    assert not found


def test_files_at_the_top_import_no_room() -> None:
    for name in TOP:
        assert {module.split(".")[1] for module in imported(FILES[Path(name)])} <= set(TOP)


def test_every_file_lies_in_a_room_but_a_handful() -> None:
    top = {path.name for path in FILES if len(path.parts) == 1}
    assert top == {"__init__", "__main__", *TOP}
    assert {path.parts[0] for path in FILES if len(path.parts) > 1} == set(ROOMS)


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in FILES if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_imports_itself_by_a_detour() -> None:
    graph = {
        ".".join(("boovae", *path.parts)).removesuffix(".__init__"): set(imported(tree)) for path, tree in FILES.items()
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for other in sorted(graph.get(module, ())):
                if other != module:
                    visit(other, (*way, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_functions_fit_a_screen() -> None:
    functions = (
        (path, node)
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = [f"{path}: {node.name}" for path, node in functions if (node.end_lineno or 0) - node.lineno >= LONGEST]
    assert long == []
