"""`boo-flow`: the boosted prior behind a flow (the appendix of the BooVAE paper, which reports no numbers).

The base mixture is boosted in v-space, where codes are f⁻¹(z), by the steps of `boo`; the flow z = f(v) learns with the
networks by the ELBO. Stored components lie in v-space, and later tasks change f, so their images in z-space would
drift. From the second task on, a penalty therefore keeps f fixed at old components:

    flow_drift . (images before / images now) . E_v‖f(v) − f_old(v)‖²,  v of the mixture of all finished tasks.

In combination with `distill` the decoder is kept there too.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from boovae.config import Settings
from boovae.config.section import AtLeastOne, NotNegative, Section, WholeNumber
from boovae.errors import InputError, SettingError
from boovae.methods.boo import Boo
from boovae.methods.method import TaskImages
from boovae.model import VAE, Prior
from boovae.model.priors.flow import FlowPrior
from boovae.replicas import Batch, Draw, Replicas, latent_draws

#: Number of samples of old components per step, at which the flow is kept fixed.
PLACES = 250


@dataclass(frozen=True)
class FlowSettings(Section):
    """The flow in front of the boosted prior."""

    flow_layers: WholeNumber = 4
    """Affine couplings of the flow; 0 is the identity."""
    flow_width: AtLeastOne = 128
    """Hidden units of a coupling."""
    flow_drift: NotNegative = 10.0
    """Weight of the squared distance the flow moves old components, times (images before / images now)."""


class BooFlow(Boo):
    """A boosted prior whose latents pass through a learned flow."""

    name = "boo-flow"
    summary = "the boosted prior behind a flow that learns with the networks and is kept fixed at old components"
    sections = (*Boo.sections, FlowSettings)
    search = MappingProxyType({})  # without the paper's penalties
    strength_name = "boo_lambda"
    clashes = MappingProxyType({"multihead": "one flow cannot follow a separate encoder for each task"})

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.flow = settings.of(FlowSettings)
        self.settled_by = 2
        if settings.model.latent_dim < 2 and self.flow.flow_layers > 0:
            raise SettingError("latent_dim", settings.model.latent_dim, "at least 2 for a flow; or set {flow_layers=0}")
        if self.fitting.boo_objective == "literal" or self.fitting.boo_weights in ("bisection", "sgd"):
            remedy = "set {boo_objective=corrective} (or forward) and {boo_weights=em}"
            raise InputError(f"method 'boo-flow' fits to samples, the target has no density: {remedy}")
        if "full" in (self.fitting.boo_target, self.fitting.boo_mixture):
            raise InputError("method 'boo-flow': set {boo_target=current} and {boo_mixture=current}")
        if self.own.boo_lambda > 0:
            remedy = "set {boo_lambda=0}, and use boo-flow+distill to preserve the networks"
            raise InputError(f"method 'boo-flow' keeps old components by {{flow_drift}}: {remedy}")

    def prior_of(self, *sizes: int, **options: Any) -> Prior:
        """Return a mixture behind a flow."""
        return FlowPrior(*sizes, layers=self.flow.flow_layers, width=self.flow.flow_width, **options)

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Keep a frozen copy of the flow, then begin as `boo` does."""
        if self.flow.flow_layers > 0:
            self.hold_to_past("flow_drift", replicas, task, "prior.flow.")
        super().begin_task(replicas, task)

    def draws(self, batch_size: int) -> dict[str, Draw]:
        """Return the draws that sample old components."""
        if self.tasks_seen < 2 or self.flow.flow_layers == 0:
            return {}
        return latent_draws(PLACES, self.settings.model.latent_dim, "place_")

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted mean squared distance by which the flow has moved old samples."""
        state = batch["state"]
        if not state:
            return {}
        draws = batch["place_uniform"], batch["place_normal"]
        v = FlowPrior.of(model).before(model.posterior).base.sample(*draws).detach()
        old = self.teacher.answer(model, state, _moved, v)
        return {"drift": state["weight"] * (_moved(model, v) - old).square().sum(-1).mean()}


def _moved(model: VAE, v: Tensor) -> Tensor:
    return FlowPrior.of(model).outward(v)
