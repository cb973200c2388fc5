"""The hot path: train all replicas on a task, eagerly, compiled, or captured in a CUDA graph; and validate.

The same code runs on every device. On a GPU one step is recorded as a CUDA graph and replayed: it reads the order of
the images and the noise of its step through a counter on the device, so the host only launches.
"""

import functools
import gc
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from boovae.replicas.adam import Moments
from boovae.replicas.randomness import Draw
from boovae.replicas.stacked import replica_of, side_by_side
from boovae.replicas.step import Batch, GradientStep

#: Number of steps whose noise is drawn at once; checkpoints are written between two blocks.
BLOCK = 16
#: Maximum number of random numbers per replica in a block.
BLOCK_VALUES = 2**27
#: Maximum number of images per chunk of a validation pass.
VALIDATION_CHUNK = 1000


class Engine:
    """Trains the replicas on the images of one task.

    A batch holds `x` (B, D), `weight` (B,) (sums to one), `kl_weight` (), `state` and the random tensors of a step.
    """

    def __init__(
        self,
        step: GradientStep,
        train: Tensor,
        valid: Tensor,
        batch_size: int,
        state: dict[str, Tensor],
        valid_noise: dict[str, Tensor],
        *,
        moments: Moments | None = None,
        totals: dict[str, Tensor] | None = None,
        settled: bool = True,
        block: int = BLOCK,
    ) -> None:
        """Prepare the steps of a task; images are (N, D), the same for all replicas, or (R, N, D).

        `state` holds the tensors that the method's penalty reads, {name: (R, ...)}; `valid_noise` {name: (R, chunks,
        ...)} is drawn for chunks of `validation_chunk` images. `moments` and `totals`, the sums of an epoch's loss
        terms, belong to the caller, who saves them. A block has at most `block` steps. A step that will have another
        form in the next task (not `settled`) is not compiled.
        """
        self.step, self.replicas = step, step.replicas
        self.train, self.state, self.valid_noise = train, state, valid_noise
        self.moments = Moments.zeros(self.replicas.parameters) if moments is None else moments
        self.totals: dict[str, Tensor] = {} if totals is None else totals
        self.images = train.shape[-2]
        self.batch_size = min(batch_size, self.images)
        self.steps_per_epoch = self.images // self.batch_size
        count, device = len(self.replicas), train.device
        self.rate, self.kl_weight = torch.zeros(count, device=device), torch.ones(count, device=device)
        self._descend: Callable[..., dict[str, Tensor]] = step.compiled if settled else step.plain
        self._valid_parts = self._split_valid(valid, validation_chunk(valid.shape[-2]))
        self._weight = torch.full((count, self.batch_size), 1 / self.batch_size, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._valid_graph: torch.cuda.CUDAGraph | None = None
        self._block: dict[str, Tensor] = {}
        self._block_steps = block
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        learned = (self.replicas.parameters, self.moments, self.replicas.buffers, self.rate)
        self._rows = [learned] if self.replicas.stacked else [replica_of(learned, r) for r in range(count)]
        self._active = tuple(range(count))
        self._resting = torch.full((), torch.nan, device=device)

    def set_active(self, active: Sequence[int]) -> None:
        """Train only these replicas; the loss terms of the others are NaN. Stacked replicas are all trained."""
        if not self.replicas.stacked and tuple(active) != self._active:
            self._active = tuple(active)
            self._graph = None

    # --- training -----------------------------------------------------------------------------------------------

    def reset_totals(self) -> None:
        """Reset the sums of an epoch's loss terms."""
        for total in self.totals.values():
            total.zero_()

    def run_block(self, order: Tensor, noise: dict[str, Tensor]) -> None:
        """Take the steps with images `order` (R, steps, B) and random tensors `noise` {name: (R, steps, ...)}."""
        block = {"order": order, **noise}
        if not self.step.captures:
            for step in range(order.shape[1]):
                # Copied, because compiled code needs the same strides in blocks of any length.
                self._step({name: tensor[:, step].contiguous() for name, tensor in block.items()})
            return
        self._fill(block)
        if self._graph is None:
            self._graph = self._captured(self._recorded_step)
        for _ in range(order.shape[1]):
            self._graph.replay()

    def _fill(self, block: Mapping[str, Tensor]) -> None:
        """Copy a block to where the recorded step reads it; it may be shorter than the space reserved."""
        self._position.zero_()
        for name, tensor in block.items():
            if name not in self._block:
                self._block[name] = tensor.new_zeros(tensor.shape[0], self._block_steps, *tensor.shape[2:])
            self._block[name][:, : tensor.shape[1]] = tensor

    def _recorded_step(self) -> None:
        self._step({name: room.index_select(1, self._position).squeeze(1) for name, room in self._block.items()})
        self._position.add_(1).remainder_(self._block_steps)

    def _step(self, draws: dict[str, Tensor]) -> None:
        """Take one step with all replicas; `draws` holds the order (R, B) of the images and noise {name: (R, ...)}."""
        noise = {name: tensor for name, tensor in draws.items() if name != "order"}
        batch = self._batch(_gather(self.train, draws["order"]), self._weight, noise)
        self.moments.steps.add_(1)
        if self.replicas.stacked:
            terms = self._descend(*self._rows[0], batch)
        else:
            steps = [functools.partial(self._descend, *self._rows[r], replica_of(batch, r)) for r in self._active]
            terms = self._with_resting(side_by_side(self.replicas.device, steps))
        for name, term in terms.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros_like(term)
            self.totals[name] += term

    def _with_resting(self, active: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the terms of all replicas, (R,) each, from those of the active ones."""
        resting = dict.fromkeys(active[0], self._resting)
        rows = dict(zip(self._active, active, strict=True))
        everybody = [rows.get(r, resting) for r in range(len(self.replicas))]
        return {name: torch.stack([row[name] for row in everybody]) for name in resting}

    def _batch(self, x: Tensor, weight: Tensor, noise: dict[str, Tensor]) -> Batch:
        return {"x": x, "weight": weight, "kl_weight": self.kl_weight, "state": self.state, **noise}

    # --- validation ---------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, Tensor]:
        """Return the mean loss terms on the validation images, each (R,)."""
        if not self.step.captures:
            self._validate()
        else:
            if self._valid_graph is None:
                self._valid_graph = self._captured(self._validate)
            self._valid_graph.replay()
        return self._valid_terms

    @torch.no_grad()
    def _validate(self) -> None:
        totals: dict[str, Tensor] = {}
        for part, (x, weight, share) in enumerate(self._valid_parts):
            noise = {name: tensor[:, part] for name, tensor in self.valid_noise.items()}
            terms = self.replicas.map(self.step.terms, self._batch(x, weight, noise))
            totals = {name: totals.get(name, 0) + share * term for name, term in terms.items()}
        self._valid_terms = totals

    def _split_valid(self, valid: Tensor, chunk: int) -> list[tuple[Tensor, Tensor, float]]:
        """Split the validation images into chunks of equal size; the last is padded with images of zero weight."""
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
        """Record `function` as a CUDA graph; recording executes it, so the state is restored afterwards."""
        first, second, steps = self.moments
        dictionaries = (self.replicas.tensors(), first, second)
        state = [tensor for tensors in dictionaries for tensor in tensors.values()] + [steps, self._position]
        if self.step.track is not None:
            state += self.state.values()
        clones = [tensor.clone() for tensor in state]
        totals = {name: total.clone() for name, total in self.totals.items()}
        graph = capture(function)
        for tensor, before in zip(state, clones, strict=True):
            tensor.copy_(before)
        for name, total in self.totals.items():
            total.copy_(totals.get(name, torch.zeros_like(total)))
        return graph


def capture(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record `function` as a CUDA graph, after running it a few times.

    Warm-up and recording share one stream that lives as long as the process: cuBLAS keeps a workspace per stream, and
    one allocated while recording would be freed with its graph but used by the next.
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
    """Return the number of steps whose random numbers are drawn at once: fewer if a step needs many."""
    values = sum(math.prod(draw.shape) for draw in draws.values())
    return max(1, min(BLOCK, BLOCK_VALUES // max(values, 1)))


def validation_chunk(images: int) -> int:
    """Return the chunk size for a validation set."""
    return min(images, VALIDATION_CHUNK)


def _gather(images: Tensor, order: Tensor) -> Tensor:
    """Return the images (R, B, D) that `order` (R, B) names; images are (N, D) or (R, N, D)."""
    if images.dim() == 3:
        order = order + torch.arange(len(order), device=order.device).unsqueeze(1) * images.shape[1]
        images = images.flatten(0, 1)
    return images.index_select(0, order.reshape(-1)).view(*order.shape, images.shape[-1])
