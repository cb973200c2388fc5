"""Default settings that follow from the size and kind of the data: pure rules, no training."""

from __future__ import annotations

from dataclasses import dataclass

from boovae.config.resolve import recipe
from boovae.config.settings import Settings, Value, fitted_batch

#: Tasks with fewer images get the settings of the embedded digits, a dataset of that size.
SMALL_TASK = 1000
SMALL_EPOCHS = 70
#: Steps of a larger task, as far as the limits on its epochs allow.
STEPS, FEWEST_EPOCHS, MOST_EPOCHS = 4000, 40, 200
#: Images with at most this many features get a narrow network.
FEW_FEATURES = 256


@dataclass(frozen=True)
class DataSummary:
    """The facts about the data that the rules use."""

    images: int
    """Training images of the task."""
    features: int
    """Numbers in one image."""
    grey: bool
    """Whether they are grey values; other values are standardised."""


def settings_for(data: DataSummary) -> dict[str, Value]:
    """Return the settings that suit the data, by name.

    >>> settings_for(DataSummary(images=150, features=64, grey=True))["net"]
    'mlp:128'
    """
    batch_size = fitted_batch(data.images, Settings().training.batch_size, recipe("own_data")["epoch_steps"])
    small = data.images < SMALL_TASK
    epochs = SMALL_EPOCHS if small else min(max(STEPS * batch_size // data.images, FEWEST_EPOCHS), MOST_EPOCHS)
    return {
        "latent_dim": min(max(data.features // 6, 2), 40),
        "net": "mlp:128" if data.features <= FEW_FEATURES else "mlp:300",
        "likelihood": "bernoulli" if data.grey else "normal",
        "decoder_bounds": data.grey,  # the range of standardised values grows from task to task
        "batch_size": batch_size,
        "epochs": epochs,
        "learning_rate": 3e-3 if small else 1e-3,
        "boo_steps": 10 if small else 100,
        "distill_latents": 50 if small else 250,
    }
