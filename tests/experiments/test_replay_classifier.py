"""Classifiers with generated images: what is learned, how it is counted, and what the command leaves behind."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, distributions

from boovae.cli.main import main
from boovae.data import Stream, Task
from boovae.errors import InputError
from boovae.experiments import replay_classifier as replay
from boovae.experiments.classifiers import MLP, UNSEEN, Classifiers, accuracies, class_scores
from boovae.experiments.replay_classifier import Point, curves, draw, earlier_samples
from boovae.methods.boo import BooSettings
from boovae.training.trainer import Observer, Trainer
from conftest import tiny, trained

CPU = torch.device("cpu")
ANY_METHOD = ["--dataset", "digits", "--limit", "20", "--net", "mlp:16", "--latent-dim", "4", "--epochs", "2"]
ANY_METHOD += ["--components", "3", "--batch-size", "10", "--quiet"]
ANY_METHOD += ["--classifier-epochs", "2", "--classifier-batch", "10", "--samples-per-image", "5"]
SMALL = [*ANY_METHOD, "--boo-steps", "2", "--distill-latents", "10"]


def blobs(classes: list[int], seed: int, count: int = 60) -> tuple[Tensor, Tensor]:
    """Classes that a line separates: a class is a place in the plane."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(classes).repeat_interleave(count)
    places = torch.tensor([[0.0, 0.0], [0.0, 3.0], [3.0, 0.0], [3.0, 3.0]])
    return places[labels] + 0.3 * torch.randn(len(labels), 2, generator=generator), labels


def small(seeds: list[int], dropout: float = 0.1) -> Classifiers:
    return Classifiers(2, 4, seeds, CPU, width=16, dropout=dropout)


def test_with_all_images_both_questions_are_answered_and_without_the_old_ones_classes_are_forgotten() -> None:
    test, truth = blobs([0, 1, 2, 3], seed=9)
    kept, forgot = small([0, 1]), small([0, 1])
    for index, classes in enumerate(([0, 1], [2, 3])):
        new, everything = blobs(classes, seed=index), blobs([0, 1, 2, 3][: 2 * index + 2], seed=index)
        kept.learn(*everything, classes, epochs=40, batch_size=20)
        forgot.learn(*new, classes, epochs=150, batch_size=20)
    by_task, by_class = accuracies(kept.logits(test), truth, [[0, 1], [2, 3]])
    assert by_task.shape == (2, 2)  # tasks, replicas
    assert by_task.min() > 0.95
    assert by_class.min() > 0.95
    forgotten = accuracies(forgot.logits(test), truth, [[0, 1], [2, 3]])[1]
    assert forgotten[0].max() < 0.3
    assert forgotten[1].min() > 0.95


def test_a_class_without_a_head_is_never_named() -> None:
    classifiers = small([0])
    classifiers.learn(*blobs([0, 1], seed=0), [0, 1], epochs=1, batch_size=20)
    logits = classifiers.logits(10 * torch.randn(200, 2))
    assert (logits[..., 2:] < UNSEEN / 2).all()
    assert logits.argmax(-1).max() <= 1


def test_a_replica_among_others_equals_the_same_replica_alone() -> None:
    together, alone = small([3, 4, 5]), small([4])
    for one in (together, alone):
        one.learn(*blobs([0, 1], seed=0), [0, 1], epochs=2, batch_size=20)
    z = torch.randn(20, 2)
    torch.testing.assert_close(together.logits(z)[1], alone.logits(z)[0], rtol=1e-5, atol=1e-5)


def test_each_replica_can_have_its_own_images() -> None:
    images, labels = blobs([0, 1], seed=0)
    swapped = small([0, 0])
    swapped.learn(images.expand(2, -1, -1), torch.stack([labels, 1 - labels]), [0, 1], epochs=20, batch_size=20)
    first, second = swapped.logits(images).argmax(-1)
    assert (first == labels).double().mean() > 0.9
    assert (second == 1 - labels).double().mean() > 0.9


def test_dropout_keeps_the_mean_and_drops_the_share() -> None:
    torch.manual_seed(0)
    net, x = MLP(2, 4, 50, dropout=0.4), torch.randn(1, 2)
    uniform = torch.rand(4000, 100)
    hidden = torch.nn.functional.leaky_relu(net.first(x))
    masks = (uniform >= 0.4) / 0.6
    assert (masks == 0).double().mean().item() == pytest.approx(0.4, abs=0.01)
    torch.testing.assert_close((hidden * masks[:, :50]).mean(0), hidden[0], rtol=0.15, atol=0.02)
    kept = net(x.expand(3, -1), torch.ones(3, 100))  # nothing dropped: all units scaled up
    assert not torch.allclose(kept, net(x.expand(3, -1)))


def test_accuracy_is_counted_among_the_right_classes() -> None:
    scores = torch.tensor([[[0.1, 0.0, 9.0, 0.0], [0.0, 1.0, 9.0, 0.0], [0.0, 0.0, 0.0, 1.0]]])
    by_task, by_class = accuracies(scores, torch.tensor([0, 1, 3]), [[0, 1], [2, 3]])
    assert by_task.tolist() == [[1.0], [1.0]]  # of 0 and 1, the right one
    assert by_class.tolist() == [[0.0], [1.0]]  # of all, class 2 for both


def test_labels_come_from_the_components_that_made_the_samples(digits: Stream) -> None:
    trainer = trained(tiny(method="boo", tasks=3), digits)
    images, labels = earlier_samples(trainer, small([0, 1]), [7, 8, 9], digits[3])
    count = len(digits[3].train.images)
    assert images.shape == (2, 3 * count, 64)
    assert labels.tolist() == [[7] * count + [8] * count + [9] * count] * 2


def test_the_generative_classifier_is_bayes_rule_by_importance_sampling(digits: Stream) -> None:
    """Against the same sum written with torch.distributions, image by image."""
    trainer = trained(tiny(method="boo", tasks=2, replicas=1), digits)
    x, samples = digits[1].test.images[:3], 7
    found = class_scores(trainer, x, [4, 2], 5, samples)[0]
    assert found[:, [0, 1, 3]].eq(-torch.inf).all()
    from boovae.replicas.randomness import Draw, Generators

    noise = Generators([0], CPU).draw(Draw("normal", (samples, 4)), "classify")[0]
    buffers = {name: tensor[0] for name, tensor in trainer.replicas.buffers.items()}
    tensors = {name: tensor[0] for name, tensor in trainer.replicas.tensors().items()}
    masses = torch.tensor(trainer.sizes) / sum(trainer.sizes)
    for image in range(3):
        posterior = trainer.replicas.call(tensors, lambda model, x: model.posterior(x), x[image])
        q = distributions.Independent(distributions.Normal(posterior.mean, (posterior.log_variance / 2).exp()), 1)
        z = posterior.mean + noise * q.base_dist.scale
        output = trainer.replicas.call(tensors, lambda model, z: model.likelihood.bounded(model.decode(z)), z)
        pixels = distributions.Bernoulli(logits=output, validate_args=False).log_prob(x[image]).sum(1)
        for task, label in enumerate([4, 2]):
            part = distributions.MixtureSameFamily(
                distributions.Categorical(logits=buffers["prior.log_weights"][task]),
                distributions.Independent(
                    distributions.Normal(
                        buffers["prior.mean"][task], (0.5 * buffers["prior.log_variance"][task]).exp()
                    ),
                    1,
                ),
            )
            truth = torch.logsumexp(pixels + part.log_prob(z) - q.log_prob(z), 0) + masses[task].log()
            torch.testing.assert_close(found[image, label], truth, rtol=1e-4, atol=1e-3)


def test_the_command_writes_table_and_figure(tmp_path: Path) -> None:
    words = ["replay", *SMALL, "--tasks", "2", "--replicas", "2", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "boovae", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "replay.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    names = {row["curve"] for row in rows}
    assert len(names) == 9  # two bounds, two generators by class and by task, each also without replay; scratch
    assert len(rows) == 9 * 2 * 2  # curves, tasks seen, seeds
    assert all(0 <= float(row[key]) <= 1 for row in rows for key in ("task_incremental", "class_incremental"))
    cost = {row["curve"]: int(row["generator_images"]) for row in rows if row["tasks_seen"] == "2"}
    assert cost["exact replay"] == 0
    # The second task from scratch costs twice the first: its own images and as many of the past.
    assert cost["scratch, 2 VAE tasks"] > 1.3 * cost["boo+distill, 2 VAE tasks"]
    picture = Image.open(tmp_path / "replay.png").convert("L")
    assert min(picture.size) > 300


def test_the_figure_has_no_empty_panel_where_no_generator_learned() -> None:
    exact, boo = (
        Point(curve=name, seen=2, task_incremental=[0.9, 0.8], class_incremental=[0.7, 0.6], generator_images=images)
        for name, images in (("exact", 0), ("boo", 9))
    )
    assert len(draw([exact]).axes) == 2
    assert [len(axes.lines) for axes in draw([exact, boo]).axes] == [2, 2, 1]


def numbers(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a table without what the clock says."""
    lines = (folder / "replay.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in rows]


def test_every_generator_that_is_wanted_has_its_curves(digits: Stream) -> None:
    def generators(method: str, *wanted: str) -> list[tuple[str, float]]:
        found = [curve.generator for curve in curves(tiny(method=method, boo_lambda=0.0), digits, wanted)]
        return [(one.method, one.of(BooSettings).boo_lambda) for one in found[::2] if one is not None]

    assert generators("boo+distill", "boo", "method") == [("boo", 1.0), ("boo+distill", 0.0)]
    assert generators("boo", "boo", "method") == [("boo", 1.0)]
    assert generators("boo", "method") == [("boo", 0.0)]


def test_a_stopped_experiment_goes_on_and_a_finished_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "save_figure", lambda path, figure: path)
    words = ["replay", *SMALL, "--tasks", "2", "--curve", "exact", "method", "--out"]
    main([*words, str(tmp_path / "whole")])
    learn, calls = Trainer.learn, []

    def counted(trainer: Trainer, task: Task, observer: Observer) -> None:
        calls.append(task.name)
        if calls == ["0", "1", "2"]:  # the second classifier task has begun
            raise InputError("the power is gone")
        learn(trainer, task, observer)

    monkeypatch.setattr(Trainer, "learn", counted)
    with pytest.raises(SystemExit):
        main([*words, str(tmp_path / "stopped")])
    main([*words, str(tmp_path / "stopped")])
    assert calls[:5] == ["0", "1", "2", "2", "3"]  # only the task that was cut off begins again
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")
    calls.clear()
    main([*words, str(tmp_path / "stopped")])
    assert calls == []
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")
    assert not list((tmp_path / "stopped" / "curves").glob("*/"))  # of finished curves the points alone
    with pytest.raises(SystemExit):
        main([*words, str(tmp_path / "stopped"), "--seed", "5"])  # another experiment, which begins at its beginning
    assert calls == ["0", "1", "2"]


def test_a_damaged_curve_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", *SMALL, "--tasks", "2", "--curve", "none", "--out", str(tmp_path)]
    main(words)
    (path,) = (tmp_path / "curves").iterdir()
    path.write_text("{")
    with pytest.raises(SystemExit):
        main(words)
    assert "remove it to learn the curve again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "6"], "digits has 5 tasks; use at most that many"),
        (["--classes-per-task", "1"], "at least 2 classes per task"),
        (["--method", "standard"], "its prior has no components per task"),
        (["--dropout", "1"], "--dropout is 1.0; it must be a number of at least 0 and under 1"),
        (["--classifier-epochs", "0"], "--classifier-epochs is 0"),
    ],
)
def test_wrong_arguments_say_what_to_do(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["replay", "--out", str(tmp_path), *ANY_METHOD, *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
