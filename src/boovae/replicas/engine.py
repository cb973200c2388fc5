"""The hot path: gradient steps of all replicas, eager, compiled, or captured in a CUDA graph; and validation.

The same code runs everywhere. On a GPU one step is recorded as a CUDA graph and replayed: it reads the order of the
images and the noise of its step through a counter that lives on the device, so the host only launches.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from boovae.model.normalisation import follow, learning
from boovae.model.vae import VAE
from boovae.replicas.adam import adam_step
from boovae.replicas.randomness import Draw
from boovae.replicas.stacked import Replicas, replica_of, side_by_side

#: Steps whose noise is drawn at once; a checkpoint can be taken between two blocks.
BLOCK = 16
#: Random numbers of one replica that a block may hold.
BLOCK_VALUES = 2**27
#: Most images per chunk of a validation pass.
VALIDATION_CHUNK = 1000

Batch = dict[str, Any]
Objective = Callable[[VAE, Batch], dict[str, Tensor]]


class Step(NamedTuple):
    """The parameters before and after a step, and the gradients of the loss that led from one to the other."""

    before: dict[str, Tensor]
    gradients: dict[str, Tensor]
    after: dict[str, Tensor]


#: What takes note of a step in the method's state.
Track = Callable[[dict[str, Tensor], Step], None]


class Engine:
    """Trains the replicas on the images it was given by `load`.

    `objective(model, batch)` returns the named terms of one replica's loss on a batch, `"loss"` among them. A batch
    holds `x` (B, D), `weight` (B,) (adds up to one), `kl_weight` () and the random tensors of the step.
    """

    def __init__(
        self, replicas: Replicas, objective: Objective, *, track: Track | None = None, compile: bool = False
    ) -> None:
        self.replicas = replicas
        self.objective = objective
        self.track = track
        self.captures = replicas.device.type == "cuda"
        #: Whether gradients are taken by `torch.func`, which compiles and can be recorded.
        self.functional = compile or self.captures
        self._make_moments()
        self.rate = torch.zeros(len(replicas), device=replicas.device)
        self.steps = torch.zeros(len(replicas), device=replicas.device)
        self.kl_weight = torch.ones(len(replicas), device=replicas.device)
        self._descend: Callable[..., dict[str, Tensor]] = self._plain_descend
        self._compiled_descend = self._plain_descend
        if compile:
            # A growing prior changes shapes now and then; beyond the limit torch would silently stop compiling.
            torch._dynamo.config.recompile_limit = 256
            self._compiled_descend = torch.compile(self._plain_descend)

    def _make_moments(self) -> None:
        self.first, self.second = (
            {name: torch.zeros_like(tensor) for name, tensor in self.replicas.parameters.items()} for _ in range(2)
        )

    # --- what a task brings -------------------------------------------------------------------------------------

    def load(
        self,
        train: Tensor,
        valid: Tensor,
        batch_size: int,
        state: dict[str, Tensor],
        valid_noise: dict[str, Tensor],
        *,
        settled: bool = True,
        block: int = BLOCK,
    ) -> None:
        """Take the images of a task: (N, D) for all replicas alike, or (R, N, D).

        A step that will have another form in the next task (not `settled`) is not worth compiling.

        `state` holds what the method's penalty reads, {name: (R, ...)}; `valid_noise` {name: (R, chunks, ...)},
        drawn for chunks of `validation_chunk` images. A block has at most `block` steps.
        """
        if any(self.first[name].shape != tensor.shape for name, tensor in self.replicas.parameters.items()):
            self._make_moments()  # the model has grown
        self._descend = self._compiled_descend if settled else self._plain_descend
        self.train, self.state = train, state
        self.images = train.shape[-2]
        self.batch_size = min(batch_size, self.images)
        self.steps_per_epoch = self.images // self.batch_size
        self.valid_noise = valid_noise
        self._valid_parts = self._split_valid(valid, validation_chunk(valid.shape[-2]))
        self._weight = torch.full((len(self.replicas), self.batch_size), 1 / self.batch_size, device=train.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._valid_graph: torch.cuda.CUDAGraph | None = None
        self._block: dict[str, Tensor] = {}
        self._block_steps = block
        self._position = torch.zeros(1, dtype=torch.long, device=train.device)
        replicas = self.replicas
        learned = (replicas.parameters, self.first, self.second, replicas.buffers, self.rate, self.steps)
        self._rows = [learned] if replicas.stacked else [replica_of(learned, r) for r in range(len(replicas))]
        self._active = tuple(range(len(replicas)))
        self._resting = torch.full((), torch.nan, device=train.device)
        self.reset_totals()

    def attend(self, active: Sequence[int]) -> None:
        """Let only these replicas take steps; the loss terms of the others are NaN. Stacked ones go on, unasked for."""
        if not self.replicas.stacked and tuple(active) != self._active:
            self._active = tuple(active)
            self._graph = None

    def reset_optimiser(self, replica: int | None = None) -> None:
        """Forget Adam's moments, of one replica or of all."""
        chosen = slice(None) if replica is None else slice(replica, replica + 1)
        for tensor in (*self.first.values(), *self.second.values(), self.steps):
            tensor[chosen] = 0

    # --- training -----------------------------------------------------------------------------------------------

    def reset_totals(self) -> None:
        """Start the sums of an epoch's loss terms."""
        self.totals: dict[str, Tensor] = getattr(self, "totals", {})
        for total in self.totals.values():
            total.zero_()

    def run_block(self, order: Tensor, noise: dict[str, Tensor]) -> None:
        """Take the steps with images `order` (R, steps, B) and random tensors `noise` {name: (R, steps, ...)}."""
        block = {"order": order, **noise}
        if not self.captures:
            for step in range(order.shape[1]):
                # Copied, for compiled code asks for the same strides in a block of any length.
                self._step({name: tensor[:, step].contiguous() for name, tensor in block.items()})
            return
        self._fill(block)
        if self._graph is None:
            self._graph = self._captured(self._recorded_step)
        for _ in range(order.shape[1]):
            self._graph.replay()

    def _fill(self, block: Mapping[str, Tensor]) -> None:
        """Copy a block to where the recorded step reads it; a block may be shorter than the room there is."""
        self._position.zero_()
        for name, tensor in block.items():
            if name not in self._block:
                self._block[name] = tensor.new_zeros(tensor.shape[0], self._block_steps, *tensor.shape[2:])
            self._block[name][:, : tensor.shape[1]] = tensor

    def _recorded_step(self) -> None:
        self._step({name: room.index_select(1, self._position).squeeze(1) for name, room in self._block.items()})
        self._position.add_(1).remainder_(self._block_steps)

    def _step(self, draws: dict[str, Tensor]) -> None:
        """One step of all replicas; `draws` holds the order (R, B) of the images and the noise {name: (R, ...)}."""
        noise = {name: tensor for name, tensor in draws.items() if name != "order"}
        batch = self._batch(_gather(self.train, draws["order"]), self._weight, noise)
        self.steps += 1
        if self.replicas.stacked:
            terms = self._descend(*self._rows[0], batch)
        else:
            steps = [functools.partial(self._descend, *self._rows[r], replica_of(batch, r)) for r in self._active]
            done = dict(zip(self._active, side_by_side(self.replicas.device, steps), strict=True))
            rows = [done.get(r) for r in range(len(self.replicas))]
            names = done[self._active[0]]
            terms = {name: torch.stack([row[name] if row else self._resting for row in rows]) for name in names}
        for name, term in terms.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros_like(term)
            self.totals[name] += term

    def _batch(self, x: Tensor, weight: Tensor, noise: dict[str, Tensor]) -> Batch:
        return {"x": x, "weight": weight, "kl_weight": self.kl_weight, "state": self.state, **noise}

    @torch.no_grad()
    def _plain_descend(
        self,
        parameters: dict[str, Tensor],
        first: dict[str, Tensor],
        second: dict[str, Tensor],
        buffers: dict[str, Tensor],
        rate: Tensor,
        steps: Tensor,
        batch: Batch,
    ) -> dict[str, Tensor]:
        """One step of Adam for all stacked replicas (`rate` (R,)) or for one (`rate` ()); return the loss terms."""
        gradients, terms, statistics = self._gradients(parameters, buffers, batch, stacked=rate.dim() == 1)
        before = {name: tensor.clone() for name, tensor in parameters.items()} if self.track is not None else {}
        p, g, m, v = ([tensors[name] for name in parameters] for tensors in (parameters, gradients, first, second))
        adam_step(p, g, m, v, rate, steps)
        follow(buffers, statistics)
        if self.track is not None:
            self.track(batch["state"], Step(before, gradients, after=parameters))
        return terms

    def _gradients(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch, *, stacked: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Return gradients, loss terms and batch statistics of all stacked replicas, or of one."""
        if self.functional:
            gradient_of = grad(self._loss, has_aux=True)
            gradients, (terms, statistics) = (vmap(gradient_of) if stacked else gradient_of)(parameters, buffers, batch)
            return gradients, terms, statistics
        # The same numbers by plain autograd: on small networks a quarter less overhead.
        with torch.enable_grad():
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
            loss, (terms, statistics) = (vmap(self._loss) if stacked else self._loss)(leaves, buffers, batch)
            found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        terms = {name: term.detach() for name, term in terms.items()}
        return dict(zip(leaves, found, strict=True)), terms, statistics

    def _loss(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch
    ) -> tuple[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """Return the loss of one replica; beside it its terms, and the statistics that its networks saw."""
        terms, statistics = self.replicas.call({**parameters, **buffers}, self._learned, batch)
        return terms["loss"], (terms, statistics)

    def _learned(self, model: VAE, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        with learning(model) as statistics:
            terms = self.objective(model, batch)
        return terms, statistics

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
        """Record `function` as a CUDA graph; recording runs it for real, so the state is put back afterwards."""
        dictionaries = (self.replicas.tensors(), self.first, self.second)
        state = [tensor for tensors in dictionaries for tensor in tensors.values()] + [self.steps, self._position]
        if self.track is not None:
            state += self.state.values()
        kept = [tensor.clone() for tensor in state]
        totals = {name: total.clone() for name, total in self.totals.items()}
        graph = capture(function)
        for tensor, before in zip(state, kept, strict=True):
            tensor.copy_(before)
        for name, total in self.totals.items():
            total.copy_(totals.get(name, torch.zeros_like(total)))
        return graph


def capture(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record `function` as a CUDA graph, after running it a few times.

    Warm-up and recording share one stream that lives as long as the process: cuBLAS keeps a workspace per stream, and
    one that was made while recording would die with its graph and be used by the next.
    """
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()  # freeing an old graph while another is recorded breaks both
    try:
        with torch.cuda.graph(graph, stream=stream):
            function()
    finally:
        gc.enable()
    return graph


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def block_length(draws: Mapping[str, Draw]) -> int:
    """Return for how many steps random numbers are drawn at once: fewer where a step wants many."""
    values = sum(math.prod(draw.shape) for draw in draws.values())
    return max(1, min(BLOCK, BLOCK_VALUES // max(values, 1)))


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
    return images.index_select(0, order.reshape(-1)).view(replicas, batch, images.shape[-1])
