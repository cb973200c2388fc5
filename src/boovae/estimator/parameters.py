"""Check an estimator's parameters and convert them to the settings of a task."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, Literal

from sklearn.utils import check_random_state

from boovae.config import DataSettings, Section, Settings
from boovae.config.choose import MODEL, Choice, DataSummary, choose, choose_task
from boovae.config.section import Share
from boovae.errors import InputError
from boovae.methods import resolve

#: Settings that are parameters of the estimator.
OWN = ("latent_dim", "components", "method", "net", "epochs", "batch_size", "learning_rate", "likelihood", "samples")
#: Settings that do not apply to an estimator: those of datasets, of replicas and of the evaluation of a run.
FOREIGN = (*(item.name for item in fields(DataSettings)), "replicas", "seed", "generated")
#: Settings that define the model and cannot change between tasks.
FIXED = (
    *("latent_dim", "components", "method", "net", "normalisation", "likelihood", "log_variance_range", "prior"),
    *("noise", "noise_floor", "decoder_bounds", "flow_layers", "flow_width"),
)
#: Settings that require one common range of all pixels.
PIXELS = ("decoder_bounds", "mirror", "deform", "jitter")


@dataclass(frozen=True)
class _Checked(Section):
    """Parameters that are not settings, or accept more values than the setting."""

    likelihood: Literal["auto", "bernoulli", "normal", "logistic"]
    validation_fraction: Share
    compile: bool | Literal["auto"]
    detect_first: int
    detect_most: int


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse invalid values of parameters that are not settings."""
    _Checked(**{item.name: parameters[item.name] for item in fields(_Checked)})
    if not isinstance(others := parameters["settings"], (Mapping, NoneType)):
        raise InputError(f"settings is {others!r}; it must be a dictionary, for example {{'distill_weight': 1.0}}")
    try:
        check_random_state(state := parameters["random_state"])
    except ValueError as error:
        raise InputError(
            f"random_state is {state!r}; it must be a whole number from 0 to 2**32 - 1, a RandomState or None"
        ) from error


def task_settings(
    parameters: Mapping[str, Any], data: DataSummary, seed: int, before: Settings | None = None
) -> tuple[Settings, tuple[Choice, ...]]:
    """Return the settings of a task from the estimator's `parameters`, and those of the model that were chosen.

    What is open is chosen to suit the data; what defines the model is as `before`, in an earlier task.

    >>> task_settings({}, DataSummary((64,), images=150), seed=0)[0].model.net
    'mlp:128'
    """
    others = {str(name): value for name, value in (parameters.get("settings") or {}).items()}
    for name, value in others.items():
        if name in OWN:
            raise InputError(f"settings: {name} is a parameter of its own; BooVAE({name}=...)")
        if name in FOREIGN:
            raise InputError(f"settings: {name} has no meaning for an estimator; leave it out")
        if name in PIXELS and value and not data.pixels:
            raise InputError(
                f"settings: {name} is for grey values, other numbers are standardised per feature; leave it out, or "
                "pass pixels as uint8 or in [0, 1]"
            )
    given = {name: parameters.get(name) for name in OWN} | others
    if given["likelihood"] == "auto":
        given["likelihood"] = None
    settings = resolve(given | {"dataset": "arrays", "seed": seed})
    if before is None:
        return choose(settings, data)
    there = before.flat()
    settings = settings.changed(**{name: there[name] for name in MODEL if name in settings.chosen})
    return choose_task(settings, data)[0], ()


def check_same_model(before: Settings, now: Settings) -> None:
    """Refuse changes of the settings that define the model between two tasks."""
    old, new = before.flat(), now.flat()
    for name in FIXED:
        if old.get(name) != new.get(name):
            raise InputError(
                f"{name} was {old.get(name)!r} when this model began and is {new.get(name)!r} now; "
                "it cannot change between tasks: restore the old value, or call fit to start again"
            )
