"""Images of a run: its dataset, and the tasks it has learned, whose images may no longer be available."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from boovae.config import Settings
from boovae.data import DATASETS, Stream, Task, load_stream
from boovae.data.tasks import recut
from boovae.errors import InputError
from boovae.files import memory_share
from boovae.model.likelihoods import make_likelihood
from boovae.model.nets import make_nets

Event = dict[str, Any]
#: Where data were when a run learned them, and where they are now.
Moved = tuple[Path, Path]
OWN_DATA = ("folder", "npz")


def load_data(
    settings: Settings,
    data_dir: Path | None = None,
    source: str | None = None,
    *,
    download: bool = True,
    natural: bool = True,
) -> Stream:
    """Load the dataset of a run as its settings say; all classes of another `source` become one task.

    Without `natural`, the pictures of folders are sorted as plain text.
    """
    name = settings.data.dataset if source is None else source
    resizes = source is None or source.startswith("folder:")
    if not download and name in DATASETS and not DATASETS[name].is_present(data_dir):
        raise InputError(f"{name} is not on this disk")
    stream = load_stream(
        name,
        data_dir=data_dir,
        seed=settings.data.data_seed,
        classes_per_task=settings.data.classes_per_task if source is None else None,
        class_order=settings.data.class_order if source is None else None,
        resize=settings.data.resize if resizes else None,
        limit=settings.data.limit,
        binarize=settings.data.binarize,
        pixel_range=DATASETS[settings.data.dataset].pixel_range if settings.data.dataset in DATASETS else None,
        natural=natural,
    )
    _check_network(settings, stream)
    return stream if settings.data.borders is None or source is not None else recut(stream, settings.data.borders)


def _check_network(settings: Settings, stream: Stream) -> None:
    """Refuse a network whose training would not fit into memory; it is built without its weights."""
    model, replicas = settings.model, settings.training.replicas
    likelihood = make_likelihood(model.likelihood, stream.pixel_range, shape=stream.shape, noise=model.noise)
    with torch.device("meta"):
        nets = make_nets(
            model.net, stream.shape, model.latent_dim, model.log_variance_range, parameters=likelihood.parameters
        )
    weights = sum(weight.numel() for part in nets for weight in part.parameters())
    needed = weights * replicas * 4 * 4  # floats: weights, gradients and Adam's two moments
    if needed > memory_share():
        raise InputError(
            f"{{net}} {model.net} has {weights:,} weights for images of {' x '.join(map(str, stream.shape))} from "
            f"{stream.name}: training them takes {needed / 1e9:,.1f} GB ({{replicas={replicas}}}), more than half of "
            "this machine's memory; use smaller images (for folders of pictures: {resize}) or a smaller {net}"
        )


def recorded(settings: Settings, stream: Stream) -> Settings:
    """Return the settings that a run folder keeps: own data by their absolute path, `resize` in pixels."""
    resize = stream.shape[-2:] if settings.data.resize == "auto" else settings.data.resize
    return settings.changed(dataset=absolute(settings.data.dataset), resize=resize)


def absolute(name: str) -> str:
    """Return the name of a dataset; a path within is made absolute."""
    form, _, path = name.partition(":")
    return f"{form}:{_place(path)}" if is_own(name) else name


def is_own(name: str) -> bool:
    """Return whether a dataset is the user's own, which has a path for a name."""
    form, _, path = name.partition(":")
    return form in OWN_DATA and path != ""


def _place(path: str | Path) -> Path:
    return Path(os.path.normpath(Path(path).expanduser().absolute()))  # links stay, they may outlive what they point to


@dataclass
class Past:
    """The tasks a run has begun, in parts: their names, and their images or the reason why these are missing."""

    own: Stream | str  # the whole of the run's own dataset
    own_tasks: int = 0  # how many of its tasks have begun
    parts: list[tuple[Sequence[str], Stream | str]] = field(default_factory=list)

    def add_own(self, names: Sequence[str]) -> None:
        """Append the next tasks of the run's own dataset."""
        first, self.own_tasks = self.own_tasks, self.own_tasks + len(names)
        found = self.own if isinstance(self.own, str) else self.own[first : self.own_tasks]
        self.parts.append((names, found))

    @property
    def missing(self) -> dict[str, str]:
        """Why images are missing, by task name."""
        return {name: found for names, found in self.parts if isinstance(found, str) for name in names}

    @property
    def stream(self) -> Stream | None:
        """All tasks as one stream; None if the images of any are missing."""
        found = [part for _, part in self.parts if isinstance(part, Stream)]
        return functools.reduce(Stream.followed_by, found) if len(found) == len(self.parts) else None

    @property
    def tasks(self) -> list[Task | None]:
        """All tasks; None where images are missing."""
        whole = self.stream
        if whole is not None:
            return list(whole)
        return [task for names, part in self.parts for task in ([None] * len(names) if isinstance(part, str) else part)]

    def explain(self) -> str:
        """Describe which images are missing and what cannot be measured without them."""
        names, reasons = ", ".join(self.missing), "; ".join(dict.fromkeys(self.missing.values()))
        return (
            f"no images of {names} ({reasons}): their NLL and the pooled NLL are null, diversity and Fréchet distance "
            "are left out"
        )


def learned_images(
    settings: Settings,
    head: Event,
    extensions: Sequence[Event],
    data_dir: Path | None = None,
    *,
    download: bool = True,
    moved: Moved | None = None,
) -> Past:
    """Return the images of a run's tasks: `head` is its `run` event, `extensions` are its `extend` events.

    Images that have changed since the run was trained count as missing. Own data that have `moved` are found in their
    new place.
    """
    names = [settings.data.dataset, *(event["source"] for event in extensions if event["source"] is not None)]
    if moved is not None and all(_found_again(name, moved) == absolute(name) for name in names):
        raise InputError(f"{{moved}} {moved[0]}: this run has learned nothing from there, but {', '.join(names)}")

    def find(event: Event, source: str | None = None) -> Stream | str:
        """Return the images that an event refers to, or why they are missing."""
        if settings.data.dataset == "arrays" and source is None:
            how = "measure others in Python: `BooVAE.load(...).score(images)`"
            return f"a model of arrays does not keep its images; {how}"
        known = settings.data.dataset if source is None else source
        name = _found_again(known, moved)
        form, _, path = name.partition(":")
        if is_own(name) and not Path(path).expanduser().exists():
            places = f"--moved {known.partition(':')[2]} NEW"
            return f"{name} is not there; if the data have moved, name the recorded and the new place: {places}"
        there = settings.changed(dataset=name) if source is None else settings
        try:
            # Earlier versions sorted pictures as plain text.
            for natural in (True, False) if form == "folder" else (True,):
                stream = load_data(there, data_dir, source and name, download=download, natural=natural)
                if stream.digest == event["split"]["digest"]:
                    return stream
        except InputError as error:
            return str(error)
        return f"the images of {name} have changed"

    past = Past(find(head))
    past.add_own(head["tasks"])
    for event in extensions:
        if event["source"] is None:
            past.add_own([event["name"]])
        else:
            past.parts.append(([event["name"]], find(event, event["source"])))
    return past


def _found_again(name: str, moved: Moved | None) -> str:
    """Return the name of a dataset, with its path in the new place if it lay in the old one."""
    if moved is None or not is_own(name):
        return name
    form, _, path = name.partition(":")
    before, now = map(_place, moved)
    place = _place(path)
    return f"{form}:{now / place.relative_to(before)}" if place.is_relative_to(before) else absolute(name)
