"""The core settings, which every run has, and their defaults. Imports neither torch nor tyro.

The settings of methods are declared beside the methods; `Settings.own` holds their values by name, and `Settings.of`
returns them as typed sections.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import tomli_w

from boovae.config.section import AtLeastOne, NotNegative, Positive, Section, Share, WholeNumber, checked
from boovae.errors import SettingError

#: The smallest batch that a task of few images gets, unless `batch_size` is smaller.
SMALLEST_BATCH = 32

Part = TypeVar("Part", bound=Section)
#: The value of a setting as TOML and JSON can hold it; None if it is left out.
Value = str | int | float | bool | tuple[Any, ...] | None
#: Height and width of pictures, or a size that is chosen from them; None leaves them as they are.
Resize = Literal["auto"] | tuple[AtLeastOne, AtLeastOne] | None


@dataclass(frozen=True)
class DataSettings(Section):
    """Which images to learn, and in which tasks."""

    dataset: str = "digits"
    """Dataset: digits, mnist, fashion_mnist, notmnist, celeba, celeba64, folder:PATH or npz:PATH."""
    tasks: AtLeastOne | None = None
    """Learn only the first N tasks; all if not given."""
    classes_per_task: AtLeastOne = 1
    """Number of classes per task."""
    class_order: tuple[int, ...] | None = None
    """Order of the classes; the dataset's own if not given."""
    borders: tuple[int, ...] | None = None
    """Cut the training images, class by class, at these positions instead of between classes (see --detect-tasks)."""
    resize: Resize = None
    """Resize the pictures of folder:PATH to this height and width, or to a size that suits them (auto)."""
    limit: AtLeastOne | None = None
    """At most this many images per class and split."""
    binarize: Literal["none", "dynamic", "threshold"] = "none"
    """Grey values as they are (the paper), sampled again in every epoch, or thresholded at one half."""
    data_seed: WholeNumber = 0
    """Seed of the split into training, validation and test images."""

    advanced: ClassVar = frozenset({"class_order", "borders", "data_seed"})


@dataclass(frozen=True)
class ModelSettings(Section):
    """Networks, likelihood and prior."""

    net: str = "mlp:300"
    """Encoder and decoder: mlp:WIDTH or gated:WIDTH; linear:WIDTH for tables; conv:CHANNELS or res:CHANNELS for
    pictures."""
    normalisation: Literal["group", "batch"] = "group"
    """Convolutional networks: normalise channels in groups, or over the batch (the paper)."""
    decoder_bounds: bool = True
    """Convolutional networks: bound mean pixels to the range of the data."""
    latent_dim: AtLeastOne = 40
    """Dimension of the latent space."""
    likelihood: Literal["bernoulli", "normal", "logistic", "l1", "logistic_mixture"] = "bernoulli"
    """Likelihood of the pixels."""
    noise: Literal["fixed", "shared", "learned"] = "fixed"
    """Width of likelihood `normal`: the paper's constant, one learned for each colour, or one that the decoder predicts
    for every number; of `logistic`: constant, or one learned for each colour."""
    noise_floor: Share = 0.0
    """Least standard deviation of noise `shared`, as a share of the pixel range; wider noise costs likelihood, and
    gives simpler codes, which a few components cover better."""
    log_variance_range: tuple[float, float] = (-6.0, 2.0)
    """Limits of the encoder's log-variance."""
    prior: Literal["normal", "vamp"] = "normal"
    """Prior of methods that do not bring their own: N(0, I), or a VampPrior of learned images."""
    components: AtLeastOne = 15
    """Pseudo-inputs per task; of prior `vamp` in total, except for `joint` and `scratch` (per task seen)."""

    advanced: ClassVar = frozenset({"normalisation", "decoder_bounds", "log_variance_range", "noise", "noise_floor"})

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.log_variance_range
        if not low < high:
            raise SettingError("log_variance_range", self.log_variance_range, "a lower and a higher number")


@dataclass(frozen=True)
class TrainingSettings(Section):
    """How to learn a task."""

    replicas: AtLeastOne = 1
    """Number of seeds to train at once."""
    seed: WholeNumber = 0
    """Seed of the first replica; the others follow by one."""
    epochs: AtLeastOne = 200
    """Maximum number of epochs per task."""
    batch_size: AtLeastOne = 250
    """Maximum number of images per step (see --epoch-steps)."""
    epoch_steps: AtLeastOne = 1
    """Minimum number of steps per epoch: a task of few images gets smaller batches, of at least 32."""
    learning_rate: Positive = 5e-4
    """Adam's learning rate at the start of a task."""
    schedule: Literal["cosine", "plateau"] = "cosine"
    """Decay the learning rate as half a cosine over the epochs, or halve it on plateaus."""
    plateau_patience: AtLeastOne = 30
    """Epochs without improvement after which the learning rate is halved."""
    early_stop: AtLeastOne = 50
    """Epochs without improvement after which a task ends."""
    stop_by: Literal["loss", "bound"] = "loss"
    """Early stopping watches the validation loss with the method's penalties, or the negative ELBO alone."""
    kl_weight: NotNegative = 1.0
    """Weight of the KL term after its warm-up."""
    kl_warmup: WholeNumber = 0
    """Epochs over which the KL weight grows linearly from 0."""
    bound_samples: AtLeastOne = 1
    """Latent samples per image in the training bound; more than one tighten it (the importance-weighted bound)."""
    jitter: Share = 0.0
    """Vary brightness, contrast and saturation of training images by up to this fraction; colour images only."""
    input_noise: NotNegative = 0.0
    """Standard deviation of noise added to the numbers of training rows (standardised ones), for few rows."""
    deform: Share = 0.0
    """Standard deviation of random stretching, rotation, shear and shift of training pictures, for example 0.05."""
    mirror: bool = False
    """Flip half of each training batch horizontally."""

    advanced: ClassVar = frozenset(
        {
            *("epoch_steps", "schedule", "plateau_patience", "early_stop", "stop_by", "kl_weight", "kl_warmup"),
            *("bound_samples", "jitter", "input_noise", "deform", "mirror"),
        }
    )

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each replica."""
        return tuple(range(self.seed, self.seed + self.replicas))

    def batch_of(self, images: int) -> int:
        """Return the batch size of a task of `images` images.

        >>> [TrainingSettings(epoch_steps=20).batch_of(images) for images in (20, 48, 2000, 60000)]
        [20, 24, 100, 250]
        """
        batch = min(self.batch_size, max(images // self.epoch_steps, SMALLEST_BATCH), images)
        if self.epoch_steps == 1:
            return batch
        return images // -(-images // batch)  # even batches, so that no image of a small task is left over


@dataclass(frozen=True)
class EvaluationSettings(Section):
    """How many samples to measure a model with."""

    samples: AtLeastOne = 5000
    """Importance samples per scored image."""
    fit_posterior: Literal["auto", "always", "never"] = "auto"
    """Score images that the encoder describes poorly again with a posterior fitted to each; auto: on your own data."""
    generated: AtLeastOne = 10000
    """Generated images for diversity and Fréchet distance."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run: together with the data they determine every number in `metrics.jsonl`."""

    method: str = "boo+distill"
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    #: The method's settings that differ from their defaults, by name, in alphabetical order.
    own: tuple[tuple[str, Value], ...] = ()
    #: Names of the settings that nobody gave: they are chosen from the data (`choose.py`), some again for every task.
    chosen: tuple[str, ...] = ()

    def of(self, kind: type[Part]) -> Part:
        """Return a section of the method, with defaults for what was not set."""
        names = {item.name for item in fields(kind)}
        return kind(**{name: value for name, value in self.own if name in names})

    def flat(self) -> dict[str, Value]:
        """Return every core setting, and those of the method that differ from their defaults, by name.

        >>> Settings().flat()["epochs"]
        200
        """
        core = {name: value for section in CORE for name, value in asdict(getattr(self, section)).items()}
        return {"method": self.method, **core, **dict(self.own)}

    def changed(self, **values: Any) -> Self:
        """Return settings with other values; a name that is not a core setting belongs to the method.

        >>> Settings().changed(epochs=3, method="ewc", ewc_strength=10.0).own
        (('ewc_strength', 10.0),)
        """
        method = checked("method", values.pop("method", self.method), str)
        sections: dict[str, Section] = {}
        for section, kind in CORE.items():
            given = {item.name: values.pop(item.name) for item in fields(kind) if item.name in values}
            sections[section] = replace(getattr(self, section), **given)
        own = tuple(sorted({**dict(self.own), **values}.items()))
        return replace(self, method=method, own=own, **sections)  # type: ignore[arg-type]


#: The core sections by their field in `Settings`.
CORE: dict[str, type[Section]] = {
    "data": DataSettings,
    "model": ModelSettings,
    "training": TrainingSettings,
    "evaluation": EvaluationSettings,
}
#: Names of all core settings.
CORE_NAMES = frozenset({"method", *(item.name for kind in CORE.values() for item in fields(kind))})


def to_toml(settings: Settings, sections: Sequence[type[Section]] = ()) -> str:
    """Return the settings as TOML, one table per section; `sections` are the method's, written with every value."""
    head = {"method": settings.method, "chosen": settings.chosen or None}
    core = {name: _written(asdict(getattr(settings, name))) for name in CORE}
    own = {name: value for kind in sections for name, value in asdict(settings.of(kind)).items()}
    return tomli_w.dumps(_written(head) | core | {"method_settings": _written({**dict(settings.own), **own})})


def _written(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values for TOML, which has no null."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}


def folder_name(settings: Settings) -> str:
    """Return the name of a run folder: dataset, method and a hash of every setting that differs from its default.

    A setting that is added later, with a default that changes nothing, keeps the names of old folders.
    """
    usual = Settings().flat()
    changed = {name: v for name, v in settings.flat().items() if name not in usual or v != usual[name]}
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in sorted(changed.items()))
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()[:10]
    dataset = "".join(letter if letter.isalnum() or letter in "_+-" else "-" for letter in settings.data.dataset)
    return f"{dataset[-40:]}-{settings.method}-{digest}"
