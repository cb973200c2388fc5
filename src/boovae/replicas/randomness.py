"""Random numbers as tensors, drawn outside the loss.

Every draw starts from a seed made of (replica seed, task, epoch, block, purpose), so a run can be resumed at any
block, replicas never share a stream, and the first tasks of a long run equal those of a short one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """A random tensor that a loss needs for one step of one replica."""

    kind: Literal["normal", "uniform"]
    shape: tuple[int, ...]


def latent_draws(count: int, latent_dim: int, name: str = "") -> dict[str, Draw]:
    """Return the draws that sample `count` latents from a prior: the choice of components and the noise in them."""
    return {f"{name}uniform": Draw("uniform", (count,)), f"{name}normal": Draw("normal", (count, latent_dim))}


def seed_for(*key: int | str) -> int:
    """Return a 63-bit seed for a key, the same on every machine.

    >>> seed_for(0, "order") == seed_for(0, "order"), seed_for(0, "order") == seed_for(1, "order")
    (True, False)
    """
    plain = tuple(part if isinstance(part, str) else int(part) for part in key)  # NumPy's integers print otherwise
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Generators:
    """One generator per replica."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.seeds = tuple(seeds)
        self.device = device
        self._generators = [torch.Generator(device) for _ in seeds]

    def draw(self, draw: Draw, *key: int | str, steps: int | None = None) -> Tensor:
        """Return (R, [steps,] *shape), each replica's part from its own stream for `key`."""
        shape = draw.shape if steps is None else (steps, *draw.shape)
        result = torch.empty(len(self.seeds), *shape, device=self.device)
        for row, generator, seed in zip(result, self._generators, self.seeds, strict=True):
            generator.manual_seed(seed_for(seed, *key))
            if draw.kind == "normal":
                row.normal_(generator=generator)
            else:
                row.uniform_(generator=generator)
        return result

    def draw_all(self, draws: Mapping[str, Draw], *key: int | str, steps: int | None = None) -> dict[str, Tensor]:
        """Return one tensor per named draw."""
        return {name: self.draw(draw, *key, name, steps=steps) for name, draw in draws.items()}

    def order(self, images: int, *key: int | str) -> Tensor:
        """Return a permutation of the images for each replica, (R, images)."""
        return self.draw(Draw("uniform", (images,)), *key, "order").argsort(dim=1, stable=True)
