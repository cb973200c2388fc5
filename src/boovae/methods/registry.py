"""The registry of methods. A new method is one file and one line here, or `register` from anywhere else.

`BOOVAE_METHODS` names Python files outside the package whose methods every command knows, the workers of a bench too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from boovae.config import Settings, own_strengths, strength_texts
from boovae.errors import InputError, unknown_name
from boovae.methods.base import Combination, Method, TaskImages
from boovae.methods.boo import Boo
from boovae.methods.boo_flow import BooFlow
from boovae.methods.coreset import Coreset
from boovae.methods.distill import Distill
from boovae.methods.ewc import EWC
from boovae.methods.joint import Joint
from boovae.methods.mog import MoG
from boovae.methods.multihead import Multihead
from boovae.methods.replay import Replay
from boovae.methods.scratch import Scratch
from boovae.methods.si import SI
from boovae.methods.standard import Standard
from boovae.methods.vcl import VCL

ALL: tuple[type[Method], ...] = (
    Standard,
    Joint,
    Boo,
    BooFlow,
    Distill,
    MoG,
    Multihead,
    Coreset,
    Replay,
    Scratch,
    EWC,
    SI,
    VCL,
)
#: Methods that cannot be combined, and why.
ALONE = {
    "joint": "keeps everything, there is nothing to protect",
    "scratch": "starts afresh at every task, there is nothing to protect",
}
METHODS: dict[str, type[Method]] = {method.name: method for method in ALL}
#: The variable that names files with more of them, separated as in PATH, and those that were run.
OUTSIDE = "BOOVAE_METHODS"
_run: set[str] = set()


def register(method: type[Method]) -> type[Method]:
    """Add a method from outside the package; also a class decorator."""
    if not re.fullmatch(r"[\w-]+", method.name):
        raise InputError(f"{method.__name__}.name is {method.name!r}; use letters, digits, '_' and '-'")
    if any(known.name == method.name and known is not method for known in ALL):
        raise InputError(f"{method.__name__}.name is {method.name!r}, which boovae has itself; choose another name")
    if method.memory is not Method.memory and method.load_memory is Method.load_memory:
        raise InputError(f"{method.__name__} has memory but no load_memory, so no run of it could be continued; add it")
    _check_strengths(method)
    METHODS[method.name] = method
    return method


def _check_strengths(method: type[Method]) -> None:
    """Refuse numbers of a method's own that could not be told from other settings."""
    if not isinstance(method.strengths, Mapping):
        raise InputError(f"{method.__name__}.strengths is {method.strengths!r}; use a dictionary, name to number")
    taken = {field.name: "a setting of boovae" for field in fields(Settings)}
    taken |= {name: f"a strength of {other.name}" for other in METHODS.values() for name in other.strengths}
    for name in METHODS[method.name].strengths if method.name in METHODS else ():
        del taken[name]  # the same file once more
    for name, value in method.strengths.items():
        if not name.isidentifier() or name in taken:
            why = taken.get(name, "no name that Python could give")
            raise InputError(f"{method.__name__}.strengths has {name!r}, {why}; choose another name")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InputError(f"{method.__name__}.strengths: {name} is {value!r}; it must be a number")


def strengths_of(method: str) -> dict[str, float]:
    """Return the numbers that a method or combination has of its own, and their defaults."""
    return {name: float(value) for part in _parts(method) for name, value in part.strengths.items()}


def is_method(name: str) -> bool:
    """Whether this is the name of a method, or of a combination of methods."""
    import_outside()
    return all(part in METHODS for part in name.split("+"))


def outside_digest(method: str) -> str:
    """Return what stands for the files that a method or combination comes from; empty if the package has it all."""
    own = Path(__file__).parents[1]
    files = {getattr(sys.modules.get(part.__module__), "__file__", None) for part in _parts(method)}
    outside = [path for path in map(Path, sorted(filter(None, files))) if own not in path.parents]
    return hashlib.sha256(b"".join(path.read_bytes() for path in outside)).hexdigest()[:6] if outside else ""


def make_method(settings: Settings) -> Method:
    """Return the method that the settings name; `a+b` combines."""
    names, parts = settings.method.split("+"), _parts(settings.method)
    if len(set(names)) < len(names):
        raise InputError(f"--method {settings.method} names a method twice; name each once")
    for alone, reason in ALONE.items():
        if alone in names and len(names) > 1:
            raise InputError(f"--method {settings.method}: {alone} {reason}; use it alone")
    known = strengths_of(settings.method)
    for name in own_strengths(settings.strengths):
        if name not in known:
            raise unknown_name(f"strength of {settings.method} (--strengths)", name, known or ["none"])
    made = [part(settings) for part in parts]
    return made[0] if len(made) == 1 else Combination(settings, made)


def settings_read(settings: Settings) -> Settings:
    """Return the settings with those that the method never reads, and strengths that are as in its file, left out.

    >>> settings_read(Settings(method="ewc", boo_steps=7)) == Settings(method="ewc")
    True
    """
    others = never_read(settings.method)
    defaults: dict[str, Any] = {field.name: field.default for field in fields(settings) if field.name in others}
    usual, given = strengths_of(settings.method), own_strengths(settings.strengths)
    changed = {name: value for name, value in given.items() if usual.get(name) != value}
    return replace(settings, **defaults, strengths=strength_texts(changed))


def never_read(method: str) -> frozenset[str]:
    """Return the settings of other methods, which this one (or combination) never reads."""
    parts = _parts(method)
    if any(part.reads is None for part in parts):
        return frozenset()
    read = tuple(name for part in parts for name in part.reads or ())
    of_methods = tuple(name for known in METHODS.values() for name in known.reads or ())
    names = (field.name for field in fields(Settings))
    return frozenset(name for name in names if name.startswith(of_methods) and not name.startswith(read))


def _parts(method: str) -> list[type[Method]]:
    import_outside()
    for name in method.split("+"):
        if name not in METHODS:
            raise InputError(
                f"{unknown_name('method', name, METHODS)}\nOne of your own is known once {OUTSIDE} names its file."
            )
    return [METHODS[name] for name in method.split("+")]


def import_outside() -> None:
    """Run the files that `BOOVAE_METHODS` names, each once; an error in one of them is its author's to see, as it is.

    They are run when a method is asked for, not when this module is imported: they may import all of the package.
    """
    for place, name in enumerate(filter(None, os.environ.get(OUTSIDE, "").split(os.pathsep))):
        if name in _run:
            continue
        path, before = Path(name).expanduser(), dict(METHODS)
        spec = importlib.util.spec_from_file_location(f"boovae_outside_{place}", path) if path.is_file() else None
        if spec is None or spec.loader is None:
            raise InputError(f"{OUTSIDE} names {name}: no such Python file")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        _run.add(name)  # before it runs: it may make a method itself
        spec.loader.exec_module(module)
        for twice in (known for known in before if METHODS[known] is not before[known]):
            raise InputError(f"{OUTSIDE} names {name}, which has a method '{twice}' as another file does; rename one")
        if before == METHODS:
            raise InputError(f"{OUTSIDE} names {name}, which registers no method: decorate its class with @register")


__all__ = [
    "METHODS",
    "Combination",
    "Method",
    "TaskImages",
    "import_outside",
    "make_method",
    "never_read",
    "register",
    "settings_read",
    "strengths_of",
]
