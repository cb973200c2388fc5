"""An exported model gives the same numbers as the model, without this package."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from boovae import BooVAE
from boovae.cli.main import main
from boovae.data import Stream
from boovae.errors import InputError
from boovae.model.distributions import DiagonalNormal
from boovae.model.vae import VAE
from boovae.replicas.stacked import replica_of
from boovae.runs.export import export
from boovae.training.trainer import Trainer
from conftest import tiny, trained

Array = NDArray[np.float32]
Program = Callable[..., list[Array]]

REPLICA = 1


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


def truth(trainer: Trainer, function: Callable[..., Any], *arguments: Array, task: int | None = None) -> Any:
    view = trainer.replicas if task is None else trainer.method.view(trainer.replicas, task)
    return view.call(replica_of(view.tensors(), REPLICA), function, *map(torch.from_numpy, arguments))


def torch_program(path: Path) -> Program:
    module = torch.export.load(path).module()

    def run(*arguments: Array) -> list[Array]:
        result = module(*map(torch.from_numpy, arguments))
        return [tensor.numpy() for tensor in (result if isinstance(result, tuple) else (result,))]

    return run


def onnx_program(path: Path) -> Program:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path)

    def run(*arguments: Array) -> list[Array]:
        names = [entry.name for entry in session.get_inputs()]
        result: list[Array] = session.run(None, dict(zip(names, arguments, strict=True)))
        return result

    return run


def linear(tensors: dict[str, Array], name: str, x: Array) -> Array:
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def leaky(x: Array) -> Array:
    return np.where(x > 0, x, np.float32(0.01) * x)


class PlainNumPy:
    """What somebody without torch makes of the weights."""

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.card = json.loads((folder / "model.json").read_text())

    def encoder(self, images: Array) -> list[Array]:
        t = self.tensors
        x = (images - t["centre"]) / t["scale"]
        hidden = leaky(linear(t, "encoder.body.2", leaky(linear(t, "encoder.body.0", x))))
        mean, log_variance = np.split(linear(t, "encoder.head", hidden), 2, axis=1)
        return [mean, log_variance.clip(*self.card["log_variance_range"])]

    def decoder(self, latents: Array) -> list[Array]:
        t = self.tensors
        output = linear(t, "decoder.4", leaky(linear(t, "decoder.2", leaky(linear(t, "decoder.0", latents)))))
        if self.card["noise"] == "learned":  # the second half are widths
            output = np.split(output, 2, axis=1)[0]
        image = 1 / (1 + np.exp(-output)) if self.card["likelihood"] == "bernoulli" else output
        return [image * t["scale"] + t["centre"]]

    def sampler(self, uniform: Array, normal: Array) -> list[Array]:
        weights = np.exp(self.tensors["prior.log_weights"])
        chosen = np.searchsorted(np.cumsum(weights / weights.sum()), uniform, side="right")
        deviation = np.exp(0.5 * self.tensors["prior.log_variance"][chosen])
        return self.decoder(self.tensors["prior.mean"][chosen] + deviation * normal)


def programs(folder: Path, form: str) -> dict[str, Program]:
    if form == "safetensors":
        plain = PlainNumPy(folder)
        return {"encoder": plain.encoder, "decoder": plain.decoder, "sampler": plain.sampler}
    load, ending = (torch_program, ".pt2") if form == "torch-export" else (onnx_program, ".onnx")
    return {name: load(folder / f"{name}{ending}") for name in ("encoder", "decoder", "sampler")}


@pytest.fixture(scope="module")
def trainer(digits: Stream) -> Trainer:
    return trained(tiny(method="boo+distill"), digits)


def check(trainer: Trainer, nets: dict[str, Program], task: int | None) -> None:
    """Compare with the model on other numbers of rows than it was exported with, one among them."""
    latent_dim = trainer.settings.model.latent_dim
    for rows in (1, 2, 50):
        images, latents, uniform = numbers(0, rows, 64), numbers(1, rows, latent_dim), numbers(2, rows)
        posterior: DiagonalNormal = truth(trainer, VAE.posterior, images, task=task)
        for found, expected in zip(nets["encoder"](images), posterior, strict=True):
            np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
        expected = truth(trainer, VAE.images, latents, task=task)
        np.testing.assert_allclose(nets["decoder"](latents)[0], expected.numpy(), atol=1e-5)

        def sampled(model: VAE, uniform: torch.Tensor, normal: torch.Tensor) -> torch.Tensor:
            return model.images(model.prior(model.posterior, task).sample(uniform, normal))

        expected = truth(trainer, sampled, uniform, latents, task=task)
        np.testing.assert_allclose(nets["sampler"](uniform, latents)[0], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("form", "task"),
    [("safetensors", None), ("safetensors", 1), ("torch-export", None), ("torch-export", 1), ("onnx", 1)],
)
def test_the_exported_model_gives_the_same_numbers(
    trainer: Trainer, form: Any, task: int | None, tmp_path: Path
) -> None:
    if form == "onnx":
        pytest.importorskip("onnxscript")
    paths = export(trainer, {}, tmp_path, form, replica=REPLICA, task=task)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    check(trainer, programs(tmp_path, form), task)


@pytest.mark.parametrize(("method", "task"), [("standard", None), ("vcl", None), ("multihead", 1), ("mog", None)])
def test_every_kind_of_model_can_be_exported(method: str, task: int | None, digits: Stream, tmp_path: Path) -> None:
    other = trained(tiny(method=method, tasks=2, epochs=1), digits)
    export(other, {}, tmp_path, "torch-export", replica=REPLICA, task=task)
    check(other, programs(tmp_path, "torch-export"), task)


@pytest.mark.parametrize("form", ["safetensors", "torch-export", "onnx"])
def test_a_saved_estimator_is_exported_in_the_units_of_its_data(form: str, tmp_path: Path) -> None:
    if form == "onnx":
        pytest.importorskip("onnxscript")
    x = np.random.default_rng(0).normal([0, 5, -1000], [1, 10, 100], size=(60, 3))
    model = BooVAE(2, epochs=2, net="mlp:8", random_state=0, device="cpu").fit(x)
    model.save(tmp_path / "model")
    main(["export", str(tmp_path / "model"), "--format", form])
    nets = programs(tmp_path / "model" / "export" / form, form)
    few = x[:7].astype(np.float32)
    np.testing.assert_allclose(nets["encoder"](few)[0], model.transform(few), atol=1e-4)
    codes = model.transform(few)
    np.testing.assert_allclose(nets["decoder"](codes)[0], model.inverse_transform(codes), rtol=1e-4)


def test_the_page_about_exporting_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    BooVAE(10, epochs=1, net="mlp:8", random_state=0, device="cpu").fit(numbers(0, 60, 5, 4)).save("RUN")
    for form in ("torch-export", "onnx"):
        main(["export", "RUN", "--format", form])
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
        assert names["images"].shape == (16, 20)


def test_what_cannot_be_exported_is_said(
    trainer: Trainer, digits: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match=r"boovae\[onnx\]"):
        export(trainer, {}, tmp_path, "onnx")
    with pytest.raises(InputError, match=r"method 'multihead' has a network per task: choose one with task"):
        export(trained(tiny(method="multihead", tasks=1, epochs=1), digits), {}, tmp_path, "safetensors")
    with pytest.raises(InputError, match="no task is finished"):
        export(Trainer(tiny(), digits.spec), {}, tmp_path, "safetensors")
