"""Every setting and its default, in one place. Imports neither torch nor tyro, so that `--help` answers at once.

Who wins: a flag, then the file given by `--config`, then the preset, then the dataset's recipe, then the default here.
"""

from __future__ import annotations

import functools
import hashlib
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from boovae.config.presets import OWN_DATA, PRESETS, RECIPES
from boovae.errors import InputError, unknown_name
from boovae.files import TEXT_BYTES, read_file

#: Tasks of few images get no smaller batches than this, except by --batch-size.
SMALLEST_BATCH = 32


@dataclass(frozen=True)
class Settings:
    """What defines a run: together with the data it decides every number in `metrics.jsonl`."""

    dataset: str = "digits"
    """Dataset: digits, mnist, fashion_mnist, notmnist, celeba, celeba64, folder:PATH or npz:PATH."""
    method: str = "boo+distill"
    """Continual-learning method; a+b combines two (see `boovae methods`)."""
    tasks: int | None = None
    """Learn only the first N tasks; all of them if not given."""
    classes_per_task: int = 1
    """How many classes make one task."""
    class_order: tuple[int, ...] | None = None
    """The order in which the classes come; the dataset's own if not given."""
    borders: tuple[int, ...] | None = None
    """Cut the training images, class after class, at these places instead of between classes (see --detect-tasks)."""
    limit: int | None = None
    """At most this many images per class and split."""
    binarize: Literal["none", "dynamic", "threshold"] = "none"
    """Grey values as they are (the paper), drawn anew in every epoch, or cut at one half."""
    jitter: float = 0.0
    """Brightness, contrast and saturation of training images vary by up to this share; colour images only."""
    deform: float = 0.0
    """Training pictures are stretched, turned, sheared and moved a little: the deviation of each, say 0.05."""
    mirror: bool = False
    """Half of the training pictures of every step are seen the other way round, left and right exchanged."""
    data_seed: int = 0
    """Decides the split into training, validation and test images."""

    net: str = "mlp:300"
    """Encoder and decoder: mlp:WIDTH, or conv:CHANNELS for pictures."""
    normalisation: Literal["group", "batch"] = "group"
    """Convolutional networks: channels are normalised in groups, or over the batch (the paper)."""
    decoder_bounds: bool = True
    """Convolutional networks: mean pixels keep to the range of pixels, or are free, for numbers that have no range."""
    latent_dim: int = 40
    """Dimension of the latent space."""
    likelihood: Literal["bernoulli", "normal", "logistic", "l1"] = "bernoulli"
    """Likelihood of the pixels."""
    log_variance_range: tuple[float, float] = (-6.0, 2.0)
    """Limits of the encoder's log-variance."""
    prior: Literal["normal", "vamp"] = "normal"
    """Prior of methods that bring none of their own: N(0, I), or a VampPrior of learned images."""
    components: int = 15
    """Pseudo-inputs per task; `vamp` has that many in all, with `joint` and `scratch` for each task seen."""

    boo_objective: Literal["corrective", "forward", "literal"] = "corrective"
    """Boo: all components fitted together, or one after another by the forward or the paper's literal objective."""
    boo_start: Literal["clusters", "noise", "mean"] = "clusters"
    """Boo: pseudo-inputs start at the mean images of latent clusters, at noise, or at the mean image with noise."""
    boo_first: Literal["mean", "learned"] = "mean"
    """Boo, one after another: the first component of a task is the mean image, or learned like the others."""
    boo_weights: Literal["em", "bisection", "equal", "fixed", "sgd"] = "em"
    """Boo, one after another: how a new component gets its weight."""
    boo_elbo: Literal["current", "full"] = "current"
    """Boo: images of the task in training are scored by its own components, or by the whole mixture."""
    boo_target: Literal["current", "full"] = "current"
    """Boo, one after another: the target is the task's aggregated posterior, or mixed with the old prior."""
    boo_mixture: Literal["current", "full"] = "current"
    """Boo, one after another: a new component keeps away from the task's own components, or from all."""
    boo_masses: Literal["sizes", "equal"] = "sizes"
    """Boo: tasks share the prior by numbers of images, or equally."""
    boo_reencode: bool = False
    """Boo: components of finished tasks are encoded anew, instead of their stored Gaussians."""
    boo_lambda: float = 0.0
    """Boo: weight of the paper's penalties R_enc and R_dec."""
    boo_lambda_schedule: Literal["constant", "tasks"] = "constant"
    """Boo: the weight is constant, or grows as (images before / images now)."""
    boo_reduction: Literal["reference", "sum", "mean"] = "reference"
    """Boo: how the penalties add up over components (docs/methods/boo.md)."""
    boo_decoder: Literal["mean", "teacher"] = "mean"
    """Boo: R_dec holds latents of a component to its stored image, or to what the old decoder made of them."""
    boo_divergence: Literal["symmetric", "forward", "reverse"] = "symmetric"
    """Boo: the penalties' divergence: both sides, KL[stored | now] or KL[now | stored]."""
    boo_steps: int = 100
    """Boo: gradient steps when components are learned."""
    boo_rate: float = 0.02
    """Boo: learning rate of the pseudo-inputs."""
    boo_samples: int = 32
    """Boo, literal: samples of the new component per step."""
    boo_floor: float = 0.0
    """Boo, literal: share of a broad Gaussian in the mixture, which keeps a new component from running away."""
    boo_until: int = 32
    """Boo, corrective: the components are fitted after epochs 1, 2, 4, … up to this one, then stand still."""
    boo_prune: float = 1e-3
    """Boo: components with less weight are dropped."""
    boo_tolerance: float = 0.0
    """Boo: a component that lowers the divergence by less (nats) is not added; 0 takes all of them."""
    distill_weight: float = 0.5
    """Distill: weight of the old network's answers, times (images before / images now)."""
    distill_latents: int = 250
    """Distill: latents of the old prior per step."""
    distill_decoder: bool = True
    """Distill: hold the decoder."""
    distill_encoder: bool = True
    """Distill: hold the encoder (on images decoded from the old prior)."""
    distill_divergence: Literal["symmetric", "forward", "reverse"] = "symmetric"
    """Distill: both sides of the divergence, KL[old | new] or KL[new | old]."""

    flow_layers: int = 4
    """Boo-flow: affine couplings of the flow; 0 is the identity."""
    flow_width: int = 128
    """Boo-flow: hidden units of a coupling."""
    flow_drift: float = 10.0
    """Boo-flow: weight of the squared distance the flow moves old components, times (images before / images now)."""

    ewc_strength: float = 100.0
    """EWC: weight of the quadratic penalty; 1 is what Bayes says of a diagonal Gaussian."""
    ewc_decay: float = 1.0
    """EWC: 1 keeps the quadratics of all tasks; under 1 is online EWC, the share of the old one kept per task."""
    ewc_images: int = 1000
    """EWC: images from which the Fisher information of a task is estimated."""
    si_strength: float = 30.0
    """SI: weight of the quadratic penalty."""
    si_damping: float = 0.1
    """SI: keeps parameters that hardly moved from becoming infinitely important."""
    vcl_weight: float = 1.0
    """VCL: weight of the divergence to the previous posterior, times 1 / (images of the task)."""
    vcl_log_variance: float = -9.0
    """VCL: log-variance of the weights at the start of the first task."""
    coreset_images: int = 15
    """Coreset: images kept per task."""
    coreset_mode: Literal["append", "batch"] = "append"
    """Coreset: kept images join the training set, or every batch."""
    coreset_choice: Literal["random", "kcenter"] = "random"
    """Coreset: which images are kept: random ones, or far from each other."""
    mog_lambda: float = 1.0
    """MoG: weight of the two penalties that hold old components."""
    mog_fit: Literal["gradient", "em"] = "em"
    """MoG: components learn by the ELBO's gradient, or are fitted to the codes by EM."""
    replay_images: int = 250
    """Replay: generated images in every batch."""
    replay_weight: float = 1.0
    """Replay: weight of generated images, times (images before / images now)."""
    strengths: tuple[str, ...] = ()
    """Numbers of a method from a file of your own, which it names in `strengths`: NAME=VALUE NAME=VALUE …"""

    replicas: int = 1
    """How many seeds are trained at once."""
    seed: int = 0
    """Seed of the first replica; the others follow by one."""
    epochs: int = 200
    """Most epochs per task."""
    batch_size: int = 250
    """Images per step, at most (see --epoch-steps)."""
    epoch_steps: int = 1
    """An epoch has this many steps, at least: a task of few images gets smaller batches, of some 32 or more."""
    learning_rate: float = 5e-4
    """Adam's learning rate at the start of a task."""
    schedule: Literal["cosine", "plateau"] = "cosine"
    """The learning rate falls as half a cosine over the epochs, or is halved on plateaus."""
    plateau_patience: int = 30
    """Epochs without improvement after which the learning rate is halved."""
    early_stop: int = 50
    """Epochs without improvement after which a task ends."""
    stop_by: Literal["loss", "bound"] = "loss"
    """Early stopping watches the validation loss with the method's penalties, or the negative ELBO alone."""
    kl_weight: float = 1.0
    """Weight of the KL term once it is warm."""
    kl_warmup: int = 0
    """Epochs over which the KL weight grows linearly from 0."""
    bound_samples: int = 1
    """Samples of every image in the training bound; more than one make it tighter (the importance-weighted bound)."""

    samples: int = 5000
    """Importance samples per image that is scored."""
    generated: int = 10000
    """Generated images for diversity and Fréchet distance."""

    def __post_init__(self) -> None:
        for item in fields(Settings):
            if getattr(self, item.name) is not None:
                _typed(item.name, getattr(self, item.name))
        alike = strength_texts(own_strengths(self.strengths))
        object.__setattr__(self, "strengths", alike)  # 3 and 3.0 are one value, and one run folder
        for names, good, wanted in _RULES:
            for name in names.split():
                if not good(getattr(self, name)):
                    raise InputError(f"{flag(name)} is {getattr(self, name)}; it must be {wanted}")
        for name, allowed in _choices().items():
            if getattr(self, name) not in allowed:
                raise unknown_name(f"value for {flag(name)}", str(getattr(self, name)), allowed)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each replica."""
        return tuple(range(self.seed, self.seed + self.replicas))

    def batch_of(self, images: int) -> int:
        """Return the images per step of a task that has so many.

        >>> [Settings(epoch_steps=20).batch_of(images) for images in (20, 48, 2000, 60000)]
        [20, 24, 100, 250]
        """
        batch = min(fitted_batch(images, self.batch_size, self.epoch_steps), images)
        if self.epoch_steps == 1:
            return batch
        return images // -(-images // batch)  # evenly: of few images none is left over


def fitted_batch(images: int, most: int, steps: int) -> int:
    """Return a batch of at most so many images that an epoch of `images` takes so many steps."""
    return min(most, max(images // steps, SMALLEST_BATCH))


def own_strengths(texts: Sequence[str]) -> dict[str, float]:
    """Return the numbers that --strengths gives, by name.

    >>> own_strengths(["pull=3", "push=1e-2"])
    {'pull': 3.0, 'push': 0.01}
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in found:
            raise InputError(f"--strengths has {name} twice")
        try:
            found[name] = float(value)
        except ValueError:
            raise InputError(f"--strengths has {text!r}; it must be NAME=NUMBER") from None
        if not name or not math.isfinite(found[name]):
            raise InputError(f"--strengths has {text!r}; it must be NAME=NUMBER, a finite one")
    return found


def strength_texts(values: Mapping[str, float]) -> tuple[str, ...]:
    """Return numbers as --strengths takes them.

    >>> strength_texts({"push": 0.01, "pull": 3})
    ('pull=3.0', 'push=0.01')
    """
    return tuple(f"{name}={float(value)!r}" for name, value in sorted(values.items()))


def flag(name: str) -> str:
    """Return the command-line flag of a setting: batch_size -> --batch-size."""
    return "--" + name.replace("_", "-")


#: Beyond its type: the settings, what holds of a good value, and what the error asks for.
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "replicas epochs epoch_steps batch_size latent_dim components samples generated plateau_patience early_stop "
        "classes_per_task bound_samples distill_latents boo_until boo_samples flow_width ewc_images coreset_images "
        "replay_images",
        lambda value: value >= 1,
        "a whole number of at least 1",
    ),
    ("tasks limit", lambda value: value is None or value >= 1, "a whole number of at least 1, or leave it out"),
    (
        "kl_warmup kl_weight seed data_seed distill_weight boo_steps boo_rate boo_lambda boo_tolerance "
        "flow_layers flow_drift ewc_strength si_strength vcl_weight mog_lambda replay_weight",
        lambda value: 0 <= value < math.inf,
        "a number of at least 0",
    ),
    ("boo_floor boo_prune jitter deform", lambda value: 0 <= value < 1, "a share of at least 0 and under 1"),
    ("ewc_decay", lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    ("si_damping", lambda value: value > 0, "a number above 0"),
    ("vcl_log_variance", math.isfinite, "a number"),
    ("learning_rate", lambda value: 0 < value < math.inf, "a number above 0, for example 5e-4"),
    (
        "log_variance_range",
        lambda limits: -math.inf < limits[0] < limits[1] < math.inf,
        "a lower and a higher number",
    ),
)


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Settings)


@functools.cache
def _choices() -> dict[str, tuple[str, ...]]:
    return {name: get_args(hint) for name, hint in _hints().items() if str(hint).startswith("typing.Literal")}


def resolve(given: Mapping[str, Any], file: Path | None = None, preset: str | None = None) -> Settings:
    """Return the settings from flags given by the user, a TOML file, a preset, the dataset's recipe and the defaults.

    >>> resolve({"dataset": "mnist", "epochs": 3}).batch_size
    250
    >>> resolve({"dataset": "mnist"}, preset="paper").schedule
    'plateau'
    """
    from_file = _flat(read_toml(file) if file else {})
    named = {**from_file, **_flat({name: value for name, value in given.items() if value is not None})}
    dataset = str(named.get("dataset", Settings.dataset))
    strengths = _strengths(dataset, str(named.get("method", Settings.method)))
    return from_mapping({**RECIPES.get(dataset, OWN_DATA), **strengths, **_preset(preset, dataset), **named})


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with each strength under its own name, so that one of them can replace another's."""
    others = dict(values)
    return others | own_strengths(_typed("strengths", others.pop("strengths", ())))


def _strengths(dataset: str, method: str) -> dict[str, Any]:
    """Return what was chosen on validation data for a method, or for the parts of a combination."""
    path = resources.files("boovae.config") / "strengths" / f"{dataset}.toml"
    if not RECIPES.get(dataset) or not path.is_file():
        return {}
    sections = tomllib.loads(path.read_text(encoding="utf-8"))
    chosen: dict[str, Any] = {}
    for name in (*method.split("+"), method):
        chosen |= sections.get(name, {})
    return chosen


def _preset(name: str | None, dataset: str) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise unknown_name("preset (--preset)", name, PRESETS)
    common = {key: value for key, value in PRESETS[name].items() if not isinstance(value, dict)}
    return {**common, **PRESETS[name].get(dataset, {})}


def from_mapping(values: Mapping[str, Any]) -> Settings:
    """Return the settings of a mapping, with every name and type checked."""
    known = {field.name for field in fields(Settings)}
    checked = {name: _typed(name, value) for name, value in values.items() if name in known and value is not None}
    if others := {name: value for name, value in values.items() if name not in known}:
        checked["strengths"] = _with_strengths(checked, others, known)
    return replace(Settings(), **checked)


def _with_strengths(checked: Mapping[str, Any], others: Mapping[str, Any], known: set[str]) -> tuple[str, ...]:
    """Return the numbers of a method from outside the package, with those that were given as if they were settings."""
    from boovae.methods import strengths_of  # late: it imports torch

    own = strengths_of(checked.get("method", Settings.method))
    for name, value in others.items():
        if name not in own:
            raise unknown_name("setting", str(name), known | set(own))
        if not _is(float, value):
            raise InputError(f"{name} is {value!r}; it must be a number")
    return strength_texts({**own_strengths(checked.get("strengths", ())), **others})


def _typed(name: str, value: Any) -> Any:
    """Return the value as the type its setting has; TOML has lists where we have tuples, and 1 for 1.0."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()  # a number that came out of an array
    default = getattr(Settings, name)
    hint = str(_hints()[name])
    if hint.startswith("tuple") or "tuple[" in hint:
        element = float if "float" in hint else int if "int" in hint else str
        if not isinstance(value, (list, tuple)) or not all(_is(element, item) for item in value):
            what = "texts, NAME=NUMBER" if element is str else "numbers"
            raise InputError(f"{flag(name)} is {value!r}; it must be a list of {what}")
        items = tuple(element(item) for item in value)
        if isinstance(default, tuple) and "..." not in hint and len(items) != len(default):
            raise InputError(f"{flag(name)} has {len(items)} numbers; it must have {len(default)}")
        return items
    if "bool" in hint:
        if not isinstance(value, bool):
            raise InputError(f"{flag(name)} is {value!r}; it must be true or false")
        return value
    wanted = int if "int" in hint else float if "float" in hint else str
    if not _is(wanted, value):
        raise InputError(f"{flag(name)} is {value!r}; it must be a value of type {wanted.__name__}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise InputError(f"{flag(name)} is too large; it must fit into 64 bits")
    if isinstance(value, str) and not value.isprintable():
        raise InputError(f"{flag(name)} is {value!r}; use a name or path of printable characters")
    return wanted(value)


def _is(wanted: type, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) if wanted is float else isinstance(value, wanted)


def read_toml(path: Path, named_by: str = "--config") -> dict[str, Any]:
    """Read settings from a TOML file, which a flag has named."""
    try:
        return tomllib.loads(read_file(path, TEXT_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"no such configuration file: {path} ({named_by})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the configuration {path} ({named_by}): {error}") from error


def to_toml(settings: Settings) -> str:
    """Return the settings as TOML; `from_mapping(tomllib.loads(...))` gives them back.

    >>> from_mapping(tomllib.loads(to_toml(Settings()))) == Settings()
    True
    """
    return "".join(f"{name} = {toml_value(value)}\n" for name, value in asdict(settings).items() if value is not None)


def folder_name(settings: Settings) -> str:
    """Return a name that is the same for the same settings: dataset, method and a hash of what is not the default.

    A setting that is added later, with a default that changes nothing, leaves the names of old folders alone.
    """
    changed = {name: value for name, value in asdict(settings).items() if value != getattr(Settings, name)}
    text = "".join(f"{name} = {toml_value(value)}\n" for name, value in sorted(changed.items()))
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    dataset = "".join(letter if letter.isalnum() or letter in "_+-" else "-" for letter in settings.dataset)
    return f"{dataset[-40:]}-{settings.method}-{digest}"


def toml_value(value: object) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return repr(value)
