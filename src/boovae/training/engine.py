"""The hot path: gradient steps of all replicas, eager, compiled, or captured in a CUDA graph; and validation.

The same code runs everywhere. On a GPU one step is recorded as a CUDA graph and replayed: it reads the order of the images
and the noise of its step through a counter that lives on the device, so the host only launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from boovae.training.optim import adam_step
from boovae.training.replicas import Replicas
from boovae.vae import VAE

#: Steps whose noise is drawn at once; a checkpoint can be taken between two blocks.
BLOCK = 16
#: Most images per chunk of a validation pass.
VALIDATION_CHUNK = 1000

Batch = dict[str, Any]
Objective = Callable[[VAE, Batch], dict[str, Tensor]]


class Engine:
    """Trains the replicas on the images it was given by `load`.

    `objective(model, batch)` returns the named terms of one replica's loss on a batch, `"loss"` among them. A batch holds
    `x` (B, D), `weight` (B,) (adds up to one), `kl_weight` () and the random tensors of the step.
    """

    def __init__(self, replicas: Replicas, objective: Objective, *, compile: bool) -> None:
        self.replicas = replicas
        self.objective = objective
        self.captures = replicas.device.type == "cuda"
        self._make_moments()
        self.rate = torch.zeros(len(replicas), device=replicas.device)
        self.steps = torch.zeros(len(replicas), device=replicas.device)
        self.kl_weight = torch.ones(len(replicas), device=replicas.device)
        self._loss: Callable[..., Any] = self._stacked_loss if replicas.stacked else self._single_loss
        self._adam: Callable[..., None] = adam_step
        if compile:
            # A growing prior changes shapes once per task; beyond the limit torch would silently stop compiling.
            torch._dynamo.config.recompile_limit = 256
            self._loss = torch.compile(self._loss, dynamic=False)
            self._adam = torch.compile(adam_step, dynamic=False)

    def _make_moments(self) -> None:
        self.first = torch.zeros_like(self.replicas.values)
        self.second = torch.zeros_like(self.replicas.values)

    # --- what a task brings -------------------------------------------------------------------------------------

    def load(
        self,
        train: Tensor,
        valid: Tensor,
        batch_size: int,
        state: dict[str, Tensor],
        valid_noise: dict[str, Tensor],
    ) -> None:
        """Take the images of a task: (N, D) for all replicas alike, or (R, N, D).

        `state` holds what the method's penalty reads, {name: (R, ...)}; `valid_noise` {name: (R, chunks, ...)},
        drawn for chunks of `validation_chunk` images.
        """
        if self.first.shape != self.replicas.values.shape:  # the model has grown
            self._make_moments()
        self.train, self.state = train, state
        self.images = train.shape[-2]
        self.batch_size = min(batch_size, self.images)
        self.steps_per_epoch = self.images // self.batch_size
        self.valid_noise = valid_noise
        self._valid_parts = self._split_valid(valid, validation_chunk(valid.shape[-2]))
        self._weight = torch.full((len(self.replicas), self.batch_size), 1 / self.batch_size, device=train.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._valid_graph: torch.cuda.CUDAGraph | None = None
        self._order = torch.zeros(len(self.replicas), BLOCK, self.batch_size, dtype=torch.long, device=train.device)
        self._noise: dict[str, Tensor] = {}
        self._position = torch.zeros(1, dtype=torch.long, device=train.device)
        self._parameters = [
            {name: view.detach().requires_grad_() for name, view in self.replicas.layout.views(values).items()}
            for values in self._rows(self.replicas.values)
        ]
        views = self.replicas.layout.views
        self._moments = [
            (list(views(first).values()), list(views(second).values()))
            for first, second in zip(self._rows(self.first), self._rows(self.second), strict=True)
        ]
        self.reset_totals()

    def _rows(self, values: Tensor) -> list[Tensor]:
        """Return what one gradient call works on: all replicas stacked, or each replica by itself."""
        return [values] if self.replicas.stacked else list(values)

    def reset_optimiser(self, replica: int | None = None) -> None:
        """Forget Adam's moments, of one replica or of all."""
        chosen = slice(None) if replica is None else slice(replica, replica + 1)
        for tensor in (self.first, self.second, self.steps):
            tensor[chosen] = 0

    # --- training -----------------------------------------------------------------------------------------------

    def reset_totals(self) -> None:
        """Start the sums of an epoch's loss terms."""
        self.totals: dict[str, Tensor] = getattr(self, "totals", {})
        for total in self.totals.values():
            total.zero_()

    def run_block(self, order: Tensor, noise: dict[str, Tensor]) -> None:
        """Take the steps whose images are `order` (R, steps, B) and whose random tensors are `noise` {(R, steps, ...)}."""
        steps = order.shape[1]
        self._fill(order, noise)
        if self.captures and self._graph is None:
            self._graph = self._captured(self._step)
        for _ in range(steps):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()

    def _fill(self, order: Tensor, noise: Mapping[str, Tensor]) -> None:
        """Copy a block's order and noise to where the (possibly recorded) step reads them."""
        steps = order.shape[1]
        self._position.zero_()
        self._order[:, :steps] = order
        for name, tensor in noise.items():
            if name not in self._noise:
                shape = (tensor.shape[0], BLOCK, *tensor.shape[2:])
                self._noise[name] = torch.zeros(shape, device=tensor.device)
            self._noise[name][:, :steps] = tensor

    def _step(self) -> None:
        order = self._order.index_select(1, self._position).squeeze(1)
        noise = {name: tensor.index_select(1, self._position).squeeze(1) for name, tensor in self._noise.items()}
        batch = self._batch(_gather(self.train, order), self._weight, noise)
        self.steps += 1
        if self.replicas.stacked:
            terms = self._descend(0, batch, self.replicas.buffers, self.rate, self.steps)
        else:
            parts = []
            for r in range(len(self.replicas)):
                one = _slice(batch, r), _slice(self.replicas.buffers, r)
                parts.append(self._descend(r, *one, self.rate[r], self.steps[r]))
            terms = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        for name, term in terms.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros_like(term)
            self.totals[name] += term
        self._position += 1

    def _batch(self, x: Tensor, weight: Tensor, noise: dict[str, Tensor]) -> Batch:
        return {"x": x, "weight": weight, "kl_weight": self.kl_weight, "state": self.state, **noise}

    def _descend(
        self, row: int, batch: Batch, buffers: dict[str, Tensor], rate: Tensor, steps: Tensor
    ) -> dict[str, Tensor]:
        """One step of Adam for all stacked replicas or for one; return the loss terms."""
        parameters = self._parameters[row]
        with torch.enable_grad():
            loss, terms = self._loss(parameters, buffers, batch)
            gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            detached = [parameter.detach() for parameter in parameters.values()]
            self._adam(detached, gradients, *self._moments[row], rate, steps)
        return {name: term.detach() for name, term in terms.items()}

    def _single_loss(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        terms = self.replicas.call({**parameters, **buffers}, self.objective, batch)
        return terms["loss"], terms

    def _stacked_loss(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, terms = vmap(self._single_loss)(parameters, buffers, batch)
        return losses.sum(), terms  # the gradient of the sum is each replica's own gradient

    # --- validation ---------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, Tensor]:
        """Return the mean loss terms on the validation images, each (R,)."""
        if not self.captures:
            return self._validate()
        if self._valid_graph is None:
            self._valid_graph = self._captured(self._validate_into)
        self._valid_graph.replay()
        return self._valid_terms

    def _validate_into(self) -> None:
        self._valid_terms = self._validate()

    @torch.no_grad()
    def _validate(self) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = {}
        for part, (x, weight, share) in enumerate(self._valid_parts):
            noise = {name: tensor[:, part] for name, tensor in self.valid_noise.items()}
            terms = self.replicas.map(self.objective, self._batch(x, weight, noise))
            totals = {name: totals.get(name, 0) + share * term for name, term in terms.items()}
        return totals

    def _split_valid(self, valid: Tensor, chunk: int) -> list[tuple[Tensor, Tensor, float]]:
        """Cut the validation images into chunks of one size; the last is filled up with images of no weight."""
        parts = []
        for x in valid.split(chunk, dim=-2):
            images = x.shape[-2]
            weight = torch.zeros(len(self.replicas), chunk, device=x.device)
            weight[:, :images] = 1 / images
            x = torch.nn.functional.pad(x, (0, 0, 0, chunk - images))
            parts.append((x.expand(len(self.replicas), chunk, -1), weight, images / valid.shape[-2]))
        return parts

    # --- CUDA graphs --------------------------------------------------------------------------------------------

    def _captured(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record `function` as a CUDA graph; the warm-up runs it for real, so the state is put back afterwards."""
        state = [self.replicas.values, self.first, self.second, self.steps, self._position]
        kept = [tensor.clone() for tensor in state]
        totals = {name: total.clone() for name, total in self.totals.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._position.zero_()
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        for tensor, before in zip(state, kept, strict=True):
            tensor.copy_(before)
        for name, total in self.totals.items():
            total.copy_(totals.get(name, torch.zeros_like(total)))
        return graph


def validation_chunk(images: int) -> int:
    """Return into how large chunks a validation set of so many images is cut."""
    return min(images, VALIDATION_CHUNK)


def _gather(images: Tensor, order: Tensor) -> Tensor:
    """Return the images (R, B, D) that `order` (R, B) names; images are (N, D) or (R, N, D)."""
    replicas, batch = order.shape
    if images.dim() == 3:
        first = torch.arange(replicas, device=order.device).unsqueeze(1) * images.shape[1]
        order = order + first
        images = images.flatten(0, 1)
    return images.index_select(0, order.flatten()).view(replicas, batch, images.shape[-1])


def _slice(tensors: Any, replica: int) -> Any:
    """Return one replica's part of a nested dictionary of tensors (R, ...)."""
    if isinstance(tensors, dict):
        return {name: _slice(tensor, replica) for name, tensor in tensors.items()}
    return tensors[replica]
