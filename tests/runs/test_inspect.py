"""Looking at components: what dropping one costs, and a run that is kept without some of them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence

from boovae.cli.main import main
from boovae.errors import RunError
from boovae.model.distributions import DiagonalNormal
from boovae.model.priors.boosted import EMPTY
from boovae.runs.inspection import drop_costs, pruned
from boovae.runs.run import Run
from boovae.training.trainer import Trainer
from run_folders import events, tensors

pytestmark = pytest.mark.filterwarnings("error")


# --- the cost of a component ----------------------------------------------------------------------------------------


def mixture(weights: Tensor, parts: DiagonalNormal) -> MixtureSameFamily:
    """The same mixture by torch's own distributions; a weight of zero is a component that is not there."""
    there = weights > 0
    deviation = (0.5 * parts.log_variance[there]).exp()
    components = Independent(Normal(parts.mean[there], deviation), 1)
    return MixtureSameFamily(Categorical(probs=weights[there]), components)


def without(weights: Tensor, place: int) -> Tensor:
    """The weights without one component, scaled up."""
    rest = weights.clone()
    rest[place] = 0
    return rest / rest.sum()


def kl_on_a_grid(one: MixtureSameFamily, other: MixtureSameFamily) -> float:
    """KL[one | other] in two dimensions, by a sum over a fine grid."""
    axis = torch.linspace(-12, 12, 1201, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    log_one, log_other = one.log_prob(grid), other.log_prob(grid)
    return float((log_one.exp() * (log_one - log_other)).sum() * (axis[1] - axis[0]) ** 2)


def known(weights: list[float], mean: list[list[float]]) -> tuple[Tensor, DiagonalNormal, Tensor]:
    """Weights, Gaussians and fixed noise; the Gaussians have different variances."""
    centre = torch.tensor(mean, dtype=torch.float64)
    log_variance = torch.linspace(-1.0, 0.5, centre.numel(), dtype=torch.float64).reshape(centre.shape)
    noise = torch.randn(*centre.shape[:1], 4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.tensor(weights, dtype=torch.float64), DiagonalNormal(centre, log_variance), noise


def test_cost_is_the_divergence_from_the_mixture_without_the_component() -> None:
    weights, parts, noise = known([0.5, 0.3, 0.2, 0.0], [[0.0, 0.0], [1.5, -1.0], [-3.0, 2.0], [9.0, 9.0]])
    costs = drop_costs(weights.log().clamp(min=EMPTY), parts, noise)
    whole = mixture(weights, parts)
    truth = [kl_on_a_grid(whole, mixture(without(weights, place), parts)) for place in range(3)]
    assert costs[:3].tolist() == pytest.approx(truth, rel=0.03)
    assert costs[3] == math.inf


def test_a_component_far_from_all_others_has_a_finite_cost() -> None:
    weights, parts, noise = known([0.25, 0.75], [[0.0, 0.0], [300.0, -200.0]])
    one, two = (Normal(mean, (0.5 * log).exp()) for mean, log in zip(*parts, strict=True))
    both = {0: 0.25 * kl_divergence(one, two).sum(), 1: 0.75 * kl_divergence(two, one).sum()}
    entropy = (weights * weights.log()).sum()
    costs = drop_costs(weights.log(), parts, noise)
    assert costs.tolist() == pytest.approx([float(both[place] + entropy) for place in (0, 1)], rel=0.01)


def test_a_duplicate_costs_next_to_nothing_and_the_density_changes_by_no_more() -> None:
    weights, parts, noise = known([0.5, 0.48, 0.02], [[0.0, 0.0], [3.0, 1.0], [3.0, 1.0]])
    parts.log_variance[2] = parts.log_variance[1]
    costs = drop_costs(weights.log(), parts, noise)
    assert 0 < costs[2] < 1e-3 < 0.3 < costs[0]
    after = pruned(weights.log().unsqueeze(0), DiagonalNormal(*(part[None] for part in parts)), noise[None], 1e-3)[0]
    assert (after <= EMPTY / 2).tolist() == [False, False, True]
    assert after.exp().sum().item() == pytest.approx(1.0)
    kept = torch.where(after > EMPTY / 2, after.exp(), 0.0)
    change = kl_on_a_grid(mixture(weights, parts), mixture(kept, parts))
    assert change == pytest.approx(costs[2].item(), rel=0.05)


def test_of_two_equal_components_only_one_is_dropped() -> None:
    weights, parts, noise = known([0.9, 0.05, 0.05], [[0.0, 0.0], [7.0, 7.0], [7.0, 7.0]])
    parts.log_variance[2] = parts.log_variance[1]
    assert (drop_costs(weights.log(), parts, noise)[1:] < 0.05).all()  # each alone is cheap, both together are not
    both = DiagonalNormal(*(torch.stack([part, part.flip(0)]) for part in parts))  # two replicas, the second reversed
    log_weights = torch.stack([weights, weights.flip(0)]).log()
    after = pruned(log_weights, both, torch.stack([noise, noise]), 0.05)
    assert (after > EMPTY / 2).sum(1).tolist() == [2, 2]
    assert after[0, 0] == after[1, 2] > EMPTY / 2


def test_the_last_component_always_stays() -> None:
    weights, parts, noise = known([0.5, 0.3, 0.2], [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    many = DiagonalNormal(*(part[None] for part in parts))
    after = pruned(weights.log().unsqueeze(0), many, noise[None], 1e9)
    assert sorted(after[0].tolist())[1:] == [EMPTY, 0.0]
    assert drop_costs(after[0], parts, noise).tolist() == [math.inf] * 3


# --- the command ----------------------------------------------------------------------------------------------------

FAST = "--net mlp:16 --latent-dim 4 --limit 24 --epochs 4 --batch-size 8 --replicas 2 --samples 20 --components 4"
FAST += " --metric nll --quiet"
#: What else makes a method fast.
OWN = {"boo": "--boo-steps 3 --boo-until 2", "distill": "--distill-latents 10"}


def train(out: Path, method: str, *words: str) -> None:
    own = [word for part in method.split("+") for word in OWN.get(part, "").split()]
    main(["train", "--method", method, "--tasks", "3", *FAST.split(), *own, "--out", str(out), *words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    train(out, "boo+distill")
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a finished run, and the tests' own place for pictures."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(finished, tmp_path / "run"))


def inspected(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    main(["inspect", *map(str, words), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The message of a command that ends with exit code 2 and writes nothing to stdout."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["inspect", *map(str, words)])
    output = capsys.readouterr()
    assert (stop.value.code, output.out) == (2, "")
    return output.err


def test_json_gives_every_component_the_same_each_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, run, "--replica", "1")
    assert found == inspected(capsys, run, "--replica", "1")
    assert found != inspected(capsys, run)
    listed = found["components"]
    assert sum(one["mass"] for one in listed) == pytest.approx(1.0, abs=1e-5)
    for task in range(3):
        mine = [one for one in listed if one["task"] == task]
        assert {one["name"] for one in mine} == {str(task)}
        assert sum(one["weight"] for one in mine) == pytest.approx(1.0, abs=1e-5)
        assert sum(one["share"] for one in mine) == pytest.approx(1.0, abs=1e-5)
        assert [one["cost"] for one in mine] == sorted((one["cost"] for one in mine), reverse=True)
    assert inspected(capsys, run, "--replica", "1", "--task", "2")["components"] == [
        one for one in listed if one["task"] == 2
    ]


def test_costs_of_a_run_agree_with_torch_distributions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = inspected(capsys, run, "--replica", "1", "--task", "1")["components"]
    saved = tensors(run)
    mean, log_variance, log_weights = (
        saved[f"model/prior.{name}"][1, 1].double() for name in ("mean", "log_variance", "log_weights")
    )
    weights = torch.where(log_weights > EMPTY / 2, log_weights.exp(), 0.0)
    parts = DiagonalNormal(mean, log_variance)
    whole = mixture(weights, parts)
    torch.manual_seed(0)
    z = whole.sample(torch.Size([100_000]))
    assert {one["component"] for one in listed} == set(weights.nonzero().flatten().tolist())
    assert len(listed) > 1
    for one in listed:
        ratio = whole.log_prob(z) - mixture(without(weights, one["component"]), parts).log_prob(z)
        error = ratio.std().item() / math.sqrt(len(z))
        assert one["cost"] == pytest.approx(ratio.mean().item(), rel=0.1, abs=4 * error)


def test_table_and_gallery(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    capsys.readouterr()
    main(["inspect", str(run)])
    output = capsys.readouterr()
    assert "nats to drop it" in output.out
    saved = tensors(run)["model/prior.log_weights"][0]
    assert len(output.out.splitlines()) == 1 + (saved > EMPTY / 2).sum()
    assert output.err == "gallery: components.png\n"
    with Image.open(tmp_path / "components.png") as one, Image.open(run / "samples" / "components.png") as other:
        assert one.tobytes() == other.tobytes()
        assert one.height > 3 * 2 * 40  # three tasks, two rows of tiles each


def test_the_run_folder_keeps_the_numbers_of_the_first_replica(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = json.loads((run / "components.json").read_text())
    pictures = [one.pop(key) for one in kept["components"] for key in ("pseudo_input", "decoded")]
    assert all(picture.startswith("iVBORw0KGgo") for picture in pictures)
    assert kept["components"] == inspected(capsys, run)["components"]


def test_a_pruned_run_can_be_used_in_every_way(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tensors(run)["memory/boo.log_weights"]
    found = inspected(capsys, run, "--prune", "1e6")
    assert [one["cost"] for one in found["components"]] == [None] * 3
    assert [one["weight"] for one in found["components"]] == [1.0] * 3
    logged = events(run)
    assert logged[-len(found["pruned"]) :] == found["pruned"]
    assert [event["kept"] for event in found["pruned"]] == [[1, 1]] * 3
    saved = tensors(run)
    weights = saved["memory/boo.log_weights"]
    assert torch.equal(weights, saved["model/prior.log_weights"][:, :3])
    assert ((weights > EMPTY / 2).sum(-1) == 1).all()
    assert (before[weights > EMPTY / 2] > EMPTY / 2).all()  # nothing came back to life
    assert "pruned after the last evaluation" in (run / "report.html").read_text()

    main(["eval", str(run), "--metric", "nll", "--quiet", "--json"])
    assert json.loads(capsys.readouterr().out)["nll"]["pooled"] != events(run, "evaluation")[-1]["nll"]["pooled"]
    main(["sample", str(run), "--n", "4", "--out", str(tmp_path / "grid.png")])
    log = (run / "metrics.jsonl").read_bytes()
    train(run, "boo+distill")
    assert (run / "metrics.jsonl").read_bytes() == log
    capsys.readouterr()
    main(["inspect", str(run)])
    assert capsys.readouterr().out.count("the only one") == 3


def test_a_pruned_run_can_be_extended(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspected(capsys, run, "--prune", "1e6")
    before = tensors(run)["model/prior.log_weights"]
    main(["extend", str(run), "--metric", "nll", "--quiet"])
    after = tensors(run)["model/prior.log_weights"]
    assert torch.equal(after[:, :3], before[:, :3])
    found = inspected(capsys, run)["components"]
    assert {one["task"] for one in found} == {0, 1, 2, 3}
    assert [one["name"] for one in found][-1] == "3"
    pictured = json.loads((run / "components.json").read_text())["components"]
    assert [one["component"] for one in pictured] == [one["component"] for one in found]


def test_pruning_one_task_leaves_the_others_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tensors(run)["model/prior.log_weights"]
    inspected(capsys, run, "--prune", "1e6", "--task", "1")
    after = tensors(run)["model/prior.log_weights"]
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert ((after[:, 1] > EMPTY / 2).sum(-1) == 1).all()


def test_where_nothing_is_cheap_enough_nothing_changes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert inspected(capsys, run, "--prune", "1e-30")["pruned"] == []
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def stop_before(task: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs stop when the first tasks are done and evaluated."""
    learn = Run.learn

    def stopping(run: Run, trainer: Trainer, data: Any) -> None:
        if trainer.tasks_done == task:
            raise RunError("stopped by the test")
        learn(run, trainer, data)

    monkeypatch.setattr(Run, "learn", stopping)


@pytest.mark.parametrize("method", ["boo", "boo+distill"])
def test_a_pruned_run_trains_on(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--boo-lambda", "1"] if method == "boo" else []
    with monkeypatch.context() as patch:
        stop_before(2, patch)
        with pytest.raises(SystemExit):
            train(tmp_path / "run", method, *words)
    inspected(capsys, "run", "--prune", "1e6")
    pruned_weights = tensors(tmp_path / "run")["model/prior.log_weights"][:, :2]
    train(tmp_path / "run", method, *words)
    weights = tensors(tmp_path / "run")["model/prior.log_weights"]
    assert torch.equal(weights[:, :2], pruned_weights)
    assert (weights[:, 2] > EMPTY / 2).any()
    last = events(tmp_path / "run", "evaluation")[-1]
    assert last["seen"] == 3
    assert all(math.isfinite(value) for value in last["nll"]["pooled"])


def test_in_the_middle_of_a_task_finished_ones_are_shown_and_nothing_is_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    block = Run.block

    def stopping(run: Run, trainer: Trainer) -> None:
        run.stop_requested = trainer.tasks_done == 1 and trainer.epoch == 2
        block(run, trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "block", stopping)
        with pytest.raises(SystemExit):
            train(tmp_path / "run", "boo")
    assert {one["task"] for one in inspected(capsys, "run")["components"]} == {0}
    log = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert "in the middle of a task: let `boovae train` finish it" in refused(capsys, "run", "--prune", "1")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == log


def test_a_run_without_a_finished_task_has_nothing_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopping(run: Run, trainer: Trainer) -> None:
        run.checkpoint(trainer)
        raise RunError("stopped by the test")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "block", stopping)
        with pytest.raises(SystemExit):
            train(tmp_path / "run", "boo")
    assert "no task is finished yet" in refused(capsys, tmp_path / "run")


@pytest.mark.parametrize("method", ["standard", "joint"])
def test_methods_without_components_are_refused_by_name(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", method, "--tasks", "1")
    message = refused(capsys, tmp_path / "run", "--prune", "1")
    assert f"method '{method}' stores no components; train a run with --method boo" in message
    assert not (tmp_path / "run" / "components.json").exists()


def test_wrong_arguments_are_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = refused(capsys, run, "--task", "3")
    assert "--task is 3; this run has learned tasks 0 to 2: 0 “0”, 1 “1”, 2 “2”" in wrong
    assert "--replica is 2; this run has replicas 0 to 1" in refused(capsys, run, "--replica", "2")
    assert "--prune is 0.0; it must be a number of nats above 0" in refused(capsys, run, "--prune", "0")
    assert "not a run folder" in refused(capsys, tmp_path)
    assert not (tmp_path / "components.png").exists()
