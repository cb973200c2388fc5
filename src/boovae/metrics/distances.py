"""Distances between samples and the tasks' images on the features of networks: Fréchet, KID, precision and recall."""

from collections.abc import Iterator

from boovae.metrics.evaluation import Distances, Frechet
from boovae.metrics.metric import Context, Metric, Number


class FeatureDistances(Metric):
    """Distances on features; `fid` is accepted as a name for any features."""

    name = section = "frechet"
    aliases = frozenset({"fid"})
    needs = frozenset({"features"})

    def measure(self, context: Context) -> Frechet:
        """Compare samples with the images of the tasks seen, on the features of each network."""
        from boovae.metrics.partial_results import PartialResult

        samples, sets = context.samples, dict[str, Distances]()
        for reference in context.references:
            partial = context.partial_results.setdefault(f"frechet {reference.network.name}", PartialResult())
            # The likelihood took most of the time, so the reported share stays at 1.
            partial.progress = lambda share: context.progress(1.0)
            features = reference.features(samples)
            sets[reference.network.name] = reference.scores(features, context.present, partial)
        first = next(iter(sets))
        return Frechet(sets[first].frechet, first, sets)

    def numbers(self, section: Frechet) -> Iterator[Number]:
        """Yield every distance under a name that contains its features."""
        for features, found in section.sets.items():
            title = distance_name(features)
            names = {key: f"{key}_{features}" for key in ("frechet", "frechet_train", "kid", "precision", "recall")}
            if features == "inception":
                names |= {"frechet": "fid", "frechet_train": "fid_train"}
            short = "FID" if features == "inception" else f"Fréchet ({features})"
            yield Number(found.frechet, names["frechet"], column=short, curve=f"{title} (0 is best)", digits=1)
            for key in ("frechet_train", "kid", "precision", "recall"):
                if getattr(found, key) is not None:
                    yield Number(getattr(found, key), names[key])
        yield Number(section.pooled, tag="frechet")


def distance_name(features: str) -> str:
    """Return the name of a Fréchet distance on these features; only on those of Inception it is an FID.

    >>> distance_name("inception"), distance_name("classifier")
    ('FID', 'Fréchet distance (classifier)')
    """
    return "FID" if features == "inception" else f"Fréchet distance ({features})"
