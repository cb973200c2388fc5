"""What an estimator's parameters mean for a task: what the user leaves open follows from the size of the task."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from types import NoneType
from typing import Any

import numpy as np

from boovae.config import Settings, fitted_batch
from boovae.config.resolve import recipe, refuse_foreign
from boovae.errors import InputError, unknown_name
from boovae.methods import REGISTRY, from_mapping

#: Settings that are parameters of the estimator.
OWN = ("latent_dim", "components", "method", "net", "epochs", "batch_size", "learning_rate", "likelihood", "samples")
#: Settings that make no sense there: they speak of a dataset, of several replicas or of the evaluation of a run.
FOREIGN = (
    *("dataset", "tasks", "classes_per_task", "class_order", "borders", "limit", "binarize", "data_seed"),
    *("replicas", "seed", "generated"),
)
#: What a model is made of; it cannot change from one task to the next.
FIXED = (
    *("latent_dim", "components", "method", "net", "normalisation", "likelihood", "log_variance_range", "prior"),
    *("decoder_bounds", "flow_layers", "flow_width"),
)
#: What takes all pixels to have one range.
PIXELS = ("decoder_bounds", "mirror", "deform", "jitter")
#: With fewer images than this a task gets the settings for small data, those of the embedded digits.
SMALL = 1000
SMALL_EPOCHS = 70
#: Steps that a larger task gets, if its epochs (40 to 200) allow.
STEPS = 4000


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse parameters of an estimator that are no settings and make no sense."""
    from sklearn.utils import check_random_state

    if parameters["likelihood"] not in (known := ("auto", "bernoulli", "normal", "logistic")):
        raise unknown_name("likelihood", str(parameters["likelihood"]), known)
    share = parameters["validation_fraction"]
    if not isinstance(share, numbers.Real) or not 0 <= float(share) < 1:
        raise InputError(f"validation_fraction is {share!r}; it must be a number of at least 0 and under 1")
    if parameters["compile"] not in (True, False, "auto"):
        raise InputError(f"compile is {parameters['compile']!r}; it must be True, False or 'auto'")
    if not isinstance(others := parameters["settings"], (Mapping, NoneType)):
        raise InputError(f"settings is {others!r}; it must be a dictionary, for example {{'distill_weight': 1.0}}")
    try:
        check_random_state(state := parameters["random_state"])
    except ValueError as error:
        raise InputError(
            f"random_state is {state!r}; it must be a whole number from 0 to 2**32 - 1, a RandomState or None"
        ) from error
    for name in ("detect_first", "detect_most"):
        if not isinstance(parameters[name], numbers.Integral):
            raise InputError(f"{name} is {parameters[name]!r}; it must be a whole number")


def task_settings(parameters: Mapping[str, Any], images: int, features: int, *, grey: bool, seed: int) -> Settings:
    """Return the settings of a task of so many training images; `parameters` are the estimator's.

    >>> task_settings({}, images=150, features=64, grey=True, seed=0).model.net
    'mlp:128'
    """
    others = dict(parameters.get("settings") or {})
    for name in others:
        if name in OWN:
            raise InputError(f"settings: {name} is a parameter of its own; BooVAE({name}=...)")
        if name in FOREIGN:
            raise InputError(f"settings: {name} has no meaning for an estimator; leave it out")
        if name in PIXELS and others[name] and not grey:
            raise InputError(
                f"settings: {name} is for grey values, and other numbers are standardised one by one; leave it out, or "
                "hand in pixels as uint8 or in [0, 1]"
            )
    small = images < SMALL
    batch_size = fitted_batch(images, Settings().training.batch_size, recipe("own_data")["epoch_steps"])
    open_values = {
        "latent_dim": min(max(features // 6, 2), 40),
        "net": "mlp:128" if features <= 256 else "mlp:300",
        "batch_size": batch_size,
        "epochs": SMALL_EPOCHS if small else min(max(STEPS * batch_size // images, 40), 200),
        "learning_rate": 3e-3 if small else 1e-3,
        "boo_steps": 10 if small else 100,
        "distill_latents": 50 if small else 250,
        "decoder_bounds": grey,  # the range of other numbers grows from task to task, and may not move what is learned
    }
    given = {name: plain(parameters.get(name)) for name in OWN} | {name: plain(value) for name, value in others.items()}
    if given["likelihood"] in (None, "auto"):
        given["likelihood"] = "bernoulli" if grey else "normal"
    chosen = {name: value for name, value in given.items() if value is not None}
    refuse_foreign(others, str(given["method"] or Settings.method), REGISTRY)
    return from_mapping(open_values | chosen | {"dataset": "arrays", "seed": seed})


def plain(value: Any) -> Any:
    """Return NumPy's numbers, which searches over parameters make, as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def at_least_one(name: str, value: Any) -> int:
    """Return a whole number of at least 1, or refuse the argument of this name."""
    if not isinstance(value, numbers.Integral) or value < 1:
        raise InputError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return int(value)


def check_same_model(before: Settings, now: Settings) -> None:
    """Refuse to change what the model is made of between two tasks."""
    old, new = before.flat(), now.flat()
    for name in FIXED:
        if old.get(name) != new.get(name):
            raise InputError(
                f"{name} was {old.get(name)!r} when this model began and is {new.get(name)!r} now; "
                "it cannot change between tasks: set it back, or call fit to start anew"
            )
