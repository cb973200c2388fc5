"""The negative log-likelihood of test images, pooled and task by task (estimated in `likelihood.py`).

Beside it stands the number of effective samples of the typical (median) image, of the worst task: below 10 of them the
NLL is too high by an unknown amount.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from boovae.metrics.evaluation import FEW, NLL
from boovae.metrics.metric import Context, Metric, Number
from boovae.metrics.schema import Floats, rounded

if TYPE_CHECKING:
    from torch import Tensor


class NegativeLogLikelihood(Metric):
    """NLL in nats per image."""

    name = section = "nll"
    aliases = frozenset({"forgetting"})  # forgetting compares NLLs

    def measure(self, context: Context) -> NLL:
        """Score the test images of all available tasks; numbers that need the others are NaN."""
        import torch

        from boovae.metrics.likelihood import log_likelihood_of_tasks

        trainer, samples = context.trainer, context.trainer.settings.evaluation.samples
        images = torch.cat([task.test.images for task in context.present]).to(trainer.device)
        sizes = [0 if task is None else len(task.test.images) for task in context.tasks]
        owners = torch.repeat_interleave(torch.tensor(sizes)).to(trainer.device)
        fit = _fits(context)
        arguments = (trainer, images, owners, samples, context.progress, context.partial_results)
        found = log_likelihood_of_tasks(*arguments, fit=fit)

        def per_task(values: Tensor, middle: Callable[[Tensor], Tensor] = lambda part: part.mean(1)) -> Floats:
            return rounded(torch.stack([middle(part) for part in values.double().cpu().split(sizes, dim=1)]))

        def median(part: Tensor) -> Tensor:  # of a task without images, as of a diverged replica, NaN
            return part.quantile(0.5, dim=1) if part.numel() else part.mean(1)

        effective = found.effective_samples
        pooled = -found.log_prob.double().mean(1)
        return NLL(
            pooled=rounded(pooled if all(sizes) else torch.full_like(pooled, torch.nan)),
            per_task=per_task(-found.log_prob),
            own=per_task(-found.own),
            effective_samples=per_task(effective),
            effective_median=per_task(effective, median),
            few_effective=per_task((effective < FEW).where(effective.isfinite(), torch.nan)),
            fitted=per_task(found.fitted) if fit else None,
            samples=samples,
        )

    def numbers(self, section: NLL) -> Iterator[Number]:
        """Yield the NLL; if images of some tasks are gone, the terminal shows the mean over the others."""
        yield Number(section.pooled, "nll", "nll/pooled", curve="NLL of all tasks seen, nats")
        available = section.per_task[(section.per_task == section.per_task).any(1)]
        if (section.pooled == section.pooled).any() or not len(available):
            yield Number(section.pooled, column="NLL")
        else:
            of = "one task" if len(available) == 1 else f"{len(available)} tasks"
            yield Number(available.mean(0), column="NLL", remark=f"(of {of})")
        yield Number(section.per_task, "nll", "nll")
        yield Number(section.own, "nll_own", "nll_own")
        yield Number(section.effective_samples, "effective_samples", "effective_samples")
        for name in ("effective_median", "few_effective", "fitted"):
            if (values := getattr(section, name)) is not None:
                yield Number(values, name)
        typical = section.typical_effective
        lowest = np.where(np.isfinite(typical), typical, np.inf).min(0)
        of = f"of {section.samples}" if section.samples else ""
        yield Number(lowest, column="effective samples", digits=1, remark=of)


def _fits(context: Context) -> bool:
    """Whether to fit posteriors: on the user's own data, but a run measured without keeps its numbers comparable.

    So do the packaged datasets, for which there are published numbers.
    """
    from boovae.data import DATASETS

    settings = context.trainer.settings
    if settings.evaluation.fit_posterior != "auto":
        return settings.evaluation.fit_posterior == "always"
    past = [each.nll.fitted is not None for each in context.history if each.nll is not None]
    return past[-1] if past else settings.data.dataset not in DATASETS
