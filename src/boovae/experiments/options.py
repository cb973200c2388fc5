"""What the experiments can be asked for. Imports nothing that is slow: the command line's help shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from boovae.config.section import AtLeastOne, Section, Share, WholeNumber
from boovae.errors import InputError


@dataclass(frozen=True)
class ToyOptions(Section):
    """Targets, objectives, seeds."""

    target: tuple[Literal["gaussians", "ring"], ...] = ("gaussians", "ring")
    """What is approximated."""
    objective: tuple[Literal["literal", "box", "floor", "forward"], ...] = ("literal", "box", "floor", "forward")
    """How a component is learned."""
    components: Annotated[int, Meta(ge=2)] | None = None
    """How many components; two for the Gaussians and eight for the ring if not given."""
    steps: AtLeastOne = 150
    """Gradient steps per component."""
    replicas: AtLeastOne = 5
    """How many seeds at once."""
    seed: WholeNumber = 0
    """Seed of the first replica; the others follow by one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_listed("target", self.target)
        _check_listed("objective", self.objective)


@dataclass(frozen=True)
class ReplayOptions(Section):
    """The classifier, and what stands in for old images."""

    curve: tuple[Literal["exact", "none", "boo", "method", "scratch"], ...] = (
        "exact",
        "none",
        "boo",
        "method",
        "scratch",
    )
    """What stands in for the past: all images, nothing, samples of boo, of --method, of a fresh VAE each time."""
    classifier_epochs: AtLeastOne = 200
    """Epochs of the classifier per task."""
    classifier_batch: AtLeastOne = 500
    """Images per step of the classifier."""
    dropout: Share = 0.2
    """Share of the classifier's units that are dropped."""
    reconstruct: bool = True
    """Show the classifier current and test images as the generator does too, so that looks do not tell age."""
    samples_per_image: AtLeastOne = 100
    """Importance samples of the classifier that reads p(class | x) off the prior."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_listed("curve", self.curve)


def _check_listed(name: str, values: tuple[str, ...]) -> None:
    """Refuse an empty list, and one that names something twice."""
    if not values:
        raise InputError(f"{{{name}}} is empty; name at least one, or leave it out for all")
    if len(set(values)) < len(values):
        raise InputError(f"{{{name}}} is {' '.join(values)}; name each once")
