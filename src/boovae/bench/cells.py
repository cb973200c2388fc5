"""The cells of a bench: which runs it needs, and what each is called.

A cell is a run. Its folder is named by a hash of its configuration, so that the same cell of two benches is one run.
Next to the folder `NAME/` are `NAME.json` (the measurements, written when the cell is finished), `NAME.lock` (held by
the process that works on the cell) and `NAME.log` (the output of that process).
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Self

from boovae.bench.published import FACES
from boovae.config import Settings, folder_name
from boovae.config.resolve import packaged_toml, refuse_foreign
from boovae.data import DATASETS, PATH_FORMS
from boovae.data.datasets import unknown_dataset
from boovae.errors import InputError
from boovae.methods import REGISTRY, is_method, make_method, outside_digest, resolve

#: Numbers of tasks that `joint`, which starts from scratch each time, is trained on; face datasets have few tasks: all.
JOINT_TASKS, JOINT_FACES = (2, 5, 10), (1, 2, 3, 4)
#: Settings that are flags of the bench: all columns share them, so neither a file nor a variant can set them.
BY_ARGUMENT = {"dataset": "datasets", "method": "methods", "tasks": "tasks", "replicas": "replicas", "seed": "seed"}

Given = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run of a bench; `label` is the name of its column or line."""

    label: str
    settings: Settings

    @cached_property  # read at every poll of a bench, and it may have to open a file
    def name(self) -> str:
        """The name of its folder; for a method from outside the package it changes when the file of the method does."""
        return "-".join(filter(None, (folder_name(self.settings), outside_digest(self.settings.method))))

    @property
    def title(self) -> str:
        """The name shown to users."""
        where = f" at {self.tasks}" if self.settings.method == "joint" else ""
        return f"{self.settings.data.dataset} {self.label}{where}"

    @property
    def together(self) -> int:
        """How many tasks of the bench each task covers: `joint` learns them all as the classes of one task."""
        return self.settings.data.classes_per_task if self.settings.method == "joint" else 1

    @property
    def tasks(self) -> int:
        """How many tasks of the bench it has seen at the end."""
        return (self.settings.data.tasks or 1) * self.together


@dataclass(frozen=True)
class Variant:
    """A method in a bench: its label, its name, and the settings that it changes."""

    label: str
    method: str
    changes: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read METHOD or NAME=METHOD:setting=value,setting=value.

        >>> Variant.parse("wide=boo:components=40")
        Variant(label='wide', method='boo', changes={'components': 40})
        """
        head, _, tail = text.partition(":")
        label, named, method = head.partition("=")
        changes: dict[str, Any] = {}
        for part in filter(None, re.split(r",(?![^\[]*\])", tail)):  # a value may be a list, [a, b]
            name, given, value = part.partition("=")
            name = name.strip().replace("-", "_")
            if not given:
                raise InputError(f"{{methods}} {text}: '{part}' is not a setting; write NAME=METHOD:setting=value")
            if name in changes:
                raise InputError(f"{{methods}} {text}: {name} is given twice")
            if flag := BY_ARGUMENT.get(name):
                raise InputError(f"{{methods}} {text}: {name} cannot be set in a variant; a bench takes {{{flag}}}")
            changes[name] = _value(value.strip())
        if "|" in label or label.startswith("#") or not label.isprintable():
            raise InputError(f"{{methods}} {text!r}: a name heads a column: printable characters, no '|', no '#' first")
        if not label.strip() or (named and not method) or (changes and not named):
            raise InputError(f"{{methods}} {text}: a variant needs a name of its own; write NAME=METHOD:setting=value")
        return cls(label, method or label, changes)


def _value(text: str) -> Any:
    """Read a value as TOML has it; a bare word is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def plan(
    datasets: Sequence[str], methods: Sequence[str], given: Given, tasks: int, joint_tasks: Sequence[int] | None = None
) -> list[Cell]:
    """Return the cells of datasets x methods; check every name and setting before anything is trained.

    `given` applies to every cell whose method reads it. `joint` gets one run for each number in `joint_tasks`, or for
    each of the usual ones.
    """
    forms = {form.partition(":")[0] for form in PATH_FORMS}
    for dataset in datasets:
        if dataset not in DATASETS and dataset.partition(":")[0] not in forms:
            raise unknown_dataset(dataset, "dataset ({datasets})")
    variants = _variants(methods)
    if joint_tasks is not None and all(variant.method != "joint" for variant in variants):
        raise InputError("{joint_tasks} is for joint, which is not among {methods}; add it, or leave {joint_tasks} out")
    cells = list[Cell]()
    for dataset, variant in product(datasets, variants):
        try:
            cells += _cells(dataset, variant, {**given, "tasks": tasks}, joint_tasks)
        except InputError as error:
            named = f"{{methods}} {variant.label}: " if variant.changes else ""
            raise InputError(f"{named}{error.text}") from error
    for cell in cells:
        make_method(cell.settings)  # refuses combinations that make no sense
        data = cell.settings.data
        if data.dataset not in DATASETS or data.borders is not None:
            continue
        classes = len(data.class_order or DATASETS[data.dataset].class_names)
        most = -(-classes * cell.together // data.classes_per_task)  # the last task may have fewer classes
        if cell.tasks > most:
            raise InputError(f"{{tasks}} is {cell.tasks}, but {data.dataset} has {most} tasks; use at most that many")
    return cells


def _variants(methods: Sequence[str]) -> list[Variant]:
    """Return the variants that `--methods` lists; their labels must differ."""
    variants = [Variant.parse(text) for text in methods]
    labels = [variant.label for variant in variants]
    if len(set(labels)) < len(labels):
        named = ", ".join(labels)
        raise InputError(f"{{methods}} names a method twice: {named}; a variant is NAME=METHOD:setting=value")
    for variant in variants:
        try:
            refuse_foreign(variant.changes, variant.method, REGISTRY)
        except InputError as error:  # keep the Python spelling: settings of a variant are not flags
            raise InputError(f"{{methods}} {variant.label}: {error}") from error
        if variant.label != variant.method and is_method(variant.label):
            named = f"'{variant.label}' is the name of a method, but this variant is {variant.method}"
            raise InputError(f"{{methods}}: {named}, not what the paper's numbers beside it are: choose another name")
    return variants


def _cells(dataset: str, variant: Variant, given: Given, joint_tasks: Sequence[int] | None) -> Iterable[Cell]:
    named = {**variant.changes, "dataset": dataset, "method": variant.method}
    alone = schedule(named, given)
    if variant.method != "joint":
        yield Cell(variant.label, alone)
        return
    if "classes_per_task" in {**variant.changes, **given}:  # a variant cannot set `tasks`
        raise InputError("classes_per_task cannot be set for joint: in a bench it learns all classes as one task")
    for tasks in _joint_tasks(dataset, given["tasks"], joint_tasks):
        together = {"classes_per_task": tasks, "tasks": 1, "components": alone.model.components * tasks}
        yield Cell(variant.label, schedule({**named, **together}, {"prior": "vamp", **given}))


def _joint_tasks(dataset: str, most: int, asked: Sequence[int] | None) -> list[int]:
    """Return the numbers of tasks to train `joint` on: those given, or the usual ones and the last."""
    possible = set(range(1, most + 1))
    if asked is None:
        return sorted(possible & {*(JOINT_FACES if dataset in FACES else JOINT_TASKS), most})
    for count in set(asked) - possible:
        raise InputError(f"{{joint_tasks}} has {count}, but this bench of {dataset} has {most} tasks; use 1 to {most}")
    return sorted(set(asked))


def schedule(named: Mapping[str, Any], common: Given) -> Settings:
    """Return the settings of a cell: the paper's preset; for `distill` what was tuned, or with own data the defaults.

    `common` applies to all cells; settings that a method does not read are left out.
    """
    preset: str | None = "paper"
    if "distill" in str(named["method"]).split("+"):
        preset = "tuned" if named["dataset"] in packaged_toml("boovae.config", "presets.toml")["tuned"] else None
    return resolve(named, preset=preset, common=common)
