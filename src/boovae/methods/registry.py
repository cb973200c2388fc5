"""Methods by name. To add one, write a file and add a line here, or call `register` from elsewhere.

`BOOVAE_METHODS` names Python files outside the package whose methods all commands and bench workers can use.
"""

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from boovae.config import CORE_NAMES, Section, Settings
from boovae.config import resolve as config_resolve
from boovae.errors import InputError, unknown_name
from boovae.methods.boo import Boo
from boovae.methods.boo_flow import BooFlow
from boovae.methods.coreset import Coreset
from boovae.methods.distill import Distill
from boovae.methods.ewc import EWC
from boovae.methods.joint import Joint
from boovae.methods.method import Method
from boovae.methods.method_list import MethodList
from boovae.methods.mog import MoG
from boovae.methods.multihead import Multihead
from boovae.methods.replay import Replay
from boovae.methods.scratch import Scratch
from boovae.methods.si import SI
from boovae.methods.standard import Standard
from boovae.methods.vcl import VCL

ALL = (Standard, Joint, Boo, BooFlow, Distill, MoG, Multihead, Coreset, Replay, Scratch, EWC, SI, VCL)
#: Methods that cannot be combined, and why.
ALONE = {"joint": "keeps everything", "scratch": "starts again at every task"}
Values = Mapping[str, Any]
METHODS: dict[str, type[Method]] = {method.name: method for method in ALL}
#: The variable that names files with further methods, separated as in PATH, and the files already run.
OUTSIDE = "BOOVAE_METHODS"
_run: set[str] = set()
#: The names that those files registered: methods, and extensions of later packages.
from_outside: list[str] = []


def register(method: type[Method]) -> type[Method]:
    """Add a method from outside the package; also a class decorator."""
    if not re.fullmatch(r"[\w-]+", method.name):
        raise InputError(f"{method.__name__}.name is {method.name!r}; use letters, digits, '_' and '-'")
    if any(known.name == method.name and known is not method for known in ALL):
        raise InputError(f"{method.__name__}.name is {method.name!r}, which is built into boovae; choose another name")
    for name in ("memory", "state"):
        if hasattr(method, name):
            raise InputError(f"{method.__name__}.{name} would be replaced; fill the dictionary self.{name}")
    _check_sections(method)
    _check_search(method)
    METHODS[method.name] = method
    from_outside.append(method.name)
    return method


def _check_sections(method: type[Method]) -> None:
    """Refuse settings whose names are taken."""
    taken = dict.fromkeys(CORE_NAMES, "a setting of boovae")
    for other in METHODS.values():
        if other.name != method.name:  # the same file may be read twice
            taken |= dict.fromkeys(_names(other.sections), f"a setting of {other.name}")
    shared = {kind for known in ALL for kind in known.sections}
    for kind in method.sections:
        if not (isinstance(kind, type) and issubclass(kind, Section) and is_dataclass(kind)):
            raise InputError(f"{method.__name__}.sections has {kind!r}; use frozen dataclasses derived from Section")
        for name in taken.keys() & _names([kind]) if kind not in shared else ():
            raise InputError(f"{kind.__name__} has '{name}', {taken[name]}; choose another name")
        kind()  # checks its defaults


def _check_search(method: type[Method]) -> None:
    """Refuse values for `tune` that do not belong to a setting."""
    sections = {name: kind for kind in method.sections for name in _names([kind])}
    for name, values in method.search.items():
        if name not in sections:
            raise unknown_name(f"setting in {method.__name__}.search", name, sections or ["none"])
        for value in values:
            sections[name](**{name: float(value)})  # checks the value


def _names(sections: Iterable[type[Section]]) -> list[str]:
    """Return the settings of some sections, in order."""
    return [item.name for kind in sections for item in fields(kind)]


class _Registry:
    """The information on methods that `config` needs."""

    def sections(self, method: str) -> Sequence[type[Section]]:
        """Return the sections that a method or combination reads, each once."""
        return list(dict.fromkeys(kind for part in parts_of(method) for kind in part.sections))

    def owners(self) -> Mapping[str, str]:
        """Return the name of a method for each setting that any method reads."""
        import_outside()
        reverse = reversed(METHODS.items())  # of several methods the first one counts
        return {setting: name for name, known in reverse for setting in _names(known.sections)}

    def unchosen(self, method: str) -> Set[str]:
        """Return the settings that keep their defaults with a method, whatever suits the data."""
        return frozenset[str]().union(*(part.unchosen for part in parts_of(method)))

    def all_sections(self) -> list[type[Section]]:
        """Return the sections of all methods, each once."""
        import_outside()
        return list(dict.fromkeys(kind for known in METHODS.values() for kind in known.sections))


REGISTRY = _Registry()


def resolve(
    given: Values, file: Path | None = None, preset: str | None = None, *, common: Values | None = None
) -> Settings:
    """Return the settings from the user's values, a TOML file, a preset, tuned strengths and the defaults.

    `common` holds settings of several methods; those that the method does not read are dropped.

    >>> settings = resolve({"dataset": "mnist", "epochs": 3})
    >>> settings.training.epochs, "epochs" in settings.chosen, "net" in settings.chosen
    (3, False, True)
    >>> resolve({"dataset": "mnist"}, preset="paper").training.schedule
    'plateau'
    """
    return config_resolve.resolve(given, file, preset, parts=REGISTRY, common=common)


def from_mapping(values: Values) -> Settings:
    """Return the settings of a mapping; those of other methods are dropped."""
    return config_resolve.from_mapping(values, parts=REGISTRY)


def is_method(name: str) -> bool:
    """Return whether this is the name of a method or of a combination of methods."""
    import_outside()
    return all(part in METHODS for part in name.split("+"))


def outside_digest(method: str) -> str:
    """Return a digest of the outside files that define a method or combination; empty if there are none."""
    own = Path(__file__).parents[1]
    files = {getattr(sys.modules.get(part.__module__), "__file__", None) for part in parts_of(method)}
    outside = [path for path in map(Path, sorted(filter(None, files))) if own not in path.parents]
    return hashlib.sha256(b"".join(path.read_bytes() for path in outside)).hexdigest()[:6] if outside else ""


def make_method(settings: Settings) -> MethodList:
    """Return the methods that the settings name; `a+b` combines two."""
    names, parts = settings.method.split("+"), parts_of(settings.method)
    if len(set(names)) < len(names):
        raise InputError(f"{{method={settings.method}}} names a method twice; name each once")
    for alone, reason in ALONE.items():
        if alone in names and len(names) > 1:
            problem = f"{alone} {reason}, so there is nothing to protect"
            raise InputError(f"{{method={settings.method}}}: {problem}; use it alone")
    known = _names(REGISTRY.sections(settings.method))
    for name, _ in settings.own:
        if name not in known:
            raise unknown_name(f"setting of {settings.method}", name, known or ["none"])
    return MethodList(settings, [part(settings) for part in parts])


def parts_of(method: str) -> list[type[Method]]:
    """Return the classes of a method, one for each part of a combination."""
    import_outside()
    for name in method.split("+"):
        if name not in METHODS:
            unknown = unknown_name("method", name, METHODS).text
            raise InputError(f"{unknown}\nTo use a method from your own file, name the file in {OUTSIDE}.")
    return [METHODS[name] for name in method.split("+")]


def import_outside() -> None:
    """Run the files that `BOOVAE_METHODS` names, each once; their errors are raised unchanged, for their author.

    They run when a method is needed, not when this module is imported, because they may import the whole package.
    """
    for place, name in enumerate(filter(None, os.environ.get(OUTSIDE, "").split(os.pathsep))):
        if name in _run:
            continue
        path, before, count = Path(name).expanduser(), dict(METHODS), len(from_outside)
        spec = importlib.util.spec_from_file_location(f"boovae_outside_{place}", path) if path.is_file() else None
        if spec is None or spec.loader is None:
            raise InputError(f"{OUTSIDE} names {name}: no such Python file")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        _run.add(name)  # before it runs: it may make a method itself
        spec.loader.exec_module(module)
        for twice in (known for known in before if METHODS[known] is not before[known]):
            raise InputError(f"{OUTSIDE} names {name}, which defines '{twice}', as another file does; rename one")
        if len(from_outside) == count:
            raise InputError(f"{OUTSIDE} names {name}, which registers no method: decorate its class with @register")
