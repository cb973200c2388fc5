"""A group of settings: a small frozen dataclass whose values are checked against their types and limits.

The core has four of them (`settings.py`); each method, inside the package or outside, declares its own beside its code.
Names are unique over all sections, so flags, TOML files and keywords can all refer to a setting by its name alone.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, get_type_hints

import msgspec
from msgspec import Meta, inspect

from boovae.errors import InputError, SettingError, unknown_name

AtLeastOne = Annotated[int, Meta(ge=1)]
WholeNumber = Annotated[int, Meta(ge=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class Section:
    """Settings that belong together; a value of the wrong type or outside its limits is refused.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class AnchorSettings(Section):
    ...     anchor_pull: NotNegative = 100.0
    >>> AnchorSettings(anchor_pull=3)
    AnchorSettings(anchor_pull=3.0)
    """

    #: Settings that the command line shows only with --help-all.
    advanced: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for item in fields(self):
            value = checked(item.name, getattr(self, item.name), hints(type(self))[item.name])
            object.__setattr__(self, item.name, value)


#: Returns the type of every setting of a section, with its limits.
hints: Callable[[type], dict[str, Any]] = functools.cache(functools.partial(get_type_hints, include_extras=True))


def checked(name: str, value: Any, hint: Any) -> Any:
    """Check a value and convert it to its type: TOML has lists for tuples, NumPy its own numbers."""
    value = plain(value)
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise InputError(f"{{{name}}} is too large; it must fit into 64 bits")
        if isinstance(item, float) and not math.isfinite(item):
            raise SettingError(name, value, "finite")
        if isinstance(item, str) and not item.isprintable():
            raise SettingError(name, value, "a name or path of printable characters")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        found = inspect.type_info(hint)
        if isinstance(found, inspect.LiteralType) and isinstance(value, str):
            raise unknown_name(f"value for {{{name}}}", value, map(str, found.values)) from None
        raise SettingError(name, value, wanted(found)) from None


def plain(value: Any) -> Any:
    """Convert NumPy's numbers and arrays, also those within a list, to Python's."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value


def wanted(found: inspect.Type) -> str:
    """Describe in words what a type accepts.

    >>> wanted(inspect.type_info(AtLeastOne)), wanted(inspect.type_info(Share))
    ('a whole number of at least 1', 'a number of at least 0 and under 1')
    >>> wanted(inspect.type_info(AtLeastOne | None))
    'a whole number of at least 1, or leave it out'
    """
    match found:
        case inspect.UnionType(types=types):
            return ", or ".join(wanted(each) for each in types)
        case inspect.NoneType():
            return "leave it out"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a whole number{_limits(found)}"
        case inspect.FloatType():
            return f"a number{_limits(found)}"
        case inspect.VarTupleType(item_type=item):
            return f"a list of values, each {wanted(item)}"
        case inspect.TupleType(item_types=items):
            return f"{len(items)} numbers"
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
    return "a text"


def _limits(found: inspect.IntType | inspect.FloatType) -> str:
    """Describe limits in words."""
    words = (("of at least", found.ge), ("above", found.gt), ("at most", found.le), ("under", found.lt))
    named = [f"{word} {limit:g}" for word, limit in words if limit is not None]
    return f" {' and '.join(named)}" if named else ""
