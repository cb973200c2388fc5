"""Structs read from the JSON of a log or record: types by msgspec, shapes of arrays by their axes, nothing trusted."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from boovae.errors import InputError

Floats = npt.NDArray[np.float64]
Record = TypeVar("Record", bound=msgspec.Struct)

#: A larger task number is a broken file, and would ask for a huge table.
MOST_TASKS = 10_000
#: What stands in for an array that is missing, until its shape is known.
MISSING: Floats = np.empty(0)
#: What to do about a log that cannot be read.
REMEDY = "restore the file, or resume the run to write it again"
#: What a value must be, by msgspec's name of its type.
WANTED = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def absent() -> Any:
    """Return the default of an array that a log may lack."""
    return msgspec.field(default_factory=lambda: MISSING)


def axes(*names: str) -> msgspec.Meta:
    """Return what an array's annotation says of its shape: axes named here, sizes known when it is read."""
    schema: dict[str, Any] = {"type": ["number", "null"]}
    for _ in names:
        schema = {"type": "array", "items": schema}
    said = " x ".join(names) or "a number"
    return msgspec.Meta(extra={"axes": names}, extra_json_schema={**schema, "description": said})


PerReplica = Annotated[Floats, axes("replicas")]
PerTask = Annotated[Floats, axes("seen", "replicas")]
TaskIndex = Annotated[int, msgspec.Meta(ge=0, lt=MOST_TASKS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def decode(
    data: Any, kind: type[Record], where: str, sizes: Callable[[Record], Mapping[str, int]], remedy: str = REMEDY
) -> Record:
    """Return JSON's values as a struct; what does not fit is an InputError that names the place, the key and a remedy.

    `sizes` returns the length of every axis. Numbers that are missing, null or infinite become NaN.
    """
    try:
        found = msgspec.convert(data, kind, dec_hook=_array)
        return fitted(found, sizes(found))
    except ValueError as error:  # msgspec's own are of this kind
        raise InputError(f"{where}: {_said(str(error))}; {remedy}") from error


def encode(record: msgspec.Struct) -> dict[str, Any]:
    """Return a struct as JSON has it, null where a number is not finite."""
    found: dict[str, Any] = msgspec.to_builtins(record, enc_hook=_listed)
    return found


def fitted(record: Record, sizes: Mapping[str, int], path: str = "") -> Record:
    """Return the struct with arrays of the right shape: a wrong one is refused, a missing one is NaN everywhere."""
    changes: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value, place = getattr(record, name), f"{path}{name}"
        if isinstance(value, msgspec.Struct):
            changes[name] = fitted(value, sizes, f"{place}.")
        elif isinstance(value, dict):
            changes[name] = {key: _inner(part, sizes, f"{place}.{key}.") for key, part in value.items()}
        elif isinstance(value, list):
            changes[name] = [_inner(part, sizes, f"{place}[{at}].") for at, part in enumerate(value)]
        elif isinstance(value, np.ndarray):
            changes[name] = _shaped(value, [sizes.get(axis, -1) for axis in _arrays(type(record))[name]], place)
    return msgspec.structs.replace(record, **changes)


def _inner(part: Any, sizes: Mapping[str, int], path: str) -> Any:
    return fitted(part, sizes, path) if isinstance(part, msgspec.Struct) else part


def _shaped(value: Floats, sizes: Sequence[int], place: str) -> Floats:
    """Return an array whose axes have these lengths, where they are known (not −1)."""
    if value is MISSING:
        return np.full([max(size, 0) for size in sizes], np.nan)
    wanted = tuple(found if size < 0 else size for found, size in zip(value.shape, sizes, strict=False))
    if value.ndim != len(sizes) or value.shape != wanted:
        raise ValueError(f"'{place}' has shape {value.shape}, expected {wanted or tuple(sizes)}")
    return value


@functools.cache
def _arrays(kind: type[msgspec.Struct]) -> dict[str, tuple[str, ...]]:
    """Return the axes of every array of a struct."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for part in (hint, *get_args(hint)):
            for meta in getattr(part, "__metadata__", ()):
                if isinstance(meta, msgspec.Meta) and meta.extra and "axes" in meta.extra:
                    found[name] = tuple(meta.extra["axes"])
    return found


def _array(kind: Any, raw: Any) -> Floats:
    """Return numbers as an array; a row that is null is one of nulls."""
    if isinstance(raw, list) and None in raw and any(isinstance(row, list) for row in raw):
        width = max(len(row) for row in raw if isinstance(row, list))
        raw = [[None] * width if row is None else row for row in raw]
    try:
        array = np.array(raw, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("is not a list of numbers") from None
    return np.where(np.isfinite(array), array, np.nan)


def _listed(array: Any) -> Any:
    """Return an array as JSON has it."""
    if array.ndim:
        return [_listed(row) for row in array]
    return float(array) if math.isfinite(array) else None


def rounded(values: Any) -> Floats:
    """Return numbers, also of a tensor, to the eight digits that a log has; NaN where one is not finite."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype=np.float64)
    flat = [float(f"{value:.8g}") if math.isfinite(value) else math.nan for value in array.ravel().tolist()]
    return np.array(flat, dtype=np.float64).reshape(array.shape)


def _said(problem: str) -> str:
    """Say in our words what msgspec or a shape has found."""
    text, _, place = problem.partition(" - at `")
    path = place.rstrip("`").removeprefix("key in ").removeprefix("$").removeprefix(".")
    if missing := re.search(r"missing required field `(\w+)`", text):
        return f"'{'.'.join(filter(None, (path, missing[1])))}' is missing"
    wanted = re.match(r"Expected `(\w+)( \| null)?`(.*)", text)
    if wanted and wanted[1] in WANTED:
        rest = wanted[3].replace("`", "")
        return f"{path and repr(path)} must be {WANTED[wanted[1]]}{rest}".lstrip()
    return f"'{path}' {text}" if path else text
