"""The registry of methods. A new method is one file and one line here, or `register` from anywhere else."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from boovae.config import Settings
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


def register(method: type[Method]) -> type[Method]:
    """Add a method from outside the package; also a class decorator."""
    if not method.name or "+" in method.name:
        raise InputError(f"{method.__name__}.name is {method.name!r}; it must be a name without '+'")
    METHODS[method.name] = method
    return method


def make_method(settings: Settings) -> Method:
    """Return the method that the settings name; `a+b` combines."""
    names, parts = settings.method.split("+"), _parts(settings.method)
    if len(set(names)) < len(names):
        raise InputError(f"--method {settings.method} names a method twice; name each once")
    for alone, reason in ALONE.items():
        if alone in names and len(names) > 1:
            raise InputError(f"--method {settings.method}: {alone} {reason}; use it alone")
    made = [part(settings) for part in parts]
    return made[0] if len(made) == 1 else Combination(settings, made)


def settings_read(settings: Settings) -> Settings:
    """Return the settings with those that the method never reads at their defaults.

    >>> settings_read(Settings(method="ewc", boo_steps=7)) == Settings(method="ewc")
    True
    """
    others = never_read(settings.method)
    defaults: dict[str, Any] = {field.name: field.default for field in fields(settings) if field.name in others}
    return replace(settings, **defaults)


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
    for name in method.split("+"):
        if name not in METHODS:
            raise unknown_name("method", name, METHODS)
    return [METHODS[name] for name in method.split("+")]


__all__ = ["METHODS", "Combination", "Method", "TaskImages", "make_method", "never_read", "register", "settings_read"]
