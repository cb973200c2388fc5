"""The training bound with one sample of every image and with several, against torch.distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Normal as TorchNormal
from torch.func import grad, vmap

from boovae.data import ImageSpec, Stream
from boovae.errors import InputError
from boovae.methods import make_method
from boovae.model.likelihoods import Bernoulli
from boovae.model.nets import make_nets
from boovae.model.priors import NormalPrior, Prior, VampPrior
from boovae.model.vae import VAE, Bound
from boovae.replicas.stacked import Replicas
from boovae.training.events import Event
from boovae.training.task_progress import Control
from boovae.training.trainer import Trainer
from conftest import Recorder, in_torch, tiny

IMAGES, PIXELS, LATENT = 4, 6, 3


def model_with(prior: Prior) -> VAE:
    torch.manual_seed(0)
    nets = make_nets("mlp:5", (PIXELS,), LATENT, (-6.0, 2.0))
    return VAE(*nets, Bernoulli(), prior, LATENT).requires_grad_(False)


def log_ratios(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
    """log p(x, z) − log q(z | x) of every sample, (S, B), in torch's own words."""
    mean, log_variance = model.posterior(x)
    q = TorchNormal(mean, (0.5 * log_variance).exp())
    z = q.mean + q.stddev * noise
    likelihood = TorchBernoulli(logits=model.decode(z)).log_prob(x).sum(-1)
    normal = isinstance(model.prior, NormalPrior)
    prior = None if normal else in_torch(model.prior(model.posterior))
    log_prior: Tensor = TorchNormal(0, 1).log_prob(z).sum(-1) if prior is None else prior.log_prob(z)
    ratios: Tensor = likelihood + log_prior - q.log_prob(z).sum(-1)
    return ratios


def tight_bound(
    model: VAE, x: Tensor, noise: Tensor, kl_weight: Tensor, choice: Tensor | None = None
) -> tuple[Tensor, Bound]:
    density = model.prior.for_training(model.posterior)[0]
    return model.tight_bound(x, model.posterior(x), density, noise, kl_weight, choice)


@pytest.mark.parametrize("prior", [NormalPrior(LATENT), VampPrior(3, PIXELS, (0.0, 1.0))], ids=["normal", "vamp"])
def test_several_samples_make_the_importance_weighted_bound(prior: Prior) -> None:
    model = model_with(prior)
    x, noise = torch.rand(IMAGES, PIXELS).round(), torch.randn(7, IMAGES, LATENT)
    truth = math.log(7) - log_ratios(model, x, noise).logsumexp(0)
    torch.testing.assert_close(tight_bound(model, x, noise, torch.ones(()))[0], truth)


def test_more_samples_are_tighter_and_never_better_than_the_truth() -> None:
    model = model_with(NormalPrior(LATENT))
    x = torch.rand(IMAGES, PIXELS).round()
    mean = {}
    for samples in (1, 5, 50):
        noise = torch.randn(4000, samples, IMAGES, LATENT)
        bounds = vmap(lambda noise: tight_bound(model, x, noise, torch.ones(()))[0])(noise)
        mean[samples] = bounds.mean().item()
    truth = (math.log(200_000) - log_ratios(model, x, torch.randn(200_000, IMAGES, LATENT)).logsumexp(0)).mean().item()
    assert mean[1] > mean[5] + 0.01 > mean[50] + 0.02 > truth + 0.02


Loss = Callable[[VAE, Tensor, Tensor, Tensor, Tensor], Tensor]


def plain_loss(model: VAE, x: Tensor, kl_weight: Tensor, noise: Tensor, choice: Tensor) -> Tensor:
    return -torch.logsumexp(-model.bound(x, noise).weighted(kl_weight), 0).mean()


def tight_loss(model: VAE, x: Tensor, kl_weight: Tensor, noise: Tensor, choice: Tensor) -> Tensor:
    return tight_bound(model, x, noise, kl_weight, choice)[0].mean()


def gradients(model: VAE, loss: Loss, kl_weight: float, draws: int) -> dict[str, Tensor]:
    """The gradient of every parameter for each of many draws of the noise, {name: (draws, ...)}."""
    replicas = Replicas(lambda: model.double(), [0], torch.device("cpu"))
    parameters = {name: tensor[0] for name, tensor in replicas.parameters.items()}
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(IMAGES, PIXELS, generator=generator, dtype=torch.double).round()
    noise = torch.randn(draws, 8, IMAGES, LATENT, generator=generator, dtype=torch.double)
    choice = torch.rand(noise.shape[:-1], generator=generator, dtype=torch.double)
    weight = torch.tensor(kl_weight, dtype=torch.double)
    of_one = grad(lambda parameters, *random: replicas.call(parameters, loss, x, weight, *random))
    found: dict[str, Tensor] = vmap(of_one, (None, 0, 0), chunk_size=2000)(parameters, noise, choice)
    return found


@pytest.mark.parametrize("prior", [NormalPrior(LATENT), VampPrior(3, PIXELS, (0.0, 1.0))], ids=["normal", "vamp"])
@pytest.mark.parametrize("kl_weight", [1.0, 0.3, 2.0])
def test_the_gradient_is_that_of_the_bound_in_the_mean(prior: Prior, kl_weight: float) -> None:
    model = model_with(prior)
    plain, tight = (gradients(model, loss, kl_weight, draws=20_000) for loss in (plain_loss, tight_loss))
    for part in ("encoder.", "decoder."):
        truth, found = (
            torch.cat([g[name].flatten(1) for name in g if name.startswith(part)], 1) for g in (plain, tight)
        )
        error = (found - truth).std(0) / len(truth) ** 0.5
        assert ((found - truth).mean(0).abs() <= 5 * error + 1e-12).all()
        assert truth.mean(0).norm() > 10 * error.norm()  # a wrong one would show


def test_the_gradient_comes_with_the_value_of_the_bound() -> None:
    model, weight = model_with(NormalPrior(LATENT)), torch.tensor(0.7)
    x, noise = torch.rand(IMAGES, PIXELS).round(), torch.randn(7, IMAGES, LATENT)
    with_gradient, parts = tight_bound(model, x, noise, weight, torch.rand(7, IMAGES))
    torch.testing.assert_close(with_gradient, tight_bound(model, x, noise, weight)[0])
    torch.testing.assert_close(with_gradient, math.log(7) - (-parts.weighted(weight)).logsumexp(0))


def test_an_encoder_that_is_right_is_left_alone_by_every_draw() -> None:
    """Where latents mean nothing, N(0, I) is the true posterior; the plain gradient is noise around zero there."""
    model = model_with(NormalPrior(LATENT))
    for name, tensor in model.named_parameters():
        if name.startswith(("encoder.head.", "decoder.0.")):
            tensor.zero_()
    plain, tight = (gradients(model, loss, 1.0, draws=50) for loss in (plain_loss, tight_loss))
    assert plain["encoder.head.bias"].abs().mean() > 0.01
    assert all(tight[name].abs().max() < 1e-12 for name in tight if name.startswith("encoder."))


@pytest.mark.parametrize("method", ["boo+distill", "boo-flow+distill", "mog", "joint", "multihead+ewc", "boo+replay"])
def test_methods_learn_by_it_and_the_losss_terms_stay_those_of_the_elbo(method: str, digits: Stream) -> None:
    trainer = Trainer(tiny(method=method, bound_samples=4), digits.spec)
    recorder = Recorder()
    for task in digits[:2]:
        trainer.learn(task, recorder)
    first = next(event for event in recorder.events if event["event"] == "epoch")["train"]
    for loss, reconstruction, kl in zip(first["loss"], first["reconstruction"], first["kl"], strict=True):
        assert loss < reconstruction + kl


def test_validation_weighs_the_kl_fully_from_the_first_epoch_on(digits: Stream) -> None:
    """Else the best epoch of a warm-up would be chosen by numbers that cannot be compared."""
    settings = tiny(method="standard", bound_samples=4, kl_warmup=50, epochs=2)
    trainer = Trainer(settings, digits.spec)
    told: list[list[float]] = []

    class Noting(Recorder):
        def epoch(self, trainer: Trainer, event: Event) -> None:
            trainer.engine.kl_weight.fill_(settings.training.kl_weight)
            told.append(trainer.engine.validate()["loss"].tolist())

    recorder = Noting()
    trainer.learn(digits[0], recorder)
    logged = [event["valid"]["loss"] for event in recorder.events if event["event"] == "epoch"]
    assert logged == [pytest.approx(each, rel=1e-5) for each in told]


def test_plateaus_and_early_stopping_watch_the_bound_that_is_learned(
    digits: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tiny(method="boo+distill", bound_samples=4, kl_weight=0.5, stop_by="bound"), digits.spec)
    seen: list[tuple[Any, Any]] = []
    judge = Control.judge

    def noting(control: Control, settings: Any, epoch: int, plain: Any, watched: Any, *others: Any) -> Any:
        seen.append((plain, watched))
        return judge(control, settings, epoch, plain, watched, *others)

    monkeypatch.setattr(Control, "judge", noting)
    recorder = Recorder()
    for task in digits[:2]:
        trainer.learn(task, recorder)
    last = [event for event in recorder.events if event["event"] == "epoch"][-1]["valid"]
    assert last["distill.decoder"][0] > 0
    penalties = [sum(values) for values in zip(last["distill.decoder"], last["distill.encoder"], strict=True)]
    truth = [loss - penalty for loss, penalty in zip(last["loss"], penalties, strict=True)]
    for found in seen[-1]:
        assert found.tolist() == pytest.approx(truth, rel=1e-5)


def test_what_cannot_have_several_samples_is_refused() -> None:
    with pytest.raises(InputError, match="set bound_samples=1"):
        make_method(tiny(method="boo+vcl", bound_samples=2))
    with pytest.raises(InputError, match="bound_samples is 0"):
        tiny(bound_samples=0)
    with pytest.raises(InputError, match="use normalisation='group', or bound_samples=1"):
        Trainer(tiny(net="conv:4", normalisation="batch", bound_samples=2), ImageSpec((8, 8)))
    Trainer(
        tiny(normalisation="batch", bound_samples=2), ImageSpec((8, 8))
    )  # without convolutions there is nothing to normalise
