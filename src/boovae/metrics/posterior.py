"""Health of the encoder's posteriors, task by task: reveals collapse and exploding variances."""

from collections.abc import Iterator

import numpy as np

from boovae.metrics.evaluation import Posterior
from boovae.metrics.metric import Context, Metric, Number
from boovae.metrics.schema import rounded

#: Test images per task to measure on.
IMAGES = 1000
#: A log-variance closer to its limit than this counts as being at the limit.
NEAR = 1e-3


class PosteriorHealth(Metric):
    """Active latent dimensions, and log-variances at their limit."""

    name, section, always = "posterior", "posterior", True

    def measure(self, context: Context) -> Posterior:
        """Return the active dimensions and the share of log-variances at their limit, for test images of each task."""
        import torch

        from boovae.model.vae import VAE
        from boovae.training.collapse import ACTIVE

        trainer = context.trainer
        upper = trainer.settings.model.log_variance_range[1]
        active, at_limit = np.full((2, len(context.tasks), len(trainer.replicas)), np.nan)
        with torch.no_grad():
            for index, task in enumerate(context.tasks):
                if task is None or len(task.test.images) < 2:  # nothing varies in one image
                    continue
                view = trainer.view(index)
                images = task.test.images[:IMAGES].to(trainer.device).expand(len(view), -1, -1)
                mean, log_variance = view.map(VAE.posterior, images)
                active[index] = rounded((mean.double().var(1, correction=0) > ACTIVE).sum(1))
                at_limit[index] = rounded((log_variance > upper - NEAR).double().mean((1, 2)))
        return Posterior(active, at_limit)

    def numbers(self, section: Posterior) -> Iterator[Number]:
        """Yield nothing: only warnings use this section."""
        return iter(())
