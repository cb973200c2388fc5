"""The record of all metrics at one moment: the `evaluation` event of `metrics.jsonl` (docs/run-folder.md).

Metrics write it once; report, bench, trackers, terminal and server read it. A section that was not measured is None;
an array missing from an older log is NaN everywhere. Lists are in the order of the tasks; R is the number of replicas.
"""

from typing import Annotated, Any

import msgspec
import numpy as np

from boovae.errors import InputError
from boovae.metrics.schema import REMEDY, Count, Floats, PerReplica, PerTask, TaskCount, TaskIndex, absent, axes, decode

#: Fewer effective samples than this are few. Measured (docs/metrics/nll.md): where the median image has at least 10,
#: the mean NLL of a task was never more than a nat too high; below 5 most were, by up to 144 nats.
FEW = 10.0


class NLL(msgspec.Struct, frozen=True, eq=False, omit_defaults=True):
    """Negative log-likelihood of test images, in nats, and on how many effective importance samples it rests."""

    pooled: PerReplica
    per_task: PerTask = absent()
    own: PerTask = absent()  # under the task's own part of the prior
    effective_samples: PerTask = absent()  # mean of the images
    effective_median: PerTask | None = None
    few_effective: PerTask | None = None  # share of images with fewer than FEW
    fitted: PerTask | None = None  # share of images scored with a fitted posterior; None if none could be
    samples: Count | None = None

    @property
    def typical_effective(self) -> Floats:
        """Effective samples of the median image; of the mean image in older logs."""
        return self.effective_samples if self.effective_median is None else self.effective_median


class Forgetting(msgspec.Struct, frozen=True, eq=False, omit_defaults=True):
    """Change of the NLL since a task was learned; `claimed` hides what rests on too few effective samples."""

    own: PerTask
    pooled: PerTask = absent()
    dilution: Annotated[Floats, axes("seen")] = absent()
    effective_samples: PerTask | None = None  # typical ones, the fewer of the two NLLs
    judged: PerTask | None = None  # 1 if these are enough, else 0; None in older logs
    samples: Count | None = None

    def claimed(self, change: Floats) -> Floats:
        """Return changes of the first tasks, NaN where they cannot be judged."""
        return change if self.judged is None else np.where(self.judged[: len(change)] == 0, np.nan, change)

    @property
    def own_claimed(self) -> Floats:
        """The change under own components where it can be judged."""
        return self.claimed(self.own)


class Diversity(msgspec.Struct, frozen=True, eq=False):
    """How evenly samples are spread over the classes seen."""

    table: PerReplica
    uniform: PerReplica = absent()
    bernoulli: PerReplica = absent()
    proportions: Annotated[Floats, axes("replicas", "classes")] = absent()
    classes: list[int] = []
    samples: Count | None = None


class Distances(msgspec.Struct, frozen=True, eq=False):
    """Distances between samples and real images on the features of one network."""

    frechet: PerReplica
    frechet_train: PerReplica | None = None
    kid: PerReplica | None = None
    precision: PerReplica | None = None
    recall: PerReplica | None = None
    images: Count | None = None
    samples: Count | None = None
    digest: str = ""


class Frechet(msgspec.Struct, frozen=True, eq=False):
    """Distances by network; `pooled` is the first network's Fréchet distance."""

    pooled: PerReplica = absent()
    features: str = "classifier"
    sets: dict[str, Distances] = {}


class ClassifierUsed(msgspec.Struct, frozen=True):
    """The classifier that counted the classes of samples."""

    accuracy: float | None = None
    digest: str = ""


class Posterior(msgspec.Struct, frozen=True, eq=False):
    """Health of the encoder's posteriors."""

    active_units: PerTask = absent()
    at_upper_limit: PerTask = absent()


class Ledger(msgspec.Struct, frozen=True):
    """What one replica remembers of the past, and its size."""

    memory: dict[str, Count] = {}
    memory_bytes: Count | None = None
    images_stored: Count | None = None
    parameters: Count | None = None


class Evaluation(msgspec.Struct, frozen=True, eq=False, omit_defaults=True, tag="evaluation", tag_field="event"):
    """All metrics after a task; `seen` = `task` + 1."""

    task: TaskIndex
    seen: TaskCount | None = None
    nll: NLL | None = None
    forgetting: Forgetting | None = None
    diversity: Diversity | None = None
    frechet: Frechet | None = None
    classifier: ClassifierUsed | None = None
    posterior: Posterior | None = None
    ledger: Ledger = Ledger()
    #: Results of metrics from outside the package: by metric, then by number, each [R] or seen x [R].
    others: dict[str, dict[str, Annotated[Floats, axes("replicas")]]] = {}

    @property
    def learned(self) -> int:
        """The number of tasks learned."""
        return self.task + 1


def read_evaluation(data: Any, where: str, replicas: int, remedy: str = REMEDY) -> Evaluation:
    """Return a checked evaluation from a log or a record; errors name the place `where`.

    Logs of early versions have a single Fréchet distance, without `sets`, and no `seen`.
    """

    def sizes(found: Evaluation) -> dict[str, int]:
        classes = len(found.diversity.classes) if found.diversity and found.diversity.classes else -1
        return {"replicas": replicas, "seen": found.learned, "classes": classes}

    found = decode(data, Evaluation, where, sizes, remedy)
    if found.seen not in (None, found.learned):
        raise InputError(f"{where}: 'seen' must be {found.learned}; {remedy}")
    for metric, numbers in found.others.items():
        for name, values in numbers.items():
            if values.shape not in ((replicas,), (found.learned, replicas)):
                raise InputError(f"{where}: 'others.{metric}.{name}' has shape {values.shape}; {remedy}")
    frechet = found.frechet
    if frechet is not None and not frechet.sets:
        frechet = msgspec.structs.replace(frechet, sets={frechet.features: Distances(frechet.pooled)})
    return msgspec.structs.replace(found, seen=found.learned, frechet=frechet)
