"""What a user can cause: every such error names the argument and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class BoovaeError(Exception):
    """Anything a user can cause; the command line prints it without a traceback."""


class InputError(BoovaeError, ValueError):
    """An argument, a file or data that cannot be used; found before any work is done."""


class RunError(BoovaeError, RuntimeError):
    """Work that had to stop: the message says what is safe on disk and how to go on."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name, with the nearest known one.

    >>> print(unknown_name("dataset", "mnits", ["mnist", "digits"]))
    unknown dataset 'mnits': did you mean 'mnist'? Known: digits, mnist
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f": did you mean '{near[0]}'? Known: " if near else ". Known: "
    return InputError(f"unknown {kind} '{name}'{hint}{', '.join(names)}")
