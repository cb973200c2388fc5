"""Precedence of settings: a flag, then the file, the preset, the strengths that `boovae tune` chose for the dataset,
and the default; where nobody gave a value, some are chosen from the data instead (`choose.py`).
"""

import functools
import tomllib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from boovae.config.choose import CHOOSABLE
from boovae.config.section import Section, checked
from boovae.config.settings import CORE, CORE_NAMES, Settings
from boovae.errors import InputError, SettingError, unknown_name
from boovae.files import TEXT_BYTES, read_file


class Parts(Protocol):
    """The settings that methods declare: the registry of methods, passed in because this room must not import it."""

    def sections(self, method: str) -> Sequence[type[Section]]:
        """Return the sections that a method, or a combination `a+b`, reads."""

    def owners(self) -> Mapping[str, str]:
        """Return the name of a method for each setting that any method reads."""

    def unchosen(self, method: str) -> Set[str]:
        """Return the settings that keep their defaults with a method, whatever suits the data."""


def resolve(
    given: Mapping[str, Any],
    file: Path | None = None,
    preset: str | None = None,
    *,
    parts: Parts,
    common: Mapping[str, Any] | None = None,
) -> Settings:
    """Combine explicit settings, a TOML file, a preset, tuned strengths and the defaults.

    Without a preset, settings that nobody gave are left to the chooser (`Settings.chosen`). `common` may hold settings
    of several methods, like a file: those that the method does not read are left out; in `given` they are refused.
    """
    named = {name: value for name, value in given.items() if value is not None}
    shared = {**(read_settings(file) if file else {}), **(common or {})}
    dataset, method = (
        checked(name, named.get(name, shared.get(name, usual)), str)
        for name, usual in (("dataset", Settings().data.dataset), ("method", Settings.method))
    )
    refuse_foreign(named, method, parts)
    values = {**strengths(dataset, method), **preset_values(preset, dataset, method), **shared, **named}
    settings = from_mapping(values, parts=parts)
    if preset is not None:
        return settings
    read = CORE_NAMES.union(item.name for kind in parts.sections(method) for item in fields(kind))
    taken = values.keys() | parts.unchosen(method)
    return replace(settings, chosen=tuple(name for name in CHOOSABLE if name in read and name not in taken))


def from_mapping(values: Mapping[str, Any], *, parts: Parts) -> Settings:
    """Make settings from a mapping, flat or with a table per section; settings of other methods are left out.

    >>> from boovae.methods import REGISTRY
    >>> from_mapping({"method": "ewc", "training": {"epochs": 3}, "boo_steps": 7}, parts=REGISTRY).own
    ()
    """
    flat = {name: value for name, value in flattened(values).items() if value is not None}
    chosen = checked("chosen", flat.pop("chosen", ()), tuple[str, ...])
    settings = replace(Settings(), chosen=tuple(name for name in CHOOSABLE if name in chosen))
    settings = settings.changed(**{name: flat[name] for name in CORE_NAMES & flat.keys()})
    own: dict[str, Any] = {}
    for kind in parts.sections(settings.method):
        given = {item.name: flat[item.name] for item in fields(kind) if item.name in flat}
        section, usual = kind(**given), kind()
        own |= {name: value for name in given if (value := getattr(section, name)) != getattr(usual, name)}
    for name in flat.keys() - CORE_NAMES - parts.owners().keys():
        raise unknown_name("setting", name, CORE_NAMES | parts.owners().keys())
    return settings.changed(**own)


def refuse_foreign(named: Iterable[str], method: str, parts: Parts) -> None:
    """Refuse settings that the method does not read, because naming one would have no effect."""
    owners = parts.owners()
    read = {item.name for kind in parts.sections(method) for item in fields(kind)}
    for name in named:
        if name in owners and name not in read:
            raise InputError(
                f"{{{name}}} is a setting of method '{owners[name]}', and '{method}' does not read it; leave it out"
            )


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten sections into settings by name; also `strengths`, the NAME=VALUE list that version 0.1.0 wrote."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and name in (*CORE, "method_settings"):
            flat |= value
        elif name == "strengths":
            flat |= _numbers(value)
        else:
            flat[str(name)] = value
    return flat


def _numbers(texts: Any) -> dict[str, float]:
    """Parse texts of the form NAME=VALUE."""
    try:
        return {name: float(value) for name, _, value in (text.partition("=") for text in texts)}
    except (AttributeError, TypeError, ValueError):
        raise SettingError("strengths", texts, "a list of texts, each NAME=NUMBER") from None


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings in a TOML file, by name; those that were chosen for another run count as given."""
    return {name: value for name, value in flattened(read_toml(path)).items() if name != "chosen"}


def read_toml(path: Path, argument: str = "config") -> dict[str, Any]:
    """Read a TOML file that was given as `argument`."""
    try:
        return tomllib.loads(read_file(path, TEXT_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"no such configuration file: {path} ({{{argument}}})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the configuration {path} ({{{argument}}}): {error}") from error


# --- what is packaged for a dataset ---------------------------------------------------------------------------------


@functools.cache
def packaged_toml(room: str, name: str) -> dict[str, Any]:
    """Read a TOML file that is packaged with a room."""
    return tomllib.loads(resources.files(room).joinpath(name).read_text(encoding="utf-8"))


def strengths(dataset: str, method: str) -> dict[str, Any]:
    """Return the strengths chosen on validation data for a method, or for the parts of a combination."""
    sections = packaged_toml("boovae.config", "strengths.toml").get(dataset, {})
    found: dict[str, Any] = {}
    for name in (*method.split("+"), method):
        found |= sections.get(name, {})
    return found


def preset_values(name: str | None, dataset: str, method: str) -> dict[str, Any]:
    """Return what a preset sets for every dataset, for this one (`own_data` stands for others), and for the method."""
    if name is None:
        return {}
    presets = packaged_toml("boovae.config", "presets.toml")
    if name not in presets:
        raise unknown_name("preset ({preset})", name, presets)
    section = presets[name].get(dataset, presets[name].get("own_data"))
    if section is None:
        known = ", ".join(key for key, value in presets[name].items() if isinstance(value, dict))
        raise InputError(f"{{preset={name}}} is for {known}, not for {dataset}; leave it out")
    layers = (presets[name], section, section.get(method, {}))
    return {key: value for layer in layers for key, value in layer.items() if not isinstance(value, dict)}
