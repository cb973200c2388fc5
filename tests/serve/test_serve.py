"""The server as the page asks it: samples, ways, own images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import distributions

from boovae.data import Stream
from boovae.metrics.likelihood import log_likelihood
from boovae.model.vae import VAE
from boovae.training.trainer import Trainer
from conftest import tiny
from served_run import SAMPLES, Served, picture, pixels

METHODS = ("boo+distill", "mog", "standard", "multihead", "multihead+boo")


@pytest.fixture
def boo(served: Callable[[str], Served]) -> Served:
    return served("boo+distill")


def decoded(trainer: Trainer, z: list[float], task: int | None) -> np.ndarray[Any, Any]:
    """Return the second replica's image at z, as bytes, by way of all replicas at once."""
    view = trainer.replicas if task is None else trainer.method.view(trainer.replicas, task)
    images = view.map(VAE.images, torch.tensor(z).expand(len(view), 1, -1))
    return np.asarray((images[1, 0] * 255).round().to(torch.uint8).reshape(trainer.spec.shape))


def near(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether pictures agree; one grey level may be rounded otherwise."""
    return bool((np.abs(one.astype(int) - other.astype(int)) <= 1).all())


# --- what can be asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_page_learns_what_the_model_offers(served: Callable[[str], Served], method: str) -> None:
    about = served(method).client.get("/api/model").json()
    assert (about["method"], about["shape"], about["latent_dim"]) == (method, [8, 8], 4)
    assert [task["name"] for task in about["tasks"]] == ["0", "1"]
    assert all(task["typical"] < 0 for task in about["tasks"])
    assert sum(task["mass"] for task in about["tasks"]) == pytest.approx(1)
    assert about["apart"] == (method != "standard")
    assert about["components"] == ("boo" in method or "mog" in method)
    assert about["networks"] == ("multihead" in method)
    assert str(served(method).folder.parent) not in str(about)


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_repeats_the_samples_and_another_does_not(served: Callable[[str], Served], method: str) -> None:
    run = served(method)
    first = run.sample(n=5, seed=3)
    assert first == run.sample(n=5, seed=3)
    assert len({image["image"] for image in first + run.sample(n=5, seed=4)}) == 10
    for image in first:
        assert near(pixels(image["image"]), decoded(run.trainer, image["z"], image["task"]))
    if run.player.apart:
        assert run.sample(n=5, seed=3, task=0) != run.sample(n=5, seed=3, task=1)


def test_a_component_is_sampled_as_its_gaussian_says(boo: Served) -> None:
    listed = boo.client.get("/api/components/1").json()["components"]
    assert sum(one["weight"] for one in listed) == pytest.approx(1, abs=1e-5)
    place, images = listed[0]["component"], []
    for seed in range(5):
        images += boo.sample(n=100, seed=seed, task=1, component=place)
    z = np.array([image["z"] for image in images])
    buffers = boo.trainer.replicas.buffers
    mean = buffers["prior.mean"][1, 1, place].numpy()
    deviation = (0.5 * buffers["prior.log_variance"][1, 1, place]).exp().numpy()
    assert np.all(np.abs(z.mean(0) - mean) < 5 * deviation / np.sqrt(len(z)))
    assert z.std(0) == pytest.approx(deviation, rel=0.2)
    assert near(pixels(listed[0]["image"]), decoded(boo.trainer, mean.tolist(), None))


def test_networks_of_several_tasks_take_turns(served: Callable[[str], Served]) -> None:
    assert [image["task"] for image in served("multihead").sample(n=4)] == [0, 1, 0, 1]
    assert [image["task"] for image in served("multihead").sample(n=2, task=1)] == [1, 1]
    assert [image["task"] for image in served("standard").sample(n=2)] == [None, None]


@pytest.mark.parametrize("method", METHODS)
def test_the_way_begins_and_ends_at_the_images_and_is_straight(served: Callable[[str], Served], method: str) -> None:
    run = served(method)
    start, end = run.sample(n=2, seed=1, **({"task": 1} if run.player.apart else {}))
    places = {name: {"z": one["z"], "task": one["task"]} for name, one in (("start", start), ("end", end))}
    frames = run.post("/api/path", **places, frames=5)["images"]
    assert len(frames) == 5
    assert near(pixels(frames[0]["image"]), pixels(start["image"]))
    assert near(pixels(frames[-1]["image"]), pixels(end["image"]))
    middle = (np.array(start["z"]) + np.array(end["z"])) / 2
    assert frames[2]["z"] == pytest.approx(middle.tolist(), abs=1e-5)


def test_between_networks_the_end_is_encoded_by_those_of_the_start(served: Callable[[str], Served]) -> None:
    run = served("multihead")
    start, end = run.sample(n=2, seed=1)
    assert (start["task"], end["task"]) == (0, 1)
    places = {name: {"z": one["z"], "task": one["task"]} for name, one in (("start", start), ("end", end))}
    last = run.post("/api/path", **places, frames=2)["images"][-1]
    image = run.trainer.method.view(run.trainer.replicas, 1).map(VAE.images, torch.tensor(end["z"]).expand(2, 1, -1))
    there = run.trainer.method.view(run.trainer.replicas, 0).map(VAE.posterior, image).mean[1, 0]
    assert last["task"] == 0
    assert last["z"] == pytest.approx(there.tolist(), abs=1e-5)


def test_the_task_of_a_latent_is_what_the_mixture_says(boo: Served) -> None:
    buffers = {name.removeprefix("prior."): tensor[1] for name, tensor in boo.trainer.replicas.buffers.items()}
    for image in boo.sample(n=20, seed=5):
        scores = []
        for task in range(2):
            parts = distributions.Independent(
                distributions.Normal(buffers["mean"][task], (0.5 * buffers["log_variance"][task]).exp()), 1
            )
            weights = distributions.Categorical(logits=buffers["log_weights"][task])
            mixture = distributions.MixtureSameFamily(weights, parts)
            scores.append(float(buffers["log_masses"][task] + mixture.log_prob(torch.tensor(image["z"]))))
        assert image["task"] == int(np.argmax(scores))


# --- an own image ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_own_image_is_scored_as_the_evaluation_would(
    served: Callable[[str], Served], digits: Stream, method: str
) -> None:
    run = served(method)
    grey = (digits[1].test.images[0].reshape(8, 8) * 255).round().to(torch.uint8)
    answer = run.look(picture(grey.numpy()))
    assert np.array_equal(pixels(answer["seen"]), grey.numpy())
    x, scores = (grey.float() / 255).reshape(1, -1), []
    for task in range(2):
        view = run.trainer.method.view(run.trainer.replicas, task)
        scores.append(float(log_likelihood(view, x, SAMPLES, tasks=torch.tensor([task])).own[1, 0]))
    if method == "standard":
        assert answer["tasks"] == []
        assert answer["log_likelihood"] == pytest.approx(scores[0], abs=1e-3)
        return
    sizes = np.array(run.trainer.sizes if run.trainer.replicas.model.prior.shares_mass else [1, 1])
    joint = np.array(scores) + np.log(sizes / sizes.sum())
    assert [task["log_likelihood"] for task in answer["tasks"]] == pytest.approx(scores, abs=1e-3)
    assert [task["share"] for task in answer["tasks"]] == pytest.approx(np.exp(joint) / np.exp(joint).sum(), abs=1e-3)
    assert answer["log_likelihood"] == pytest.approx(np.log(np.exp(joint).sum()), abs=1e-3)
    best = answer["reconstruction"]
    assert best["task"] == int(np.argmax(joint))
    assert near(pixels(best["image"]), decoded(run.trainer, best["z"], best["task"]))


def test_a_picture_is_cut_shrunk_turned_and_inverted_as_the_model_wants_it(boo: Served) -> None:
    small = np.arange(64, dtype=np.uint8).reshape(8, 8)
    large = small.repeat(5, 0).repeat(5, 1)
    wide = np.hstack([np.zeros((40, 20), np.uint8), large, np.zeros((40, 20), np.uint8)])
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held upright: turn right to see it
    for sent in (
        picture(small),
        picture(large),
        picture(wide),
        picture(np.stack([large] * 3, 2)),
        picture(large, "BMP"),
        picture(np.rot90(large).copy(), exif=turned),
    ):
        assert near(pixels(boo.look(sent)["seen"]), small)
    assert np.array_equal(pixels(boo.look(picture(small), "?invert=1")["seen"]), 255 - small)


def test_a_model_of_features_takes_no_pictures(finished: Callable[..., Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", images=rng.random((60, 12), np.float32), labels=np.arange(60) % 2)
    run = Served(finished(tiny(tasks=2, epochs=1, dataset=f"npz:{tmp_path / 'rows.npz'}")))
    assert run.client.get("/api/model").json()["pictures"] is False
    assert pixels(run.sample(n=1)[0]["image"]).shape[2] == 3  # a strip of colours
    assert run.client.post("/api/look", content=picture(np.zeros((9, 9), np.uint8))).status_code == 422
