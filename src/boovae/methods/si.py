"""`si`: synaptic intelligence (Zenke, Poole and Ganguli, 2017).

While a task is learned, every weight is credited with its contribution to the decrease of the loss, a path integral
over the optimiser's steps:

    ω_i = Σ_steps −g_i . (θ_i after − θ_i before),

with g the gradient of the step's loss without this method's own penalty. When the task ends, the weight's importance
grows by

    Ω_i ← Ω_i + max(ω_i, 0) / (Δ_i² + ξ),  Δ = θ at the end − θ at the start of the task,

with ξ = `si_damping`, and later tasks pay

    c . Σ_i Ω_i (θ_i − θ̃_i)²

with c = `si_strength` and θ̃ the weights at the end of the previous task. These are the weights a task starts from, so
only Ω is stored.

Where it differs from the paper:

- The gradient is that of one batch with one latent sample per image, and the updates are Adam's: the sum overestimates
  the integral, as the paper notes for any stochastic gradient.
- Steps use the total gradient, so that of this penalty, 2 c Ω (θ − θ̃), is subtracted. Penalties of other methods in a
  combination are included: lowering them earns credit too.
- The end of a task is its best snapshot, not its last step. ω, Δ and θ̃ all belong to that snapshot: ω is saved and
  restored with the weights, so it is the integral along the path from the start to exactly these weights. Steps after
  the best snapshot earn no credit, in particular those of a stopped replica that is trained along with the others.
  After a divergence the path continues from the restored snapshot.
- Negative credit is clamped to zero, so that the penalty cannot reward moving away; the paper does not mention it.
- Ω sums means over images: all tasks have the same weight, regardless of their sizes, as in the paper.
- Only parameters shared by all tasks are penalised: not the prior's, not the heads of single tasks.
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from boovae.config.section import NotNegative, Positive, Section
from boovae.methods.ewc import squared_drift
from boovae.methods.method import Method, TaskImages
from boovae.model import VAE
from boovae.replicas import Batch, Replicas, Step


@dataclass(frozen=True)
class SISettings(Section):
    """The quadratic penalty and its importances."""

    si_strength: NotNegative = 30.0
    """Weight of the quadratic penalty."""
    si_damping: Positive = 0.1
    """Keeps parameters that hardly moved from becoming infinitely important."""


class SI(Method):
    """Penalises changes of each weight in proportion to its contribution to earlier tasks."""

    name = "si"
    summary = "keeps each weight near its old value, in proportion to its contribution to earlier tasks"
    sections = (SISettings,)
    search = MappingProxyType({"si_strength": (0.01, 0.1, 1.0, 10.0, 100.0)})
    settled_by = 2
    tracks = True

    own: SISettings

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Start the path at the current weights."""
        shared = self.shared(replicas.parameters)
        self.state = {f"path.{name}": torch.zeros_like(tensor) for name, tensor in shared.items()}
        self.state |= {f"anchor.{name}": tensor.clone() for name, tensor in shared.items()}
        self.state |= {name: importance.clone() for name, importance in self.memory.items()}
        self.state["strength"] = self.strength("si_strength", replicas)

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return c . Σ_i Ω_i (θ_i − θ̃_i)²; nothing in the first task."""
        state: dict[str, Tensor] = batch["state"]
        if not any(name.startswith("importance.") for name in state):
            return {}
        return {"drift": state["strength"] * squared_drift(model, state, "importance")}

    def track(self, state: dict[str, Tensor], step: Step) -> None:
        """Credit every weight with −g . Δθ of the step."""
        for name, old in step.before.items():
            if f"path.{name}" not in state:
                continue
            gradient = step.gradients[name]
            if f"importance.{name}" in state:
                pull = state[f"importance.{name}"] * (old - state[f"anchor.{name}"])
                axes = (...,) + (None,) * (pull.dim() - state["strength"].dim())
                gradient = gradient - 2 * state["strength"][axes] * pull
            state[f"path.{name}"].sub_(gradient * (step.after[name] - old))

    def end_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Turn the credit along the path into importance."""
        for name, theta in self.shared(replicas.parameters).items():
            path, moved = self.state[f"path.{name}"], theta - self.state[f"anchor.{name}"]
            importance, before = path.clamp(min=0) / (moved.square() + self.own.si_damping), f"importance.{name}"
            self.memory[before] = self.memory.get(before, torch.zeros_like(theta)) + importance

    def memory_shapes(self, replicas: Replicas, tasks: int, pixels: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the importances: those of the parameters."""
        return self.shapes_of(replicas, "importance") if tasks else {}
