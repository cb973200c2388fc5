"""Images that the encoder describes poorly are scored by a better proposal; the score stays a lower bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from boovae.data import Stream
from boovae.metrics import likelihood as module
from boovae.metrics.evaluation import FEW, Evaluation
from boovae.metrics.fitted import proposed_by_mixture
from boovae.metrics.likelihood import LogLikelihood, log_likelihood, scored_again
from boovae.metrics.measure import evaluate
from boovae.metrics.partial_results import PartialResult
from boovae.replicas.stacked import Replicas
from conftest import tiny, trained
from linear_gaussian import exact_log_prob, linear_images, linear_model

CPU, SEEDS, SAMPLES = torch.device("cpu"), (0, 1), 100


def wrong_replicas() -> Replicas:
    """Return two models whose encoders are far off and much too sure."""
    return Replicas(lambda: linear_model(shift=2.5, wider=-1.5), SEEDS, CPU)


def both(replicas: Replicas, images: Tensor, seed: int = 0) -> tuple[LogLikelihood, LogLikelihood]:
    """Return the scores by the encoder alone, and those after poor images were scored again."""
    found = log_likelihood(replicas, images, SAMPLES, seed=seed)
    return found, scored_again(replicas, images, SAMPLES, found, seed=seed)


def test_a_wrong_encoder_costs_nats_that_the_fit_regains_and_the_truth_is_never_exceeded() -> None:
    replicas, images = wrong_replicas(), linear_images(6)
    exact = exact_log_prob(replicas, images)
    alone, again = (torch.stack(scores) for scores in zip(*(
        [found.log_prob.double() for found in both(replicas, images, seed)] for seed in range(12)
    ), strict=True))  # fmt: skip
    gap_alone, gap = exact - alone, exact - again  # (seeds, replicas, images)
    assert gap_alone.mean().item() > 3
    assert gap.abs().mean().item() < 0.05 * gap_alone.mean().item()
    # Images of one seed share their noise: the seeds are what is independent.
    per_seed = gap.mean((1, 2))
    assert per_seed.mean().item() > -3 * per_seed.std().item() / math.sqrt(len(per_seed))
    assert (gap > -1.0).all()


def test_the_fit_raises_the_effective_samples() -> None:
    alone, again = both(wrong_replicas(), linear_images(6))
    assert (alone.effective_samples < FEW).all()
    assert (again.effective_samples > 0.2 * SAMPLES).all()
    assert again.fitted.all()
    assert not alone.fitted.any()


def test_images_with_enough_effective_samples_keep_their_scores_bit_for_bit() -> None:
    replicas, images = Replicas(lambda: linear_model(shift=0.1), SEEDS, CPU), linear_images(8)
    found = log_likelihood(replicas, images, SAMPLES)
    assert (found.effective_samples >= FEW).all()
    found.effective_samples[1, 3] = 2.0  # as if one image of one replica were described poorly
    again = scored_again(replicas, images, SAMPLES, found)
    assert again.fitted.nonzero().tolist() == [[1, 3]]
    kept = ~again.fitted
    for before, after in zip(found, again, strict=True):
        assert torch.equal(before[kept], after[kept])
    assert again.log_prob[1, 3] != found.log_prob[1, 3]
    assert found.effective_samples[1, 3] == 2.0  # what was passed in is not changed


def test_a_score_is_made_of_draws_that_had_no_part_in_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    weigh = module._weigh

    def noted(*arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(arguments[-1])
        return weigh(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_weigh", noted)
    both(wrong_replicas(), linear_images(2))
    first, *_, last = seen
    assert not set(first.flatten().tolist()) & set(last.flatten().tolist())


def test_the_mixture_has_the_density_of_its_draws() -> None:
    generator = torch.Generator().manual_seed(1)
    mean, factor = torch.randn(4, 2, 3, generator=generator), torch.randn(4, 2, 3, 3, generator=generator).tril()
    factor.diagonal(dim1=-2, dim2=-1).exp_()
    noise, x = torch.randn(5, 3, generator=generator), linear_images(4)
    z, _, log_q = proposed_by_mixture(linear_model(), x, mean, factor, noise)
    assert z.shape == (4, 10, 3)
    torch.testing.assert_close(z[:, 5:], mean[:, 1:] + torch.einsum("sj,nij->nsi", noise, factor[:, 1]))
    mixture = MixtureSameFamily(Categorical(torch.ones(4, 2)), MultivariateNormal(mean, scale_tril=factor))
    torch.testing.assert_close(log_q, mixture.log_prob(z.transpose(0, 1)).T)


def test_scores_repeat_and_a_replicas_do_not_change_with_the_others() -> None:
    replicas, images = wrong_replicas(), linear_images(5)
    again = both(replicas, images)[1]
    assert all(map(torch.equal, again, both(replicas, images)[1]))
    for tensor in replicas.parameters.values():
        tensor[0] = torch.nan
    broken = both(replicas, images)[1]
    assert broken.log_prob[0].isnan().all()
    assert not broken.fitted[0].any()
    assert torch.equal(broken.log_prob[1], again.log_prob[1])


def test_an_interrupted_computation_continues_to_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", {"cpu": 4 * 6 * 4 * 3})  # three images at once
    replicas, images, partial = wrong_replicas(), linear_images(7), PartialResult()
    found, whole = both(replicas, images)
    shares: list[float] = []

    def stop(share: float) -> None:
        shares.append(share)
        if len(shares) == 4:
            raise KeyboardInterrupt

    partial.progress = stop
    with pytest.raises(KeyboardInterrupt):
        scored_again(replicas, images, SAMPLES, found, partial=partial)
    partial.progress = shares.append
    continued = scored_again(replicas, images, SAMPLES, found, partial=partial)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert all(map(torch.equal, continued, whole))


def test_posteriors_are_fitted_on_own_data_unless_the_run_was_measured_without(digits: Stream) -> None:
    trainer, tasks = trained(tiny(tasks=1), digits), [digits[0]]

    def fitted(history: list[Evaluation], **changes: str) -> Evaluation:
        trainer.settings = trainer.settings.changed(**changes)
        return evaluate(trainer, tasks, None, history, metrics=["nll"])

    packaged, own = fitted([]), fitted([], dataset="npz:own.npz")
    assert packaged.nll is not None
    assert packaged.nll.fitted is None
    assert own.nll is not None
    assert own.nll.fitted is not None
    assert own.nll.few_effective is not None
    assert packaged.nll.few_effective is not None
    fewer = packaged.nll.few_effective > 0
    np.testing.assert_array_equal(own.nll.fitted, packaged.nll.few_effective)
    assert (own.nll.pooled[fewer[0]] < packaged.nll.pooled[fewer[0]]).all()
    for history, as_before in (([packaged], None), ([own], own.nll.fitted)):
        again = fitted(history).nll
        assert again is not None
        assert (again.fitted is None) == (as_before is None)
        if again.fitted is not None:
            np.testing.assert_array_equal(again.fitted, as_before)
