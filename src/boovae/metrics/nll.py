"""The negative log-likelihood of test images, pooled and task by task (estimated in `likelihood.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from boovae.metrics.evaluation import NLL
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
        found = log_likelihood_of_tasks(trainer, images, owners, samples, context.progress, context.partial_results)

        def per_task(values: Tensor) -> Floats:
            return rounded(torch.stack([part.mean(1) for part in values.double().cpu().split(sizes, dim=1)]))

        pooled = -found.log_prob.double().mean(1)
        return NLL(
            pooled=rounded(pooled if all(sizes) else torch.full_like(pooled, torch.nan)),
            per_task=per_task(-found.log_prob),
            own=per_task(-found.own),
            effective_samples=per_task(found.effective_samples),
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
        yield Number(section.effective_samples, "effective_samples")
