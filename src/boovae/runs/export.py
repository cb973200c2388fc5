"""Export a trained model as files that need no boovae: encoder, decoder and a sampler of the prior.

Three networks of one replica, in the units of the data, all with a dynamic batch size:

    encoder: images (n, D) -> mean (n, L), log_variance (n, L) of q(z | x)
    decoder: latents (n, L) -> mean images (n, D)
    sampler: uniform (n,), normal (n, L) random numbers -> mean images (n, D) of latents from the prior

`safetensors` writes their weights and the prior's components; `torch-export` and `onnx` write programs.
"""

import copy
import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import boovae
from boovae.errors import InputError
from boovae.files import write_file
from boovae.model.distributions import DiagonalMixture, StandardNormal
from boovae.model.likelihood_base import Likelihood
from boovae.model.priors.boosted import EMPTY
from boovae.replicas.stacked import replica_of
from boovae.report.outputs import prepared
from boovae.training.events import Event
from boovae.training.trainer import Trainer

Format = Literal["safetensors", "torch-export", "onnx"]
#: What each network takes, with the axes, and what it gives.
INTERFACE: dict[str, tuple[dict[str, list[str]], list[str]]] = {
    "encoder": ({"images": ["n", "pixels"]}, ["mean", "log_variance"]),
    "decoder": ({"latents": ["n", "latent_dim"]}, ["images"]),
    "sampler": ({"uniform": ["n"], "normal": ["n", "latent_dim"]}, ["images"]),
}


class Scaled(nn.Module):
    """Base of encoder and decoder: a network, its likelihood, and the scaling between data and model."""

    centre: Tensor  # (D,) or ()
    scale: Tensor

    def __init__(self, net: nn.Module, likelihood: Likelihood, centre: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.likelihood = likelihood
        self.register_buffer("centre", centre)
        self.register_buffer("scale", scale)
        self.net = net


class Encoder(Scaled):
    """Maps images to the parameters of their posterior."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance, each (n, L), of images (n, D)."""
        mean, log_variance = self.net((images - self.centre) / self.scale)
        return mean, log_variance


class Decoder(Scaled):
    """Maps latents to mean images."""

    def forward(self, latents: Tensor) -> Tensor:
        """Return images (n, D) of latents (n, L)."""
        return self.likelihood.mean(self.net(latents)) * self.scale + self.centre


class Sampler(nn.Module):
    """Maps random numbers to images: a latent from the prior, then the decoder.

    Its buffers are the tensors of a mixture without empty slots; a standard normal has none.
    """

    log_weights: Tensor  # (C,)
    mean: Tensor  # (C, L)
    log_variance: Tensor  # (C, L)

    def __init__(self, decoder: Decoder, prior: DiagonalMixture | StandardNormal) -> None:
        super().__init__()
        self.decoder = decoder
        self.mixture = isinstance(prior, DiagonalMixture)
        if isinstance(prior, DiagonalMixture):
            kept = prior.log_weights > EMPTY / 2
            for name, tensor in prior._asdict().items():
                self.register_buffer(name, tensor[kept].clone())

    def forward(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return images (n, D) from uniform (n,) and standard normal (n, L) random numbers."""
        latents = normal
        if self.mixture:
            latents = DiagonalMixture(self.log_weights, self.mean, self.log_variance).sample(uniform, normal)
        images: Tensor = self.decoder(latents)
        return images


@torch.no_grad()
def networks(trainer: Trainer, replica: int, task: int | None, head: Event) -> dict[str, nn.Module]:
    """Return encoder, decoder and sampler of one replica, on the CPU; `head` is the run's first event."""
    method = trainer.method
    if not trainer.tasks_done:
        raise InputError("no task is finished yet, so there is nothing to export: continue the run with `boovae train`")
    if method.knows_task and task is None:
        raise InputError(f"method '{method.name}' has a network per task: choose one with {{task}}")
    view = trainer.replicas if task is None else method.view(trainer.replicas, task)
    model = copy.deepcopy(view.model)
    model.load_state_dict(replica_of(view.tensors(), replica))
    model = model.cpu().eval()
    estimator = head.get("estimator", {})
    centre, scale = torch.tensor(estimator.get("centre") or 0.0), torch.tensor(estimator.get("scale") or 1.0)
    prior = model.prior(model.posterior, task)
    if not isinstance(prior, (DiagonalMixture, StandardNormal)):
        raise InputError(f"the prior of method '{method.name}' cannot be exported")
    encoder = Encoder(model.encoder, model.likelihood, centre, scale)
    decoder = Decoder(model.decoder, model.likelihood, centre, scale)
    return {"encoder": encoder, "decoder": decoder, "sampler": Sampler(decoder, prior)}


def export(
    trainer: Trainer, head: Event, folder: Path, form: Format, *, replica: int = 0, task: int | None = None
) -> list[Path]:
    """Write a model to `folder` and return the files; `model.json` beside them describes inputs and outputs."""
    nets = networks(trainer, replica, task, head)
    prepared(folder)
    files = _weights(nets, folder) if form == "safetensors" else _programs(nets, folder, trainer, form)
    card = folder / "model.json"
    write_file(card, json.dumps(_card(trainer, form, replica, task, files), indent=1).encode())
    return [*files, card]


def _card(trainer: Trainer, form: str, replica: int, task: int | None, files: list[Path]) -> dict[str, Any]:
    settings = trainer.settings.flat()
    return {
        "boovae": boovae.__version__,
        "format": form,
        "files": [path.name for path in files],
        **{name: settings[name] for name in ("method", "net", "likelihood", "noise", "noise_floor")},
        **{name: settings[name] for name in ("latent_dim", "log_variance_range")},
        "image_shape": list(trainer.spec.shape),
        "tasks": trainer.tasks_done,
        "task": task,
        "seed": trainer.replicas.seeds[replica],
        **{name: {"takes": takes, "gives": gives} for name, (takes, gives) in INTERFACE.items()},
    }


# --- the formats ----------------------------------------------------------------------------------------------------


def _weights(nets: dict[str, nn.Module], folder: Path) -> list[Path]:
    """Write encoder.*, decoder.* and prior.* of the model, and centre and scale of the data, into one safetensors."""
    from safetensors.torch import save

    encoder, sampler = nets["encoder"], nets["sampler"]
    tensors = {name.replace("net.", "encoder.", 1): tensor for name, tensor in encoder.state_dict().items()}
    tensors |= {f"decoder.{name}": tensor for name, tensor in sampler.get_submodule("decoder.net").state_dict().items()}
    tensors |= {f"prior.{name}": tensor for name, tensor in sampler.named_buffers(recurse=False)}
    path = folder / "model.safetensors"
    write_file(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    return [path]


def _programs(nets: dict[str, nn.Module], folder: Path, trainer: Trainer, form: Format) -> list[Path]:
    """Write one program per network, each under a temporary name first.

    `torch.export.load(path).module()` runs one of torch-export.
    """
    if form == "onnx" and not find_spec("onnxscript"):  # torch's exporter needs it
        raise InputError("{format} onnx needs packages that are not installed: pip install 'boovae[onnx]'")
    sizes = {"n": 3, "pixels": math.prod(trainer.spec.shape), "latent_dim": trainer.settings.model.latent_dim}
    paths = []
    for name, net in nets.items():
        path = folder / f"{name}{'.onnx' if form == 'onnx' else '.pt2'}"
        temporary = path.with_name(f".{path.name}")
        takes, gives = INTERFACE[name]
        arguments = tuple(torch.zeros([sizes[axis] for axis in axes]) for axes in takes.values())
        rows = torch.export.Dim("n", min=1)
        shapes = tuple({0: rows} for _ in arguments)
        if form == "onnx":
            names: dict[str, Any] = {"input_names": list(takes), "output_names": gives, "dynamic_shapes": shapes}
            with _quiet():
                torch.onnx.export(net, arguments, temporary, **names, dynamo=True, external_data=False, verbose=False)
        else:
            torch.export.save(torch.export.export(net, arguments, dynamic_shapes=shapes), temporary)
        temporary.replace(path)
        paths.append(path)
    return paths


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's log messages and warnings."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
