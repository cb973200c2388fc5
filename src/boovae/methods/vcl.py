"""`vcl`: variational continual learning (Nguyen, Li, Bui and Turner, 2018), without a coreset.

Every weight and bias of encoder and decoder is Gaussian (`model/bayesian.py`). The posterior over weights at the end of
a task is the prior of the next task; that of the first is N(0, 1):

    loss = −ELBO with noisy weights + w / n_t . Σ_i KL[N(μ_i, σ_i²) ‖ previous N(μ_i, σ_i²)],

n_t the images of the task: the loss is a mean over images, while the divergence counts once for all of them. Outputs of
the layers are sampled, not weights (local reparameterisation). Only the ELBO in training is noisy; all else uses the
means. The network holds the previous posterior when a task begins, so nothing else is stored.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from boovae.config import Settings
from boovae.config.section import NotNegative, Section
from boovae.errors import InputError
from boovae.methods.method import Method, TaskImages
from boovae.model import VAE, DiagonalNormal, Nets
from boovae.model.bayesian import gaussians, make_bayesian, noisy, recorded_shapes
from boovae.replicas import Batch, Draw, Replicas


@dataclass(frozen=True)
class VCLSettings(Section):
    """Gaussian weights."""

    vcl_weight: NotNegative = 1.0
    """Weight of the divergence to the previous posterior, times 1 / (images of the task)."""
    vcl_log_variance: float = -9.0
    """Log-variance of the weights at the start of the first task."""


class VCL(Method):
    """Gaussian weights, with the posterior of the previous task as prior."""

    name = "vcl"
    summary = "Gaussian weights; the posterior after one task is the prior of the next"
    sections = (VCLSettings,)
    search = MappingProxyType(
        {"vcl_weight": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0), "vcl_log_variance": (-12.0, -10.0, -9.0, -8.0, -7.0)}
    )
    unchosen = frozenset({"bound_samples"})
    clashes = MappingProxyType(
        dict.fromkeys(("ewc", "si"), "both keep the weights near their old values, vcl by their variances")
    )

    own: VCLSettings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.training.bound_samples > 1:
            raise InputError("{method=vcl} draws one output of a layer per image; set {bound_samples=1}")
        self._shapes: dict[str, tuple[int, ...]] = {}  # output shape of each Bayesian layer for one image

    def adapt(self, nets: Nets) -> Nets:
        """Make the weights Gaussian, except those that belong to a single task."""
        make_bayesian(nn.ModuleDict(nets._asdict()), self.own.vcl_log_variance, skip=self.private)
        return nets

    def begin_task(self, replicas: Replicas, task: TaskImages) -> None:
        """Use the current posterior of the weights as the prior of the task; the first has N(0, 1)."""
        if self.tasks_seen == 1:
            self._spread(replicas)
        model, sizes = replicas.model, (task.train.shape[-1], self.settings.model.latent_dim)
        image, latent = (torch.zeros(1, size, device=replicas.device) for size in sizes)
        with recorded_shapes(model) as self._shapes:
            model.posterior(image), model.decode(latent)
        now = replicas.map(gaussians)
        begin = torch.clone if self.tasks_seen > 1 else torch.zeros_like
        self.state = {"weight": self.strength("vcl_weight", replicas) / task.own_images}
        for name, normal in now.items():
            self.state |= {f"{name}.{part}": begin(tensor) for part, tensor in normal._asdict().items()}

    def _spread(self, replicas: Replicas) -> None:
        """Set each replica's own initial variances, if several are compared."""
        start = self.strength("vcl_log_variance", replicas)
        for name, parameter in replicas.parameters.items():
            if name.endswith(("weight_log_variance", "bias_log_variance")):
                parameter.copy_(start.view(-1, *[1] * (parameter.dim() - 1)).expand_as(parameter))

    def training_draws(self, batch_size: int) -> dict[str, Draw]:
        """Return the noise of every Bayesian layer's outputs."""
        return {name: Draw("normal", (batch_size, *shape)) for name, shape in self._shapes.items()}

    @contextmanager
    def perturbed(self, model: VAE, batch: Batch) -> Iterator[None]:
        """Let the layers use the noise, if there is any."""
        with noisy(model, batch):
            yield

    def penalty(self, model: VAE, batch: Batch) -> dict[str, Tensor]:
        """Return the divergence of the weights to the previous posterior, per image."""
        previous = batch["state"]
        total = sum(
            now.kl(DiagonalNormal(previous[f"{name}.mean"], previous[f"{name}.log_variance"])).sum()
            for name, now in gaussians(model).items()
        )
        return {"weights": previous["weight"] * total}
