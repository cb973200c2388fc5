"""The options of the experiments. Quick to import, for the help of the command line."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from boovae.config.section import AtLeastOne, Section, Share, WholeNumber
from boovae.errors import InputError

CurveName = Literal["exact", "none", "boo", "method", "scratch"]


@dataclass(frozen=True)
class Options(Section):
    """Options of which some are lists of what to compute."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in vars(self).items():
            if values == ():
                raise InputError(f"{{{name}}} is empty; name at least one, or leave it out for all")
            if isinstance(values, tuple) and len(set(values)) < len(values):
                raise InputError(f"{{{name}}} is {' '.join(values)}; name each once")


@dataclass(frozen=True)
class ToyOptions(Options):
    """Targets, objectives and seeds."""

    target: tuple[Literal["gaussians", "ring"], ...] = ("gaussians", "ring")
    """Densities to approximate."""
    objective: tuple[Literal["literal", "box", "floor", "forward"], ...] = ("literal", "box", "floor", "forward")
    """Objectives for learning a component."""
    components: Annotated[int, Meta(ge=2)] | None = None
    """Number of components; two for the Gaussians and eight for the ring if not given."""
    steps: AtLeastOne = 150
    """Gradient steps per component."""
    replicas: AtLeastOne = 5
    """Number of seeds."""
    seed: WholeNumber = 0
    """Seed of the first replica; the others count up from it."""


@dataclass(frozen=True)
class ReplayOptions(Options):
    """The classifier, and what replaces old images."""

    curve: tuple[CurveName, ...] = ("exact", "none", "boo", "method", "scratch")
    """What replaces old images: all of them, nothing, samples of boo, of --method, of a VAE trained from scratch."""
    classifier_epochs: AtLeastOne = 200
    """Epochs of the classifier per task."""
    classifier_batch: AtLeastOne = 500
    """Images per step of the classifier."""
    dropout: Share = 0.2
    """Dropout rate of the classifier."""
    reconstruct: bool = True
    """Also show the classifier reconstructions of current and test images, so that looks do not give away age."""
    samples_per_image: AtLeastOne = 100
    """Importance samples for p(class | x) of the generative classifier."""
