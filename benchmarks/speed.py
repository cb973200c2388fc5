"""How fast is the engine? Compare plain loops, the trainer and its NLL with the floor: the matrix products alone.

    python benchmarks/speed.py --device cuda --out results/speed/h200.json

All variants use the same random images of MNIST's size, the paper's network for MNIST (mlp:300, 40 latents) and
batches of 250. They take turns for several rounds, and the median round counts, so that a busy machine affects all
alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boovae.config import Settings
from boovae.data import ImageSpec, Split, Task
from boovae.methods import resolve
from boovae.metrics.likelihood import log_likelihood
from boovae.model.vae import VAE
from boovae.replicas.devices import matmul_precision
from boovae.replicas.engine import capture
from boovae.runs.environment import source_commit
from boovae.training.events import Event
from boovae.training.trainer import Observer, Trainer

PIXELS, WIDTH, LATENT, BATCH, IMAGES = 784, 300, 40, 250, 5500
LAYERS = [(PIXELS, WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * LATENT), (LATENT, WIDTH), (WIDTH, WIDTH), (WIDTH, PIXELS)]
STEPS_PER_EPOCH = IMAGES // BATCH


class Clock(Observer):
    """An observer that records when each epoch ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[float] = []

    def epoch(self, trainer: Trainer, event: Event) -> None:
        """Record the time; the trainer has just waited for the device."""
        self.marks.append(time.perf_counter())


def main() -> None:
    """Time all variants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", choices=("on", "off", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per variant")
    parser.add_argument("--epochs", type=int, default=None, help="epochs per round (20 on a GPU, 2 on a CPU)")
    parser.add_argument("--images", type=int, default=None, help="images for the NLL (10,000 on a GPU, 100 on a CPU)")
    parser.add_argument("--samples", type=int, default=5000, help="importance samples per image")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    options = parser.parse_args()
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    epochs = options.epochs or (20 if gpu else 2)
    images = options.images or (10_000 if gpu else 100)
    modes = {"on": [True], "off": [False], "both": [False, True]}[options.compile]

    steps = time_steps(device, modes, options.rounds, epochs)
    nll = time_nll(device, modes, options.rounds, images, options.samples)
    result = {"machine": machine(device), "rounds": options.rounds, "step_ms": steps, "nll_s": nll}
    result["nll_images"], result["nll_samples"] = images, options.samples
    print(table(steps, nll, images, options.samples))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device, versions, commit and command of the measurement; of absolute paths only the name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    return {"device": name, **versions, "commit": source_commit(), "command": shlex.join(["python", *words])}


def in_turns(variants: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Let every variant take `rounds` turns, one after another; return the median of each."""
    turns: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            turns[name].append(variant())
    return {name: statistics.median(values) for name, values in turns.items()}


# --- training steps --------------------------------------------------------------------------------------------------


def time_steps(device: torch.device, modes: list[bool], rounds: int, epochs: int) -> dict[str, float]:
    """Return milliseconds per step of the plain loop, of the trainer with 1 and 5 replicas, and of the floor."""
    data = torch.rand(IMAGES, PIXELS)
    variants: dict[str, Callable[[], float]] = {"plain loop, 1 seed": plain_loop(data, device)}
    for replicas in (1, 5):
        for compiled in modes:
            name = f"trainer, {replicas} replica{'s' * (replicas > 1)}, {'compiled' if compiled else 'eager'}"
            variants[name] = trainer_steps(data, device, replicas, compiled, epochs)
        variants[f"floor, {replicas} replica{'s' * (replicas > 1)}"] = floor_steps(device, replicas)
    return in_turns(variants, rounds)


def settings_for(replicas: int, epochs: int) -> Settings:
    """Return the paper's settings for MNIST, without early stopping."""
    return resolve({"dataset": "mnist", "replicas": replicas, "epochs": epochs, "early_stop": 10**6})


def task_of(data: Tensor, index: int = 0) -> Task:
    """Return images (N, D) as a task, with one image for validation and test."""
    labels = torch.full((len(data),), index)
    one = Split(data[:1], labels[:1])
    return Task(f"task {index}", Split(data, labels), one, one, (index,))


def plain_loop(data: Tensor, device: torch.device) -> Callable[[], float]:
    """Time the usual loop: a DataLoader, one module, Adam, the loss logged at every step."""
    model: VAE = Trainer(settings_for(1, 1), ImageSpec((28, 28))).build().to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-4)
    loader = DataLoader(TensorDataset(data), batch_size=BATCH, shuffle=True)
    log: list[float] = []

    def turn() -> float:
        steps, start = 0, time.perf_counter()
        for (x,) in loader:
            x = x.to(device)
            posterior = model.posterior(x)
            z = posterior.rsample(torch.randn_like(posterior.mean))
            logits = model.decode(z)
            reconstruction = nn.functional.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(-1)
            loss = (reconstruction + posterior.kl_to_standard()).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            log.append(loss.item())
            steps += 1
        return 1000 * (time.perf_counter() - start) / steps

    turn()
    return turn


def trainer_steps(
    data: Tensor, device: torch.device, replicas: int, compiled: bool, epochs: int
) -> Callable[[], float]:
    """Time the trainer as it is used: random draws, order, steps and the log of every epoch, with little validation."""
    trainer = Trainer(settings_for(replicas, epochs + 3), ImageSpec((28, 28)), device=device, compile=compiled)
    task = task_of(data)

    def turn() -> float:
        clock = Clock(device)
        trainer.learn(task, clock)
        marks = clock.marks[2:]  # the first epochs compile and capture
        return 1000 * (marks[-1] - marks[0]) / ((len(marks) - 1) * STEPS_PER_EPOCH)

    return turn


def floor_steps(device: torch.device, replicas: int) -> Callable[[], float]:
    """Time only the matrix products of a step, forward and backward, in the precision of the trainer."""
    shapes = [(replicas, BATCH, rows, columns) for rows, columns in LAYERS]
    x = [torch.randn(r, b, i, device=device) for r, b, i, _ in shapes]
    gradients = [torch.randn(r, b, o, device=device) for r, b, _, o in shapes]
    weights = [torch.randn(r, o, i, device=device) for r, _, i, o in shapes]

    def products() -> None:
        for layer, (inputs, weight, gradient) in enumerate(zip(x, weights, gradients, strict=True)):
            for r in range(replicas) if device.type == "cpu" else [slice(None)]:
                torch.matmul(inputs[r], weight[r].mT)
                torch.matmul(gradient[r].mT, inputs[r])
                if layer > 0:  # the gradient of the images is not needed
                    torch.matmul(gradient[r], weight[r])

    return repeated(products, device, 200 if device.type == "cuda" else 10)


def repeated(function: Callable[[], None], device: torch.device, times: int) -> Callable[[], float]:
    """Return a timed repetition of `function`; on a GPU as a CUDA graph, to exclude the launches."""
    call = function
    with matmul_precision(device):
        function()
        if device.type == "cuda":
            call = capture(function).replay

    def turn(inputs: Callable[[], None] = function) -> float:  # a graph does not keep the tensors it reads alive
        with matmul_precision(device):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(times):
                call()
            synchronize(device)
            return 1000 * (time.perf_counter() - start) / times

    return turn


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- importance sampling ---------------------------------------------------------------------------------------------


def time_nll(device: torch.device, modes: list[bool], rounds: int, images: int, samples: int) -> dict[str, float]:
    """Return seconds for the NLL of `images` images: a loop over samples (partial, scaled up), ours, the floor."""
    data = torch.rand(images, PIXELS, device=device)
    trainer = Trainer(settings_for(1, 1), ImageSpec((28, 28)), device=device)
    variants: dict[str, Callable[[], float]] = {"loop over samples": sample_loop(trainer, data, samples)}
    for compiled in modes:
        variants[f"ours, {'compiled' if compiled else 'eager'}"] = our_nll(trainer, data, samples, compiled)
    variants["floor"] = floor_nll(device, images, samples)
    return in_turns(variants, rounds)


def sample_loop(trainer: Trainer, data: Tensor, samples: int) -> Callable[[], float]:
    """Time the usual loop: one full forward pass over the images per importance sample, in batches."""
    model, device = trainer.build().to(data.device), data.device
    timed = 5 if device.type == "cuda" else 20

    @torch.no_grad()
    def turn() -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(timed):
            parts = []
            for x in data.split(BATCH):
                posterior = model.posterior(x)
                z = posterior.rsample(torch.randn_like(posterior.mean))
                log_p = model.likelihood.log_prob(model.likelihood.bounded(model.decode(z)), x)
                parts.append((log_p + model.prior(model.posterior).log_prob(z) - posterior.log_prob(z)).cpu())
            torch.cat(parts)
        return (time.perf_counter() - start) * samples / timed

    turn()
    return turn


def our_nll(trainer: Trainer, data: Tensor, samples: int, compiled: bool) -> Callable[[], float]:
    """Time the NLL as `boovae eval` computes it."""

    def turn() -> float:
        with matmul_precision(data.device):
            start = time.perf_counter()
            log_likelihood(trainer.replicas, data, samples, compile=compiled).log_prob.sum().item()
            return time.perf_counter() - start

    turn()
    return turn


def floor_nll(device: torch.device, images: int, samples: int) -> Callable[[], float]:
    """Time only the matrix products of the decoder, for all images and samples."""
    rows = (images * samples) // (100 if device.type == "cuda" else 10)
    per_call = 200_000 if device.type == "cuda" else 10_000
    inputs = [torch.randn(per_call, i, device=device) for i, _ in LAYERS[3:]]
    weights = [torch.randn(o, i, device=device) for i, o in LAYERS[3:]]

    def products() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            torch.matmul(x, weight.mT)

    times = max(1, rows // per_call)
    turn = repeated(products, device, times)
    return lambda: turn() / 1000 * images * samples / per_call


def table(steps: dict[str, float], nll: dict[str, float], images: int, samples: int) -> str:
    """Return the results as text, each compared with the plain loop and the floor."""
    plain, loop = steps["plain loop, 1 seed"], nll["loop over samples"]
    lines = [f"{'training step':38} {'ms':>9} {'per seed':>9} {'x faster per seed':>18} {'x floor':>8}"]
    for name, value in steps.items():
        seeds = 5 if "5 replicas" in name else 1
        floor = steps["floor, 5 replicas" if seeds == 5 else "floor, 1 replica"]
        lines.append(
            f"{name:38} {value:9.3f} {value / seeds:9.3f} {plain / (value / seeds):18.1f} {value / floor:8.2f}"
        )
    lines += ["", f"{f'NLL, {images:,} images x {samples:,} samples':38} {'s':>9} {'x faster':>9} {'x floor':>8}"]
    for name, value in nll.items():
        lines.append(f"{name:38} {value:9.3f} {loop / value:9.1f} {value / nll['floor']:8.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
