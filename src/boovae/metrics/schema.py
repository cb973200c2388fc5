"""Reading and writing structs as JSON of a log or record: msgspec checks types, this file the shapes of arrays."""

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

#: A larger task number means a broken file and would need a huge table.
MOST_TASKS = 10_000
#: Placeholder of a missing array until its shape is known.
MISSING: Floats = np.empty(0)
#: The remedy for a log that cannot be read.
REMEDY = "restore the file, or resume the run to write it again"
#: The kind of value that is wanted, by msgspec's name of the type.
WANTED = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def absent() -> Any:
    """Return the default of an array that may be missing from a log."""
    return msgspec.field(default_factory=lambda: MISSING)


def axes(*names: str) -> msgspec.Meta:
    """Annotate an array with the names of its axes, whose sizes are known when it is read."""
    schema: dict[str, Any] = {"type": ["number", "null"]}
    for _ in names:
        schema = {"type": "array", "items": schema}
    described = " x ".join(names) or "a number"
    return msgspec.Meta(extra={"axes": names}, extra_json_schema={**schema, "description": described})


PerReplica = Annotated[Floats, axes("replicas")]
PerTask = Annotated[Floats, axes("seen", "replicas")]
TaskIndex = Annotated[int, msgspec.Meta(ge=0, lt=MOST_TASKS)]
TaskCount = Annotated[int, msgspec.Meta(ge=1, le=MOST_TASKS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def decode(
    data: Any, kind: type[Record], where: str, sizes: Callable[[Record], Mapping[str, int]], remedy: str = REMEDY
) -> Record:
    """Return values of JSON as a struct; the InputError for a misfit names the place, the key and a remedy.

    `sizes` returns the length of every axis. Numbers that are missing, null or infinite become NaN.
    """
    try:
        found = msgspec.convert(data, kind, dec_hook=_to_array)
        return _with_shapes(found, sizes(found))
    except ValueError as error:  # including msgspec's ValidationError
        raise InputError(f"{where}: {_explained(str(error))}; {remedy}") from error


def to_json(record: msgspec.Struct) -> dict[str, Any]:
    """Return a struct as values of JSON, null for numbers that are not finite."""
    found: dict[str, Any] = msgspec.to_builtins(record, enc_hook=_nested_list)
    return found


def _with_shapes(record: Record, sizes: Mapping[str, int], path: str = "") -> Record:
    """Return the struct after checking the shape of every array; missing arrays are filled with NaN."""
    arrays, changes = _axes_of_arrays(type(record)), {}
    for name in record.__struct_fields__:
        value, place = getattr(record, name), f"{path}{name}"
        axes_here = arrays.get(name)
        found = _inner(value, sizes, place) if axes_here is None else _with_shape(value, axes_here, sizes, place)
        if found is not value:
            changes[name] = found
    return msgspec.structs.replace(record, **changes) if changes else record


def _inner(value: Any, sizes: Mapping[str, int], path: str) -> Any:
    """Apply `_with_shapes` to a struct, or to the structs in a dict or list."""
    if isinstance(value, msgspec.Struct):
        return _with_shapes(value, sizes, f"{path}.")
    if isinstance(value, dict) and any(isinstance(part, msgspec.Struct) for part in value.values()):
        return {key: _with_shapes(part, sizes, f"{path}.{key}.") for key, part in value.items()}
    if isinstance(value, list) and any(isinstance(part, msgspec.Struct) for part in value):
        return [_with_shapes(part, sizes, f"{path}[{at}].") for at, part in enumerate(value)]
    return value


def _with_shape(value: Floats | None, names: Sequence[str], sizes: Mapping[str, int], path: str) -> Floats | None:
    """Return an array after checking its shape; an axis of unknown size may have any."""
    shape = [sizes.get(axis, -1) for axis in names]
    if value is MISSING:
        return np.full([max(size, 0) for size in shape], np.nan)
    if value is not None:
        expected = tuple(found if size < 0 else size for found, size in zip(value.shape, shape, strict=False))
        if value.ndim != len(shape) or value.shape != expected:
            raise ValueError(f"'{path}' has shape {value.shape}, expected {expected}")
    return value


@functools.cache
def _axes_of_arrays(kind: type[msgspec.Struct]) -> dict[str, tuple[str, ...]]:
    """Return the names of the axes of every array field of a struct."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for part in (hint, *get_args(hint)):
            for meta in getattr(part, "__metadata__", ()):
                if isinstance(meta, msgspec.Meta) and meta.extra and "axes" in meta.extra:
                    found[name] = tuple(meta.extra["axes"])
    return found


def _to_array(kind: Any, raw: Any) -> Floats:
    """Return numbers as an array; a null row becomes a row of NaN."""
    if isinstance(raw, list) and None in raw and any(isinstance(row, list) for row in raw):
        width = max(len(row) for row in raw if isinstance(row, list))
        raw = [[None] * width if row is None else row for row in raw]
    try:
        array = np.array(raw, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("is not a list of numbers") from None
    return np.where(np.isfinite(array), array, np.nan)


def _nested_list(array: Any) -> Any:
    """Return an array as nested lists, None for numbers that are not finite."""
    if array.ndim:
        return [_nested_list(row) for row in array]
    return float(array) if math.isfinite(array) else None


def rounded(values: Any) -> Floats:
    """Round numbers of an array or tensor to the eight digits of a log; those that are not finite become NaN."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype=np.float64)
    flat = [float(f"{value:.8g}") if math.isfinite(value) else math.nan for value in array.ravel().tolist()]
    return np.array(flat, dtype=np.float64).reshape(array.shape)


def _explained(problem: str) -> str:
    """Reword a complaint of msgspec or of the check of shapes."""
    text, _, place = problem.partition(" - at `")
    path = place.rstrip("`").removeprefix("key in ").removeprefix("$").removeprefix(".")
    if missing := re.search(r"missing required field `(\w+)`", text):
        return f"'{'.'.join(filter(None, (path, missing[1])))}' is missing"
    wanted = re.match(r"Expected `(\w+)( \| null)?`(.*)", text)
    if wanted and wanted[1] in WANTED:
        rest = wanted[3].replace("`", "")
        return f"{path and repr(path)} must be {WANTED[wanted[1]]}{rest}".lstrip()
    return f"'{path}' {text}" if path else text
