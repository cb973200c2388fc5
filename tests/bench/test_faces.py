"""Colour pictures end to end: convolutions, batch normalisation and every method of the paper's colour table."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boovae.boosting.fit import FitSettings
from boovae.cli.main import main
from boovae.data import Stream
from boovae.errors import InputError
from boovae.methods import TaskImages, resolve
from boovae.model.normalisation import BatchNorm, learning
from boovae.model.vae import VAE
from boovae.replicas.engine import Engine
from boovae.replicas.step import Step
from boovae.runs.train import load_trainer, train
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer
from conftest import Recorder, tiny, train_with_kills
from faces import four_colours, write_celeba

RANGE = (-1.0, 1.0)
COLOUR: dict[str, Any] = {
    "net": "conv:4",
    "likelihood": "normal",
    "jitter": 0.1,
    "kl_weight": 2.0,
    "kl_warmup": 2,
    "ewc_images": 8,
    "coreset_images": 3,
    "epochs": 3,
}
METHODS = ("boo", "boo+distill", "ewc", "vcl", "multihead+ewc", "multihead+vcl", "coreset", "joint")


@pytest.fixture(scope="module")
def colours() -> Stream:
    """Four tasks of 3 x 8 x 8 pictures, each of another colour with a gradient."""
    generator = torch.Generator().manual_seed(0)
    base = torch.tensor([[-0.8, -0.8, -0.7], [0.7, 0.5, -0.2], [0.0, -0.3, -0.6], [0.2, 0.2, 0.25]])
    slope = torch.linspace(-0.2, 0.2, 8).expand(8, 8)
    tasks = [
        (colour.view(3, 1, 1) + slope + 0.1 * torch.randn(30, 3, 8, 8, generator=generator)).clamp(-1, 1)
        for colour in base
    ]
    return Stream.from_tasks(tasks, pixel_range=RANGE, names=["black", "blond", "brown", "gray"])


def trained(stream: Stream, tasks: int = 2, **changes: Any) -> Trainer:
    trainer = Trainer(tiny(**{**COLOUR, "tasks": tasks, **changes}), stream.spec)
    for task in stream[:tasks]:
        trainer.learn(task, Recorder())
    return trainer


# --- batch normalisation ----------------------------------------------------------------------------------------------


def plain(model: VAE) -> VAE:
    """Return a copy with torch's own batch normalisation."""
    other = copy.deepcopy(model)
    for parent in list(other.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, BatchNorm):
                norm = nn.BatchNorm2d(len(layer.weight))
                norm.load_state_dict(
                    {"weight": layer.weight, "bias": layer.bias, "running_mean": layer.mean}
                    | {"running_var": layer.variance, "num_batches_tracked": torch.tensor(0)}
                )
                setattr(parent, name, norm)
    return other.requires_grad_(True)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("functional", [False, True])
def test_steps_equal_those_of_torchs_own_batch_normalisation_and_adam(functional: bool, colours: Stream) -> None:
    trainer = Trainer(tiny(**{**COLOUR, "jitter": 0.0}, normalisation="batch"), colours.spec)
    replicas, train = trainer.replicas, colours[0].train.images.double()
    order, noise = torch.randint(0, len(train), (2, 5, 8)), torch.randn(2, 5, 8, 4)
    models = []
    for row in range(2):
        model = copy.deepcopy(replicas.model)
        model.load_state_dict({name: tensor[row].clone() for name, tensor in replicas.tensors().items()})
        models.append(plain(model))
    trainer.step.functional = functional
    engine = Engine(trainer.step, train, train[:4], 8, {}, {"latent": torch.zeros(2, 1, 4, 4)})
    engine.rate.fill_(1e-3)
    engine.run_block(order, {"latent": noise})
    for row, model in enumerate(models):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        model.train()
        for step in range(5):
            bound = model.bound(train[order[row, step]], noise[row, step])
            optimizer.zero_grad()
            torch.autograd.backward((bound.reconstruction + bound.kl).mean())
            optimizer.step()
        state = model.state_dict()
        for name, tensor in replicas.tensors().items():
            theirs = name.replace(".mean", ".running_mean").replace(".variance", ".running_var")
            # A bias before a normalisation has no gradient but rounding, of which Adam makes up to 1e-7 in a step.
            torch.testing.assert_close(tensor[row], state[theirs], rtol=1e-6, atol=1e-6)


def test_only_the_first_pass_learns_statistics_and_later_ones_share_them() -> None:
    layer = BatchNorm(3)
    batch, others = 5 + 2 * torch.randn(50, 3, 4, 4), torch.randn(7, 3, 4, 4)
    stored = layer(others)
    with learning(layer) as seen:
        output = layer(batch)
        together = F.batch_norm(others, batch.mean((0, 2, 3)), batch.var((0, 2, 3), correction=0))
        torch.testing.assert_close(layer(others), together)
        with torch.no_grad():  # what has no gradient is a teacher, or a sample
            torch.testing.assert_close(layer(others), stored)
    torch.testing.assert_close(seen[".mean"], batch.mean((0, 2, 3)))
    torch.testing.assert_close(seen[".variance"], batch.var((0, 2, 3)))
    torch.testing.assert_close(output.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    assert torch.equal(layer.mean, torch.zeros(3))  # others move it
    torch.testing.assert_close(layer(others), stored)


@pytest.mark.parametrize("method", ["boo", "coreset", "boo+distill"])
def test_no_loss_is_lowered_by_the_size_of_weights_before_a_normalisation(method: str, colours: Stream) -> None:
    """A normalised network does not know their size, so no gradient may point there: stored statistics would follow."""
    chosen = {"normalisation": "batch", "boo_lambda": 1.0, "coreset_mode": "batch", "jitter": 0.0}
    trainer = trained(colours, tasks=2, method=method, **chosen)
    along: dict[str, float] = {}

    def look(state: dict[str, Tensor], step: Step) -> None:
        for name in ("encoder.body.0.weight", "decoder.body.0.weight"):  # convolutions; a normalisation follows
            weights, gradient = (tensors[name].flatten() for tensors in (step.before, step.gradients))
            along[name] = (torch.dot(weights, gradient) / (weights.norm() * gradient.norm())).item()

    trainer.step.track = look
    trainer.learn(colours[2], Recorder())
    assert len(along) == 2
    assert all(abs(cosine) < 1e-3 for cosine in along.values())


@pytest.mark.parametrize("normalisation", ["group", "batch"])
def test_a_teacher_agrees_with_itself_when_a_task_begins(normalisation: str, colours: Stream) -> None:
    """Its statistics are its own: the penalty starts at zero, and new batches do not change its answers."""
    trainer = trained(colours, tasks=1, method="boo+distill", normalisation=normalisation)
    penalties: list[dict[str, list[float]]] = []

    class Watcher(Recorder):
        def block(self, trainer: Trainer) -> None:
            if not penalties:
                terms = trainer.engine.validate()
                penalties.append({name: term.tolist() for name, term in terms.items() if "distill" in name})

    trainer.learn(colours[1], Watcher())
    assert len(penalties[0]) == 2
    for values in penalties[0].values():
        assert values == pytest.approx([0.0, 0.0], abs=1e-5)


def test_heads_of_finished_tasks_keep_their_own_statistics(colours: Stream) -> None:
    trainer = Trainer(tiny(**COLOUR, method="multihead", normalisation="batch", tasks=3), colours.spec)
    codes, x = [], colours[0].test.images.expand(2, -1, -1)
    for task in range(3):
        trainer.learn(colours[task], Recorder())
        codes.append(trainer.replicas.map(VAE.posterior, x).mean)
    for task, wanted in enumerate(codes):
        torch.testing.assert_close(trainer.method.view(trainer.replicas, task).map(VAE.posterior, x).mean, wanted)
    assert not torch.allclose(codes[0], codes[1])


def test_room_for_another_task_leaves_the_statistics_alone(colours: Stream) -> None:
    trainer = trained(colours, tasks=1, method="boo", normalisation="batch")
    before = {name: tensor.clone() for name, tensor in trainer.replicas.buffers.items() if "prior" not in name}
    assert any(tensor.abs().max() > 0 for name, tensor in before.items() if name.endswith(".mean"))
    trainer.method.see(2)
    trainer.replicas.rebuild()
    assert all(torch.equal(trainer.replicas.buffers[name], tensor) for name, tensor in before.items())


def test_a_batch_of_one_image_cannot_be_normalised(colours: Stream) -> None:
    with pytest.raises(InputError, match=r"two images in a batch.*normalisation='group'"):
        trained(colours, normalisation="batch", batch_size=1)


# --- every method -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "normalisation"), [("boo", "group"), *((name, "batch") for name in METHODS)])
def test_every_method_learns_colours_and_replicas_stay_apart(method: str, normalisation: str, colours: Stream) -> None:
    together = trained(colours, method=method, normalisation=normalisation, epochs=2)
    assert not together.replicas.stacked
    alone = trained(colours, method=method, normalisation=normalisation, epochs=2, replicas=1, seed=1)
    for name, tensor in alone.replicas.tensors().items():
        torch.testing.assert_close(together.replicas.tensors()[name][1], tensor[0], rtol=0, atol=0)
    images = generate(together, 50)
    assert images.shape == (2, 50, 192)
    assert images.abs().max() <= 1
    assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize("method", ["boo+distill", "multihead+vcl"])
def test_resume_is_exact(method: str, colours: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boovae.replicas.engine.BLOCK", 1)  # several blocks in an epoch
    settings = tiny(**{**COLOUR, "epochs": 2}, method=method, normalisation="batch", tasks=2, samples=3)
    train(settings, colours, tmp_path / "whole", metrics=("nll",))
    generator = random.Random(0)
    lives = iter(lambda: generator.randint(2, 3), None)
    assert train_with_kills(settings, colours, tmp_path / "killed", monkeypatch, lives, metrics=("nll",)) >= 2
    whole, killed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()


def test_jitter_changes_the_training_and_not_the_validation(colours: Stream) -> None:
    losses = {}
    for jitter in (0.0, 0.3):
        recorder = Recorder()
        trainer = Trainer(tiny(**{**COLOUR, "jitter": jitter}, learning_rate=1e-12), colours.spec)
        trainer.learn(colours[1], recorder)
        epoch = next(event for event in recorder.events if event["event"] == "epoch")
        losses[jitter] = epoch["train"]["reconstruction"][0], epoch["valid"]["reconstruction"][0]
    assert losses[0.0][1] == pytest.approx(losses[0.3][1], rel=1e-5)
    assert losses[0.0][0] != pytest.approx(losses[0.3][0], rel=1e-3)


def test_the_weight_of_the_kl_term_grows_to_two(colours: Stream) -> None:
    trainer, weights = Trainer(tiny(**{**COLOUR, "epochs": 5, "kl_warmup": 4}), colours.spec), []

    class Watcher(Recorder):
        def epoch(self, trainer: Trainer, event: dict[str, Any]) -> None:
            weights.append(trainer.engine.kl_weight[0].item())

    trainer.learn(colours[0], Watcher())
    assert weights == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_what_makes_no_sense_for_the_images_is_refused(digits: Stream, colours: Stream) -> None:
    with pytest.raises(InputError, match=r"jitter=0\.1 needs colour"):
        Trainer(tiny(jitter=0.1), digits.spec)
    with pytest.raises(InputError, match="likelihood bernoulli needs pixels in"):
        Trainer(tiny(net="conv:4"), colours.spec)


def test_noise_of_large_layers_is_drawn_for_fewer_steps(colours: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(colours, method="vcl", tasks=1, epochs=1)
    assert whole._block_length() > 1
    monkeypatch.setattr("boovae.replicas.engine.BLOCK_VALUES", 1)
    assert whole._block_length() == 1
    trained(colours, method="vcl", tasks=1, epochs=1)


def test_new_pictures_extend_a_run_of_faces(colours: Stream) -> None:
    """A component may start at any image: memory has a leading replica axis and flat pixels."""
    trainer = trained(colours, method="boo", tasks=3)
    memory = trainer.method.memory()
    assert memory["pseudo_inputs"].shape == (2, 3, 3, 192)
    task = TaskImages(3, "gray", colours[3].train.images, colours[3].valid.images, 24, (24, 24, 24))
    trainer.method.see(4)
    trainer.method.parts[0].begin_task(trainer.replicas, task)
    assert trainer.replicas.buffers["prior.live_inputs"].abs().max() <= 1


# --- the command line -------------------------------------------------------------------------------------------------


def test_presets_hold_the_papers_colour_model() -> None:
    ours = resolve({"dataset": "celeba"}, preset="tuned")
    paper = resolve({"dataset": "celeba", "method": "boo"}, preset="paper")
    for settings in (ours, paper):
        assert (settings.model.net, settings.model.latent_dim, settings.model.likelihood) == ("conv:32", 128, "normal")
        assert (settings.model.components, settings.training.epochs) == (40, 300)
        assert (settings.training.kl_weight, settings.training.kl_warmup, settings.training.jitter) == (2.0, 10, 0.1)
        assert (settings.model.log_variance_range, settings.model.normalisation) == ((-3.0, 4.0), "batch")
    assert (ours.training.schedule, ours.training.batch_size, ours.training.mirror) == ("cosine", 256, True)
    assert (paper.training.schedule, paper.training.batch_size, paper.training.plateau_patience) == ("plateau", 512, 9)
    assert not paper.training.mirror
    assert (paper.training.early_stop, paper.training.learning_rate) == (15, 1e-3)
    assert paper.of(FitSettings).boo_objective == "literal"


def test_faces_from_the_official_files_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BOOVAE_CACHE", str(tmp_path / "cache"))
    data, out = write_celeba(tmp_path / "data", four_colours(train=6)), tmp_path / "run"
    words = "train --dataset celeba --method boo --preset paper --net conv:4 --latent-dim 4 --components 3 --epochs 3"
    words += " --boo-steps 2 --batch-size 4 --generated 20 --samples 2 --metric fid nll --quiet --json --tasks 2"
    main([*words.split(), "--data-dir", str(data), "--out", str(out)])
    event = json.loads(capsys.readouterr().out.splitlines()[0])
    numbers = event["frechet"]["sets"]["classifier"]
    assert event["frechet"]["features"] == "classifier"
    assert all(math.isfinite(numbers[key][0]) for key in ("frechet", "frechet_train", "kid", "precision", "recall"))
    assert numbers["images"] == 4
    assert "Fréchet distance (classifier)" in (out / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"\bFID\b", re.sub(r"base64,[^\"]*", "", (out / "report.html").read_text(encoding="utf-8")))
    run, trainer = load_trainer(out, "cpu")
    with run:
        assert trainer.spec.pixel_range == RANGE
        assert trainer.replicas.buffers["encoder.body.1.mean"].abs().max() > 0


def test_samples_are_drawn_in_parts(colours: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(colours, tasks=1)
    whole: Tensor = generate(trainer, 20)
    monkeypatch.setattr("boovae.replicas.prior_samples.SAMPLE_PIXELS", 7 * 192)
    torch.testing.assert_close(generate(trainer, 20), whole, rtol=1e-4, atol=1e-5)
