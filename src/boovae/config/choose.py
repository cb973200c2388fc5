"""Settings that follow from the size and kind of the data, where the user leaves them open: pure rules, no training."""

from __future__ import annotations

from dataclasses import dataclass

from boovae.config.resolve import recipe
from boovae.config.settings import Settings, Value, fitted_batch

#: Tasks of fewer images get the settings of the embedded digits, which are as small.
SMALL_TASK = 1000
SMALL_EPOCHS = 70
#: Steps that a larger task gets, as far as its limits on the epochs allow.
STEPS, FEWEST_EPOCHS, MOST_EPOCHS = 4000, 40, 200
#: Images of at most this many features are learned by a narrow network.
FEW_FEATURES = 256


@dataclass(frozen=True)
class DataSummary:
    """What the rules look at."""

    images: int
    """Training images of the task."""
    features: int
    """Numbers in one image."""
    grey: bool
    """Whether they are grey values; other numbers are standardised."""


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
        "decoder_bounds": data.grey,  # the range of other numbers grows from task to task
        "batch_size": batch_size,
        "epochs": epochs,
        "learning_rate": 3e-3 if small else 1e-3,
        "boo_steps": 10 if small else 100,
        "distill_latents": 50 if small else 250,
    }
