"""Errors that a user can cause: each names the argument, its value and the remedy.

A text names settings and arguments in braces, `{batch_size}` or `{normalisation=group}`. They are spelled where the
error is shown: in Python as `batch_size` and `normalisation='group'`, on the command line as `--batch-size` and
`--normalisation group`.
"""

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

_ARGUMENT = re.compile(r"\{([a-z]\w*)(?:=([^{}]*))?\}")


class BoovaeError(Exception):
    """Base class of errors that a user can cause; the command line prints them without a traceback."""

    def __init__(self, text: str) -> None:
        #: The text with its arguments in braces, for use inside another error.
        self.text = text
        super().__init__(self.spelled(as_argument))

    def spelled(self, spell: Callable[[str, str | None], str]) -> str:
        """Return the text with every named argument replaced by `spell(name, value)`; the value may be None."""
        return _ARGUMENT.sub(lambda match: spell(match[1], match[2]), self.text)


class InputError(BoovaeError, ValueError):
    """An argument, a file or data that cannot be used; raised before any work is done."""


class SettingError(InputError):
    """A setting with an invalid value."""

    def __init__(self, setting: str, value: object, wanted: str) -> None:
        super().__init__(f"{{{setting}}} is {value!r}; it must be {wanted}")


class RunError(BoovaeError, RuntimeError):
    """Work that had to stop; the message says what is safe on disk and how to continue."""


def as_argument(name: str, value: str | None = None) -> str:
    """Spell an argument in Python.

    >>> as_argument("batch_size"), as_argument("kl_warmup", "20"), as_argument("normalisation", "group")
    ('batch_size', 'kl_warmup=20', "normalisation='group'")
    """
    if value is None:
        return name
    literal = value in ("True", "False", "None") or re.fullmatch(r"-?[\d.]+(e-?\d+)?", value)
    return f"{name}={value if literal else repr(value)}"


def as_flag(name: str, value: str | None = None) -> str:
    """Spell an argument on the command line.

    >>> as_flag("batch_size"), as_flag("kl_warmup", "20"), as_flag("mirror", "True"), as_flag("mirror", "False")
    ('--batch-size', '--kl-warmup 20', '--mirror', '--no-mirror')
    """
    flag = name.replace("_", "-")
    if value in ("True", "False"):
        return f"--{flag}" if value == "True" else f"--no-{flag}"
    return f"--{flag}" if value is None else f"--{flag} {value}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name; it suggests the nearest known one.

    >>> print(unknown_name("dataset", "mnits", ["mnist", "digits"]))
    unknown dataset 'mnits': did you mean 'mnist'? Known: digits, mnist
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f": did you mean '{near[0]}'? Known: " if near else ". Known: "
    return InputError(f"unknown {kind} '{name}'{hint}{', '.join(names)}")
