"""What every method promises: the invariants of the design, over the whole registry."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from boovae.config import CORE, Section, Settings
from boovae.data import Split, Stream, Task
from boovae.errors import InputError
from boovae.methods import METHODS, REGISTRY, Method, TaskImages, make_method, register, resolve
from boovae.model.distributions import DiagonalNormal
from boovae.replicas.engine import BLOCK
from boovae.replicas.stacked import Replicas
from boovae.training.events import Event
from boovae.training.trainer import Trainer
from conftest import TINY, Recorder, finite, same, tiny, trained

COMBINED = [
    {"method": "joint", "prior": "vamp"},
    {"method": "boo+distill"},
    {"method": "boo+vcl"},
    {"method": "boo+ewc"},
    {"method": "boo+replay"},
    {"method": "boo+multihead"},
    {"method": "boo-flow+distill"},
    {"method": "scratch", "prior": "vamp"},
    {"method": "multihead+ewc"},
    {"method": "mog+distill"},
]
CASES = [{"method": name} for name in METHODS] + COMBINED
every_method = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))


def poisoned(task: Task) -> None:
    for split in (task.train, task.valid, task.test):
        split.images.fill_(math.nan)


def copied(task: Task) -> Task:
    train, valid, test = (
        Split(split.images.clone(), split.labels.clone()) for split in (task.train, task.valid, task.test)
    )
    return Task(task.name, train, valid, test, task.classes)


@every_method
def test_finished_tasks_are_forgotten_but_for_the_declared_memory(case: dict[str, Any], digits: Stream) -> None:
    method = make_method(tiny(**case))
    trainer, poor = (Trainer(tiny(**case), digits.spec) for _ in range(2))
    for task in digits[:3]:
        own = copied(task)
        trainer.learn(task, Recorder())
        poor.learn(own, Recorder())
        if not method.stores_examples:
            poisoned(own)
    assert same(trainer, poor)
    assert (trainer.method.images_stored() > 0) == method.stores_examples


@every_method
def test_a_method_reads_the_settings_of_the_sections_that_it_lists_and_no_others(
    case: dict[str, Any], digits: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each must be asked for as a section: `Settings` itself has no values of methods but by name, in `own`."""
    settings, read = tiny(**case), set()
    asked, core = Settings.of, set(CORE.values())

    def of(self: Settings, kind: type[Any]) -> Any:
        read.add(kind)
        return asked(self, kind)

    def noted(self: Section, name: str) -> Any:
        read.add(type(self))
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Settings, "of", of)
    monkeypatch.setattr(Section, "__getattribute__", noted, raising=False)
    trained(settings, digits)
    assert core & read
    assert read - core == set(REGISTRY.sections(case["method"]))


def test_settings_of_other_methods_are_left_out_of_a_file(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"ewc_strength": 7.0, "boo_prune": 0.1, "coreset_images": 3}
    file = tmp_path / "shared.toml"
    file.write_text("epochs = 5\n" + "".join(f"{name} = {value}\n" for name, value in shared.items()))
    expected = {"ewc": {"ewc_strength"}, "boo+coreset": {"boo_prune", "coreset_images"}, "multihead": set()}
    for method, kept in expected.items():
        read = resolve({"method": method}, file)
        assert read == resolve({"method": method}, common={**shared, "epochs": 5})
        assert {name: value for name, value in read.own if name in shared} == {name: shared[name] for name in kept}
        assert (read.training.epochs, read.method) == (5, method)


@every_method
def test_settings_of_other_methods_are_refused_by_name(case: dict[str, Any]) -> None:
    usual = {item.name: getattr(kind(), item.name) for kind in REGISTRY.all_sections() for item in fields(kind)}
    read = {item.name for kind in REGISTRY.sections(case["method"]) for item in fields(kind)}
    assert resolve({**case, **{name: usual[name] for name in read}}).method == case["method"]
    for name in usual.keys() - read:
        with pytest.raises(InputError, match=rf"^{name} is a setting of method .* does not read it; leave it out"):
            resolve({**case, name: usual[name]})


@every_method
def test_memory_survives_a_restart_between_tasks(case: dict[str, Any], digits: Stream) -> None:
    settings = tiny(**case)
    trainer = trained(settings.changed(tasks=2), digits)
    tensors, record = trainer.state()
    stranger = Trainer(settings, digits.spec)
    stranger.load_state({name: tensor.clone() for name, tensor in tensors.items()}, record)
    for one in (trainer, stranger):
        one.learn(digits[2], Recorder())
    assert same(trainer, stranger)


@every_method
def test_the_first_tasks_of_a_long_run_equal_a_short_run(case: dict[str, Any], digits: Stream) -> None:
    long, short = Recorder(), Recorder()
    trained(tiny(**case, tasks=3), digits, long)
    trained(tiny(**case, tasks=2), digits, short)
    assert long.events[: len(short.events)] == short.events


@every_method
def test_a_replica_among_others_equals_the_same_replica_alone(case: dict[str, Any], digits: Stream) -> None:
    together = trained(tiny(**case, replicas=3, tasks=2), digits)
    alone = trained(tiny(**case, replicas=1, seed=1, tasks=2), digits)
    for name, tensor in alone.replicas.tensors().items():
        torch.testing.assert_close(together.replicas.tensors()[name][1], tensor[0], rtol=0, atol=0)


@every_method
def test_a_diverged_replica_recovers_and_leaves_the_others_alone(case: dict[str, Any], digits: Stream) -> None:
    class Saboteur(Recorder):
        def epoch(self, trainer: Trainer, event: Event) -> None:
            if event["epoch"] == 1:
                for tensor in trainer.replicas.parameters.values():
                    tensor[1] = math.nan

    saboteur = Saboteur()
    hurt, whole = trained(tiny(**case, tasks=2), digits, saboteur), trained(tiny(**case, tasks=2), digits)
    assert same(hurt, whole, replica=0)
    retries = [event["retry"] for event in saboteur.of("divergence")]
    assert retries == [1, 1]  # once in each task
    assert finite(hurt)
    assert not hurt.frozen.any()


def test_a_replica_that_keeps_diverging_is_frozen_and_reported(digits: Stream) -> None:
    class Saboteur(Recorder):
        def epoch(self, trainer: Trainer, event: Event) -> None:
            trainer.replicas.parameters["decoder.0.weight"][1] = math.nan

    saboteur = Saboteur()
    hurt, whole = trained(tiny(epochs=6), digits, saboteur), trained(tiny(epochs=6), digits)
    assert same(hurt, whole, replica=0)
    assert [event["retry"] for event in saboteur.of("divergence")] == [1, 2, "frozen"]
    assert hurt.frozen.tolist() == [False, True]
    assert finite(hurt)


def test_replicas_do_not_touch_each_other(digits: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnImages(Method):
        """Gives each replica its own images; `spoiled` says what replica 1 gets."""

        name = "own-images"
        spoiled = 0.0

        def images(self, replicas: Replicas, task: TaskImages) -> TaskImages:
            train = torch.stack([task.train, (task.train - self.spoiled).abs()])
            return replace(task, train=train)

    monkeypatch.setitem(METHODS, "own-images", OwnImages)
    plain = trained(tiny(method="own-images"), digits)
    OwnImages.spoiled = 1.0
    spoiled = trained(tiny(method="own-images"), digits)
    assert same(plain, spoiled, replica=0)
    assert not same(plain, spoiled, replica=1)


@every_method
@pytest.mark.parametrize("seed", range(2))
def test_resume_is_exact(case: dict[str, Any], seed: int, harmless_kills: Callable[..., int]) -> None:
    """Killed every few blocks, at other places in each try, a run still ends with the same bytes."""
    settings = tiny(**case, batch_size=1 + seed)  # small batches: several blocks in an epoch
    generator = random.Random(seed)
    lives = iter(lambda: generator.randint(2, 4), None)
    assert harmless_kills(settings, lives) >= 3


@every_method
def test_the_prior_that_scores_is_the_prior_that_samples(case: dict[str, Any], digits: Stream) -> None:
    """E_p[g / p] = 1 for any density g if samples and densities belong to the same p."""
    trainer = trained(tiny(**case), digits)
    count = 20_000
    uniform, normal = torch.rand(2, count), torch.randn(2, count, 4)

    def ratio(model: Any, uniform: Tensor, normal: Tensor) -> Tensor:
        density = model.prior(model.posterior)
        z = density.sample(uniform, normal)
        # A density g inside the samples: their own mean, half their spread.
        g = DiagonalNormal(z.mean(0), (z.var(0) / 4).log())
        log_density: Tensor = density.log_prob(z)
        return (g.log_prob(z) - log_density).exp().mean()

    ratios = trainer.replicas.map(ratio, uniform, normal)
    torch.testing.assert_close(ratios, torch.ones(2), rtol=0, atol=0.1)


def test_the_same_run_twice_is_the_same(digits: Stream) -> None:
    assert same(trained(tiny(), digits), trained(tiny(), digits))


def test_a_method_from_outside_trains_penalises_and_combines(digits: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    class Anchor(Method):
        """Pulls the weights towards where they were when the task began."""

        name = "anchor"
        summary = "a toy"

        def begin_task(self, replicas: Any, task: TaskImages) -> None:
            if self.tasks_seen > 1:
                self.state = {"weights": replicas.parameters["decoder.0.weight"].clone()}

        def penalty(self, model: Any, batch: Any) -> dict[str, Tensor]:
            if not batch["state"]:
                return {}
            drift = model.decoder[0].weight - batch["state"]["weights"]
            return {"drift": 1e6 * drift.square().sum()}

    monkeypatch.setattr("boovae.methods.registry.METHODS", dict(METHODS))
    register(Anchor)
    first = trained(tiny(method="standard+anchor", tasks=1), digits)
    recorder = Recorder()
    second = trained(tiny(method="standard+anchor", tasks=2), digits, recorder)
    free = trained(tiny(tasks=2), digits)

    def moved(trainer: Trainer) -> float:
        name = "decoder.0.weight"
        return float((trainer.replicas.parameters[name] - first.replicas.parameters[name]).abs().mean())

    assert moved(second) < 0.2 * moved(free)
    epochs = [event for event in recorder.of("epoch") if event["task"] == 1]
    assert all("anchor.drift" in event["train"] for event in epochs)


def test_a_method_that_could_not_be_continued_or_hides_another_is_refused(
    digits: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(Method):
        name = "forgetful"

        def end_task(self, replicas: Replicas, task: TaskImages) -> None:
            self.memory = {"w": torch.zeros(2, 1)}

    class Overridden(Method):
        name = "overridden"

        def memory(self) -> dict[str, Tensor]:  # type: ignore[override]
            return {}

    class Boo(Method):
        name = "boo"

    monkeypatch.setattr("boovae.methods.registry.METHODS", dict(METHODS))
    with pytest.raises(InputError, match=r"Overridden.memory would be replaced; fill the dictionary self.memory"):
        register(Overridden)
    register(Forgetful)
    with pytest.raises(InputError, match="'forgetful' remembers w, which its memory_shapes does not have"):
        trained(tiny(method="forgetful", tasks=1, epochs=1), digits)
    with pytest.raises(InputError, match="'boo', which is built into boovae"):
        register(Boo)
    assert "forgetful" not in METHODS


def test_a_step_is_compiled_once_it_has_its_final_form(digits: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def compiled(function: Any, **options: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*arguments)

        return counted

    monkeypatch.setattr(torch, "compile", compiled)
    for method, first in (("standard", True), ("boo+distill", False), ("boo+vcl", True), ("ewc", False)):
        calls = 0
        trainer = Trainer(tiny(method=method), digits.spec, compile=True)
        trainer.learn(digits[0], Recorder())
        assert (calls > 0) == first, method
        trainer.learn(digits[1], Recorder())
        assert calls > 0, method


@pytest.mark.parametrize("method", ["standard", "boo+distill"])
def test_compiled_code_sees_one_form_of_a_step(method: str, digits: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of another length, the last of an epoch, must not be compiled anew."""
    forms = set()

    def compiled(function: Any, **options: Any) -> Any:
        def seen(*arguments: Any) -> Any:
            leaves = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor)]
            forms.add(tuple((leaf.shape, leaf.stride()) for leaf in leaves))
            return function(*arguments)

        return seen

    monkeypatch.setattr(torch, "compile", compiled)
    trainer = Trainer(tiny(method=method, batch_size=1, replicas=2), digits.spec, compile=True)
    for task in digits[:2]:
        trainer.learn(task, Recorder())
    assert trainer.engine.steps_per_epoch > BLOCK
    assert trainer.engine.steps_per_epoch % BLOCK
    assert len(forms) == 1


@pytest.mark.parametrize("method", ["joint", "scratch"])
def test_a_task_may_have_fewer_images_than_pseudo_inputs(digits: Stream, method: str) -> None:
    assert finite(trained(tiny(method=method, prior="vamp", components=TINY["limit"] + 6, tasks=2), digits))
