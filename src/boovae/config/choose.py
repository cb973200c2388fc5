"""Settings from the data: what nobody gave is chosen by the rules of this file.

The rules are pure: they read a summary of a task's images, and train nothing. Those of `MODEL` hold for a whole run and
read the first task; those of `TASK` are applied to every task, since a month of 40 images may follow one of 4,000.
What each rule rests on is in docs/choosing-settings.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from boovae.config.settings import Settings, Value

#: Images with at most this many numbers get a narrow network; larger grey pictures than `MANY` a convolutional one.
FEW, MANY = 256, 1024
#: The smallest side of a picture for a convolutional network, and for augmentation.
LEAST_SIDE, LEAST_DEFORMED = 8, 16
#: Tasks with fewer images than this are deformed.
DEFORMED_BELOW = 3000
#: Mirrored pictures are alike if this share of the images has its nearest neighbour among the mirrored ones.
ALIKE = 0.3
#: With fewer images networks are narrower, and convolutional ones train for fewer steps.
FEW_IMAGES = 1000
#: Tables with fewer than `SOME_ROWS` rows are trained with noise on the rows, those with fewer than `FEW_ROWS` with
#: twice as much. The number of epochs is limited to `EPOCHS_PER_ROW` times the number of rows.
FEW_ROWS, SOME_ROWS, EPOCHS_PER_ROW = 60, 1000, 2
#: Steps per task: usually, with few numbers, and of few pictures by convolutions; limits of the epochs that they make.
STEPS, FEW_STEPS, CONV_STEPS, FEWEST_EPOCHS, MOST_EPOCHS = 4000, 1500, 3000, 40, 800


@dataclass(frozen=True)
class DataSummary:
    """The facts about a task that the rules use."""

    shape: tuple[int, ...]
    """Shape of one image: (height, width), with the colours first, or (features,)."""
    images: int
    """Training images of the task."""
    pixels: bool = True
    """Whether the values share one bounded range; other numbers are standardised per feature."""
    augmentable: bool = True
    """Whether pictures may be deformed: those binarised at a threshold stay binary."""
    mirrored: float | None = None
    """Share of images whose nearest neighbour is a mirrored image, not one as it is; None if there are too few."""

    @property
    def features(self) -> int:
        """The numbers in one image."""
        return math.prod(self.shape)

    @property
    def side(self) -> int:
        """The shorter side of a picture; 0 for rows."""
        return min(self.shape[-2:]) if len(self.shape) > 1 else 0

    @property
    def colours(self) -> int:
        """The channels of a picture; 0 for rows."""
        return 0 if len(self.shape) == 1 else self.shape[0] if len(self.shape) == 3 else 1


class Choice(NamedTuple):
    """A setting that was chosen, and why."""

    setting: str
    value: Value
    reason: str


#: Returns a value and the reason, or None to keep the default.
Rule = Callable[[DataSummary, Settings], tuple[Value, str] | None]


def choose_model(settings: Settings, data: DataSummary) -> tuple[Settings, tuple[Choice, ...]]:
    """Return the settings of a run, with values for those nobody gave (`Settings.chosen`), and these choices."""
    return _apply(MODEL, settings, data)


def choose(settings: Settings, data: DataSummary) -> tuple[Settings, tuple[Choice, ...]]:
    """Return the settings of a run and of its first task, and the choices of the model, which later tasks share."""
    settings, choices = choose_model(settings, data)
    return choose_task(settings, data)[0], choices


def choose_task(settings: Settings, data: DataSummary) -> tuple[Settings, tuple[Choice, ...]]:
    """Return the settings of a task, with values for those nobody gave that may differ between tasks.

    >>> settings = Settings(chosen=("epochs", "deform")).changed(net="res:32")
    >>> for choice in choose_task(settings, DataSummary((3, 32, 32), 5000))[1]:
    ...     print(*choice, sep=": ")
    epochs: 166: about 4,000 steps
    deform: 0.0: at least 3,000 images: enough without
    """
    return _apply(TASK, settings, data)


def _apply(rules: Mapping[str, Rule], settings: Settings, data: DataSummary) -> tuple[Settings, tuple[Choice, ...]]:
    found = []
    for name, rule in rules.items():
        if name in settings.chosen:
            answer = rule(data, settings)
            if answer is not None:
                settings = settings.changed(**{name: answer[0]})
                found.append(Choice(name, *answer))
    return settings, tuple(found)


def _convolves(settings: Settings) -> bool:
    return settings.model.net.startswith(("conv", "res"))


# --- of the run -----------------------------------------------------------------------------------------------------


def _net(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    if not data.pixels:
        width = 128 if data.features <= FEW else 512
        return f"linear:{width}", "columns depend on each other mostly linearly"
    if data.side >= LEAST_SIDE and data.features > FEW:
        width = 16 if data.images < FEW_IMAGES else 32
        if data.colours > 1:
            return f"res:{width}", "colour pictures"
        if data.features > MANY:
            return f"res:{width}", f"pictures of more than {MANY:,} pixels"
    if data.features <= FEW:
        return "mlp:128", f"only {data.features} numbers per image"
    width = 512 if data.images < FEW_IMAGES else 1024
    return f"mlp:{width}", f"{data.features:,} numbers per image"


def _latent_dim(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    if _convolves(settings):
        return 64, "a convolutional network"
    if not data.pixels:
        return min(max(-(-data.features // 2), 8), data.features, 40), "half of the columns, from 8 to 40"
    return min(max(data.features // 6, 2), 40), "a sixth of the numbers, from 2 to 40"


def _likelihood(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    if not data.pixels:
        return "normal", "numbers without a common range"
    return ("normal", "colours") if data.colours > 1 else ("bernoulli", "grey values in one range")


def _noise(data: DataSummary, settings: Settings) -> tuple[Value, str] | None:
    if settings.model.likelihood in ("normal", "logistic") and data.pixels:
        return "shared", "one width for each colour is learned in few steps"
    return ("learned", "columns differ in what remains of them") if settings.model.likelihood == "normal" else None


def _noise_floor(data: DataSummary, settings: Settings) -> tuple[Value, str] | None:
    if settings.model.noise == "shared":
        return 0.1, "noise keeps the codes simple, which helps samples and memory"
    return None


def _components(data: DataSummary, settings: Settings) -> tuple[Value, str] | None:
    if _convolves(settings):
        return min(max(data.images // 4, 15), 40), "convolutions encode more than a few images can cover"
    if not data.pixels:
        return min(max(data.images // 15, 2), 15), "one for fifteen rows, 2 to 15"
    return None


def _decoder_bounds(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    return data.pixels, "pixels have a common range" if data.pixels else "the range may grow from task to task"


def _bound_samples(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    if _convolves(settings):
        return 1, "decoding with convolutions is costly"
    if not data.pixels:
        return 5, "a tighter bound"
    return (1, "more do not help with few numbers") if data.features <= FEW else (10, "a tighter bound")


def _samples(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    return (200, "decoding with convolutions is costly") if _convolves(settings) else (500, "quick, and close to more")


def _generated(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    if _convolves(settings):
        return 2000, "decoding with convolutions is costly"
    return (5000, "small images") if data.features <= FEW else (10_000, "quick to decode")


# --- of each task ---------------------------------------------------------------------------------------------------


def _epoch_steps(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    return 12, "smaller batches, down to 32, for few images"


def _batch_size(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    return (128, "pictures take memory") if _convolves(settings) else (250, "the usual size")


def _epochs(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    small = _convolves(settings) and data.images < FEW_IMAGES
    steps = FEW_STEPS if data.features <= FEW else CONV_STEPS if small else STEPS
    images = round(2 ** (round(2 * math.log2(data.images)) / 2))  # tasks of similar sizes get the same epochs
    per_epoch = -(-images // settings.training.batch_of(images))
    epochs = min(max(steps // per_epoch, FEWEST_EPOCHS), MOST_EPOCHS)
    if not data.pixels:
        epochs = min(epochs, max(EPOCHS_PER_ROW * images, FEWEST_EPOCHS))
    return epochs, f"about {max(round(epochs * per_epoch, -2), 100):,} steps"


def _early_stop(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    return max(20, settings.training.epochs // 4), "a quarter of the epochs, at least 20"


def _learning_rate(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    return (3e-3, "a small network") if data.features <= FEW else (1e-3, "safe for these networks")


def _kl_warmup(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    return settings.training.epochs // 10, "a tenth of the epochs, against collapse"


def _input_noise(data: DataSummary, settings: Settings) -> tuple[Value, str] | None:
    if data.pixels:
        return None
    for strength, rows in ((0.2, FEW_ROWS), (0.1, SOME_ROWS)):
        if data.images < rows:
            return strength, f"fewer than {rows:,} rows are learned by heart"
    return 0.0, f"at least {SOME_ROWS:,} rows: enough without"


def _deform(data: DataSummary, settings: Settings) -> tuple[Value, str] | None:
    if not data.pixels or not data.augmentable or data.side < LEAST_DEFORMED:
        return None
    if data.images >= DEFORMED_BELOW:
        return 0.0, f"at least {DEFORMED_BELOW:,} images: enough without"
    return 0.1, f"fewer than {DEFORMED_BELOW:,} images"


def _mirror(data: DataSummary, settings: Settings) -> tuple[Value, str] | None:
    if not data.pixels or not data.side:
        return None
    if data.mirrored is None:
        return False, "too few images to tell"
    return data.mirrored >= ALIKE, f"{data.mirrored:.0%} of the images are most like a mirrored one"


def _boo_steps(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    if data.features <= FEW:
        return 10, "small images"
    return (30, "encoding with convolutions is costly") if _convolves(settings) else (100, "the usual number")


def _distill_weight(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    return 1.0, "an old image counts as much as a new one"


def _distill_latents(data: DataSummary, settings: Settings) -> tuple[Value, str]:
    if not data.pixels:
        return 250, "rows are quick to decode"
    if data.features <= FEW or _convolves(settings):
        return 50, "small images" if data.features <= FEW else "decoding with convolutions is costly"
    return 250, "as many as images in a batch"


MODEL: Mapping[str, Rule] = {
    "net": _net,
    "latent_dim": _latent_dim,
    "likelihood": _likelihood,
    "noise": _noise,
    "noise_floor": _noise_floor,
    "components": _components,
    "decoder_bounds": _decoder_bounds,
    "bound_samples": _bound_samples,
    "samples": _samples,
    "generated": _generated,
}
TASK: Mapping[str, Rule] = {
    "epoch_steps": _epoch_steps,
    "batch_size": _batch_size,
    "epochs": _epochs,
    "early_stop": _early_stop,
    "learning_rate": _learning_rate,
    "kl_warmup": _kl_warmup,
    "input_noise": _input_noise,
    "deform": _deform,
    "mirror": _mirror,
    "boo_steps": _boo_steps,
    "distill_weight": _distill_weight,
    "distill_latents": _distill_latents,
}
#: All settings that can be chosen.
CHOOSABLE = (*MODEL, *TASK)
