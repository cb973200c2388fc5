"""The command line: parses words into a command with arguments and settings, turns errors into exit codes."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

import boovae
from boovae.cli import arguments as kinds
from boovae.cli import commands
from boovae.config import CORE, CORE_NAMES, Section, Settings
from boovae.config.choose import CHOOSABLE
from boovae.config.resolve import preset_values, read_settings, refuse_foreign
from boovae.config.section import hints
from boovae.errors import BoovaeError, InputError, RunError, as_flag, unknown_name


@dataclass(frozen=True)
class Verb:
    """A command: its arguments, and its function, which also takes the settings of a run if it is `Configured`."""

    kind: Any
    run: Callable[..., None]


VERBS: dict[str, Verb] = {
    "train": Verb(kinds.Train, commands.train),
    "extend": Verb(kinds.Extend, commands.extend),
    "tune": Verb(kinds.Tune, commands.tune),
    "eval": Verb(kinds.Eval, commands.measure),
    "sample": Verb(kinds.Sample, commands.sample),
    "inspect": Verb(kinds.Inspect, commands.inspect),
    "export": Verb(kinds.Export, commands.export),
    "toy": Verb(kinds.Toy, commands.toy),
    "latent-map": Verb(kinds.LatentMap, commands.latent_map),
    "replay": Verb(kinds.Replay, commands.replay),
    "report": Verb(kinds.Report, commands.report),
    "bench": Verb(kinds.Bench, commands.bench),
    "serve": Verb(kinds.Serve, commands.serve),
    "datasets": Verb(kinds.Datasets, commands.datasets),
    "methods": Verb(kinds.Methods, commands.methods),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `boovae`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: boovae COMMAND [--help] ...\n\n{boovae.__doc__}\n\ncommands:")
        for name, verb in VERBS.items():
            print(f"  {name:10} {verb.kind.__doc__}")
        return
    try:
        if words[0] == "--version":
            print(boovae.__version__)
            return
        if words[0] not in VERBS:
            raise unknown_name("command", words[0], VERBS)
        VERBS[words[0]].run(*parsed(words[0], words[1:]))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe; discard what Python still buffers
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except BoovaeError as error:
        print(f"boovae: {error.spelled(as_flag)}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RunError) else 2) from None
    except KeyboardInterrupt:  # nothing to keep; training itself handles Ctrl-C with a checkpoint
        print("boovae: stopped", file=sys.stderr)
        raise SystemExit(130) from None


# --- from words to arguments and settings ---------------------------------------------------------------------------


def parsed(name: str, words: list[str]) -> tuple[Any, ...]:
    """Parse words into what a verb's function takes: its arguments and, if it has any, the settings of a run."""
    kind = VERBS[name].kind
    if name == "tune" and words and not words[0].startswith("-"):
        words = ["--method", *words]  # boovae tune METHOD
    if not issubclass(kind, kinds.Configured):
        found = tyro.cli(_unchecked(kind, hide=False), prog=f"boovae {name}", args=words, config=_FLAT)
        return (kind(**vars(found)),)
    first = _first_look(words)
    if first.help and not (first.method or first.config or first.help_all):
        return _asked(name, kind, ["--help"], _defaults(kind, first), [], hide=True)
    from boovae.methods import REGISTRY, from_mapping, resolve

    given = {"dataset": first.dataset, "method": first.method}
    named = read_settings(first.config) if first.config else {}
    given |= {key: value for key, value in kind.own_defaults.items() if key not in named}
    settings = resolve(given, first.config, first.preset)
    sections = list(REGISTRY.sections(settings.method))
    flags = [_setting_of(word) for word in words if word.startswith("--")]
    if "strengths" in flags:
        raise InputError(
            "{strengths} was removed: each setting of a method has its own flag, for example {ewc_strength=3}"
        )
    refuse_foreign(flags, settings.method, REGISTRY)
    if first.help_all:
        words, sections = ["--help"], REGISTRY.all_sections()
    arguments, flat = _asked(name, kind, words, settings, sections, hide=first.help and not first.help_all)
    return arguments, from_mapping(flat | {"chosen": [each for each in settings.chosen if each not in flags]})


def _setting_of(word: str) -> str:
    """Return the setting that a flag names."""
    return word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")


def _defaults(kind: Any, first: argparse.Namespace) -> Settings:
    """Return the core settings as far as they are known without the methods, which import torch."""
    usual = preset_values(first.preset, first.dataset or Settings().data.dataset, Settings.method)
    given = {**usual, **kind.own_defaults, "dataset": first.dataset}
    settings = Settings(chosen=() if first.preset else tuple(name for name in CHOOSABLE if name not in given))
    return settings.changed(**{name: given[name] for name in CORE_NAMES if given.get(name) is not None})


def _first_look(words: list[str]) -> argparse.Namespace:
    """Parse the flags that decide the defaults of all others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--dataset", "--method", "--preset"):
        parser.add_argument(flag)
    parser.add_argument("--config", type=Path)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--help-all", action="store_true")
    parser.exit_on_error = False
    try:
        return parser.parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise InputError(f"{error.argument_name} has no value") from None


def _asked(
    name: str, kind: Any, words: list[str], settings: Settings, sections: Sequence[type[Section]], *, hide: bool
) -> tuple[Any, dict[str, Any]]:
    """Parse words into a command's own arguments and all settings by name; `settings` are the defaults."""
    parts: dict[str, tuple[Any, Any]] = {section: (of, getattr(settings, section)) for section, of in CORE.items()}
    for of in sections:
        title = of.__name__.removesuffix("Settings").lower()
        while title in (*parts, "method", "output"):  # methods outside the package choose their names freely
            title += "_"
        parts[title] = (of, settings.of(of))
    parts["output"] = (kind, kind())
    columns: list[Any] = [("method", Annotated[str, _METHOD], settings.method)]
    for part, (of, default) in parts.items():
        shown = _unchecked(of, hide=hide, chosen=settings.chosen)
        columns.append((part, shown, field(default=shown(**vars(default)))))
    whole = make_dataclass(kind.__name__, columns, frozen=True)
    whole.__doc__ = kind.__doc__ + (_MORE.format(name) if hide else "")
    found: Any = tyro.cli(whole, prog=f"boovae {name}", args=words, config=_FLAT)
    flat = {name: value for part in parts.keys() - {"output"} for name, value in asdict(getattr(found, part)).items()}
    return kind(**vars(found.output)), flat | {"method": found.method}


_MORE = "\n`boovae {0} --method NAME --help` adds the settings of a method, `boovae {0} --help-all` shows all."
#: Nested fields are flags without prefixes.
_FLAT = (tyro.conf.OmitArgPrefixes,)
_FROM_DATA = tyro.conf.arg(help_behavior_hint="(default: from the data)")
_METHOD = tyro.conf.arg(help="Continual-learning method; a+b combines two (see `boovae methods`).")


def _unchecked(kind: Any, *, hide: bool, chosen: Sequence[str] = ()) -> Any:
    """Return a dataclass without checks, which come later with our messages; `hide` leaves advanced fields out.

    The help says of `chosen` fields that their default comes from the data.
    """
    marks = dict.fromkeys(chosen, _FROM_DATA) | dict.fromkeys(kind.advanced if hide else (), tyro.conf.Suppress)
    marked = [item for item in fields(kind) if item.name in marks]
    changed = [(item.name, Annotated[hints(kind)[item.name], marks[item.name]], item) for item in marked]
    nothing = {"__post_init__": lambda self: None}
    made = make_dataclass(kind.__name__, changed, bases=(kind,), namespace=nothing, frozen=True)
    made.__doc__ = "Evaluation, output and device." if issubclass(kind, kinds.Configured) else kind.__doc__
    return made


if __name__ == "__main__":
    main()
