"""A stream without borders for the estimator: images wait until their task has ended (docs/task-free.md)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from boovae.data import scaling as features
from boovae.data.scaling import Rows, Scaling
from boovae.errors import InputError
from boovae.estimator.detection import Score, TaskFinder, Trial
from boovae.estimator.persistence import Portable
from boovae.training.trainer import Trainer


@dataclass
class Waiting:
    """Images of the task that has not ended, as the model takes them, and what finds its end.

    The first images of a stream wait as they came: once there are enough for a trial they decide the scaling.
    """

    seed: int
    finder: TaskFinder
    scaling: Scaling | None = None
    raw: list[Rows] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many images wait."""
        return self.finder.waiting + sum(map(len, self.raw))

    def copy(self) -> Waiting:
        """Return the same state, which may go another way."""
        return replace(self, finder=self.finder.copy(), raw=list(self.raw))

    def feed(self, rows: Rows, likelihood: str) -> Iterator[Rows]:
        """Take more images (n, D); yield the tasks that have ended, each as scaled rows (m, D)."""
        self.raw.append(rows)
        if self.scaling is not None or self.count >= self.finder.first:
            for images in self.finder.feed(torch.from_numpy(self._scaled(likelihood))):
                yield images.numpy()

    def rest(self, likelihood: str) -> Rows | None:
        """Return all that still waits, as scaled rows; None if nothing does."""
        images = self.finder.finish()
        parts = [] if images is None else [images.numpy()]
        if self.raw:
            parts.append(self._scaled(likelihood))
        return np.concatenate(parts) if parts else None

    def _scaled(self, likelihood: str) -> Rows:
        raw, self.raw = np.concatenate(self.raw), []
        if self.scaling is None:
            self.scaling = Scaling.learned(raw, likelihood)
        return self.scaling.forward(raw)


class Borderless(Portable):
    """What of an estimator is about streams whose tasks it must find."""

    detect_tasks: bool
    detect_first: int
    detect_most: int
    likelihood: str
    _waiting: Waiting

    @abstractmethod
    def _read(self, data: Any, *, first: bool = False) -> Rows:
        """Return images as rows (n, D) of floats; a first task says what shape they have."""

    @abstractmethod
    def _read_batches(self, data: Any, *, first: bool) -> Iterator[Rows]:
        """Return the rows of each batch."""

    @abstractmethod
    def _check(self, parameters: dict[str, Any]) -> None:
        """Refuse parameters before data are read."""

    @abstractmethod
    def _seed(self) -> int:
        """Return a seed for a new model."""

    @abstractmethod
    def _trainer(self, parameters: dict[str, Any], rows: Rows, scaling: Scaling, seed: int, *, images: int) -> Trainer:
        """Return a trainer that knows the past, for a task of scaled rows (n, D), so many of which train it."""

    @abstractmethod
    def _learn_rows(self, rows: Rows, scaling: Scaling, seed: int) -> Self:
        """Learn scaled rows (n, D) as a task."""

    # --- for users ----------------------------------------------------------------------------------------------

    def finish(self) -> Self:
        """Learn the images that still wait for the end of their task; with none, do nothing.

        Only with `detect_tasks` do images wait.
        """
        with self._whole_or_as_before():
            return self._learn_rest()

    @property
    def n_waiting_(self) -> int:
        """How many images wait for the end of their task."""
        if "_waiting" not in vars(self):
            check_is_fitted(self)
            return 0
        return self._waiting.count

    # --- for the estimator --------------------------------------------------------------------------------------

    @contextmanager
    def _whole_or_as_before(self) -> Iterator[None]:
        """Put everything back if something fails or is interrupted."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _forget(self) -> None:
        for name in ("trainer_", "scaling_", "_events", "_waiting"):
            self.__dict__.pop(name, None)

    def _check_learned(self) -> None:
        """Refuse to use a model that has learned nothing; say so if images only wait."""
        if "trainer_" not in vars(self) and (count := self._waits):
            raise NotFittedError(
                f"{count} images wait for the end of their task and none has been learned: call finish() to learn them"
            )
        check_is_fitted(self)

    def _check_kept(self) -> None:
        if count := self._waits:
            raise InputError(
                f"{count} images wait for the end of their task, and a stored model keeps no images: "
                "call finish() first, which learns them"
            )

    @property
    def _waits(self) -> int:
        return self._waiting.count if "_waiting" in vars(self) else 0

    def _feed(self, data: Any) -> Self:
        """Take images of a stream, and learn the tasks that have ended."""
        self._check(self.get_params(deep=False))
        waiting, begun = self._state(), "trainer_" in vars(self) or "_waiting" in vars(self)
        waiting.finder.trial = lambda images: self._trial(images, waiting)
        batches = self._read_batches(data, first=not begun) if features.is_batches(data) else None
        for rows in batches or [self._read(data, first=not begun)]:
            for ended in waiting.feed(rows, self.likelihood):
                assert waiting.scaling is not None
                self._learn_rows(ended, waiting.scaling, waiting.seed)
        self._waiting = waiting
        return self

    def _state(self) -> Waiting:
        """Return what waits, as a copy, or a new beginning; parameters may have changed meanwhile."""
        finder = TaskFinder(_no_trial, self.detect_first, self.detect_most)
        if "_waiting" in vars(self):
            waiting = self._waiting.copy()
            waiting.finder.first, waiting.finder.most = finder.first, finder.most
            return waiting
        if "trainer_" in vars(self):
            return Waiting(self.trainer_.settings.training.seed, finder, self.scaling_)
        return Waiting(self._seed(), finder)

    def _trial(self, images: Tensor, waiting: Waiting) -> Score:
        """Let a copy of the model learn the beginning of a task, by a schedule that does not depend on the user's."""
        assert waiting.scaling is not None
        open_again: dict[str, Any] = {"epochs": None, "batch_size": None, "learning_rate": None, "compile": False}
        parameters = self.get_params(deep=False) | open_again
        trainer = self._trainer(parameters, images.numpy(), waiting.scaling, waiting.seed, images=len(images))
        return Trial(trainer)(images)

    def _learn_rest(self) -> Self:
        waiting = self.__dict__.pop("_waiting", None)
        if waiting is None:
            return self
        ended = waiting.copy()  # should learning fail, the old one is put back as it was
        rows = ended.rest(self.likelihood)
        return self if rows is None else self._learn_rows(rows, ended.scaling, ended.seed)


def _no_trial(images: Tensor) -> Score:
    raise AssertionError("a finder gets its trial before it is fed")
