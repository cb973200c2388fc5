"""`BooVAE`: this package as a scikit-learn estimator.

A thin layer: arrays, tensors or batches are converted to rows (`data/scaling.py`), `Trainer` learns them with the
methods and priors of the command line, and a saved estimator is a run folder (docs/estimator.md).
"""

import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, DensityMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from boovae.config.choose import DataSummary
from boovae.config.section import AtLeastOne, checked, plain
from boovae.data.arrays import as_images, as_numpy
from boovae.data.batches import check_kind, concatenated, images_of_batch, is_batches, spooled
from boovae.data.scaling import Rows, Scaling, blocks_of, divided, in_given_shape, model_shape
from boovae.data.summary import summarise
from boovae.data.tasks import ImageSpec, Split, Task
from boovae.errors import InputError
from boovae.estimator.detection import Score, TaskFinder, Trial, Waiting
from boovae.estimator.parameters import check_parameters, check_same_model, task_settings
from boovae.estimator.persistence import Record, load_model, save_model
from boovae.metrics.likelihood import FIXED_CHUNK, log_likelihood
from boovae.model.vae import VAE
from boovae.replicas.devices import choose_device, compiles
from boovae.replicas.randomness import Draw, Generators
from boovae.replicas.stacked import Replicas, replica_of
from boovae.runs.inspection import Component, components, has_components
from boovae.runs.progress import Watch, make_display
from boovae.training.events import Event
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer
from boovae.training.transfer import copied_to, copy_learned, from_plain, to_plain

#: An array, a tensor, a table, or an iterable of such batches.
Data = Any
Array = NDArray[Any]
#: The picture shape with which parameters are checked before data are read.
PICTURE = (3, 32, 32)


class BooVAE(ClassNamePrefixFeaturesOutMixin, TransformerMixin, DensityMixin, BaseEstimator):  # type: ignore[misc]
    """A variational autoencoder that learns one task after another and needs no old data.

    Every call of `partial_fit` learns one task, unless `detect_tasks` finds tasks; `fit` starts again. The default
    method keeps a few learned images of a finished task (`components_`), never the data. X is an array or tensor
    (n, features), (n, height, width) or (n, height, width, colours), uint8 or float; or any iterable of such batches,
    which may be larger than memory (docs/estimator.md).

    Parameters
    ----------
    latent_dim : dimension of the latent space; by default chosen from the first task (docs/choosing-settings.md).
    components : maximum number of learned images per task.
    method : continual-learning method, `a+b` combines two (`boovae methods` lists them).
    net : encoder and decoder, for example `mlp:300` or `res:32`; by default chosen from the first task.
    epochs, batch_size, learning_rate : for each task; by default chosen from its images.
    likelihood : "bernoulli" (grey values), "normal" (any numbers, standardised), "logistic" (pixels); "auto" takes
        "bernoulli" if the first task lies in [0, 1] or is uint8, else "normal".
    validation_fraction : share of a task's images used to choose the best epoch; none are held out of fewer than 50.
    samples : importance samples per image of `score_samples`.
    detect_tasks : `partial_fit` takes a stream without borders and learns a task once the ELBO shows that the data have
        changed; `finish` learns the images that still wait (docs/task-free.md).
    detect_first : number of images from which the beginning of a task is learned; no shorter task is found.
    detect_most : maximum number of waiting images; if nothing changes among them, they become a task.
    settings : any other setting of `boovae.config.Settings` by name, for example {"distill_weight": 1.0}.
    random_state : seed, generator or None, as in scikit-learn.
    device : "auto", "cpu" or "cuda".
    compile : compile the training step; "auto" does so on a GPU where it pays.
    verbose : 0 is silent, 1 shows progress on stderr.

    Attributes
    ----------
    n_tasks_ : number of tasks learned.
    n_waiting_ : number of images that wait for the end of their task.
    components_ : learned images of all tasks, with `component_tasks_` and `component_weights_` (shares of the prior).
    image_shape_ : shape of one image as it was passed.
    n_features_in_ : number of values in one image.
    trainer_ : the trainer, which holds the model and the method's memory.

    >>> rng = np.random.default_rng(0)
    >>> january, february = rng.random((60, 8, 8)), rng.random((60, 8, 8))
    >>> model = BooVAE(epochs=2, random_state=0).partial_fit(january).partial_fit(february)
    >>> model.n_tasks_, model.sample(3).shape, model.transform(february).shape
    (2, (3, 8, 8), (60, 10))
    """

    def __init__(
        self,
        latent_dim: int | None = None,
        *,
        components: int = 15,
        method: str = "boo+distill",
        net: str | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        likelihood: Literal["auto", "bernoulli", "normal", "logistic"] = "auto",
        validation_fraction: float = 0.1,
        samples: int = 500,
        detect_tasks: bool = False,
        detect_first: int = 100,
        detect_most: int = 100_000,
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        compile: bool | Literal["auto"] = "auto",
        verbose: int = 0,
    ) -> None:
        self.latent_dim = latent_dim
        self.components = components
        self.method = method
        self.net = net
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.likelihood = likelihood
        self.validation_fraction = validation_fraction
        self.samples = samples
        self.detect_tasks = detect_tasks
        self.detect_first = detect_first
        self.detect_most = detect_most
        self.settings = settings
        self.random_state = random_state
        self.device = device
        self.compile = compile
        self.verbose = verbose

    trainer_: Trainer
    scaling_: Scaling
    image_shape_: tuple[int, ...]
    n_features_in_: int
    _events: list[Event]
    _waiting: Waiting | None = None

    # --- learning -----------------------------------------------------------------------------------------------

    def fit(self, X: Data, y: object = None) -> Self:  # noqa: N803 (scikit-learn's name)
        """Forget everything and learn X as the first task, or as a whole stream (`detect_tasks`); y is ignored."""
        with self._whole_or_as_before():
            for name in ("trainer_", "scaling_", "_events", "_waiting"):
                self.__dict__.pop(name, None)
            if not self.detect_tasks:
                return self._learn(X)
            if not self._feed(X)._learn_rest().__sklearn_is_fitted__():
                raise InputError("X holds no images: there is nothing to learn")
            return self

    def partial_fit(self, X: Data, y: object = None) -> Self:  # noqa: N803
        """Learn X as the next task; y is ignored. If it fails or is interrupted, the model stays as it was.

        With `detect_tasks`, X is the next part of a stream: finished tasks are learned, the remaining images wait.
        """
        with self._whole_or_as_before():
            return self._feed(X) if self.detect_tasks else self._learn_rest()._learn(X)

    def finish(self) -> Self:
        """Learn the images that still wait for the end of their task, if any.

        Images wait only with `detect_tasks`.
        """
        with self._whole_or_as_before():
            return self._learn_rest()

    @contextmanager
    def _whole_or_as_before(self) -> Iterator[None]:
        """Restore the previous state if something fails or is interrupted."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _learn(self, data: Data) -> Self:
        """Learn data as one task."""
        self._check()
        return self._learn_rows(self._task_rows(data), self._seed())

    def _learn_rows(self, rows: Rows, seed: int) -> Self:
        """Learn scaled rows (n, D) as a task; the rows may be modified."""
        first = not self.__sklearn_is_fitted__()
        index = 0 if first else self.trainer_.tasks_done
        train, valid = divided(rows, self.validation_fraction, np.random.default_rng([seed, index]))
        task = Task(str(index), _split(train), _split(valid), _split(rows[:0]), (index,))
        with closing(make_display(quiet=not self.verbose)) as display:
            trainer = self._trainer(self.get_params(deep=False), rows, seed, task.train.images)
            watcher = Watch(display, None if first else self.trainer_.settings.flat())
            display.task(index, index + 1, task.name, trainer.settings.training.epochs)
            trainer.learn(task, watcher)
        problems = {
            "diverged repeatedly; the model was reset to its best state: lower learning_rate": trainer.frozen,
            "was learned as its average alone: the posterior has collapsed, so samples and codes say nothing about its "
            "images; try settings={'kl_weight': 0.5}, more epochs or a smaller batch_size": trainer.collapsed,
        }
        for problem, replicas in problems.items():
            if replicas.any():
                warnings.warn(f"task {task.name} {problem}", ConvergenceWarning, stacklevel=4)
        self.trainer_ = copied_to(trainer, trainer.device)  # without the images
        self._events = watcher.events if first else [*self._events, *watcher.events]
        return self

    def _trainer(self, parameters: dict[str, Any], rows: Rows, seed: int, images: Tensor) -> Trainer:
        """Return a trainer with all that was learned, for a task of scaled rows (n, D), training on `images`."""
        device, extent = choose_device(str(self.device)), self.scaling_.extent(rows)
        before = self.trainer_ if self.__sklearn_is_fitted__() else None
        if before is not None:
            extent = min(extent[0], before.spec.pixel_range[0]), max(extent[1], before.spec.pixel_range[1])
        spec = ImageSpec(model_shape(self.image_shape_), extent)
        data = summarise(images, spec, pixels=self.scaling_.grey)
        settings, choices = task_settings(parameters, data, seed, before.settings if before else None)
        compile = compiles(parameters["compile"], len(images), settings, device)
        trainer = Trainer(settings, spec, device=device, compile=compile, choices=choices)
        if before is not None:
            copy_learned(before, trainer)
            trainer.frozen[:] = False  # the next task may succeed, for example with a lower rate
        return trainer

    def _check(self) -> None:
        """Check the parameters before data are read, which may take long."""
        parameters = self.get_params(deep=False)
        check_parameters(parameters)
        choose_device(str(self.device))
        before = self.trainer_ if self.__sklearn_is_fitted__() else None
        # A noise that is given may be for a likelihood that only the data will choose.
        unknown = 1, "noise" not in (self.settings or {})
        count, grey = unknown if before is None else (self.n_features_in_, self.scaling_.grey)
        settings, _ = task_settings(parameters, DataSummary((count,), 1, grey), 0, before.settings if before else None)
        # Checks method and networks. The shape is a picture; whether the data are pictures is checked later.
        trainer = Trainer(settings, ImageSpec(PICTURE))
        if before is not None:
            check_same_model(before.settings, settings)
            if before.spec.binarize != "none":
                raise InputError("this model learned binarised pixels; continue it with `boovae extend RUN`")
        if self.detect_tasks:
            Trial(trainer)  # checks that the method can find tasks

    def _seed(self) -> int:
        """Return the seed of the model, which is fixed by the first task."""
        if self.__sklearn_is_fitted__():
            return self.trainer_.settings.training.seed
        if isinstance(self.random_state, numbers.Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    # --- a stream without borders -------------------------------------------------------------------------------

    def _feed(self, data: Data) -> Self:
        """Add images of a stream, and learn the tasks that have ended."""
        self._check()
        first = not self.__sklearn_is_fitted__() and self._waiting is None
        waiting = self._stream()
        batches = self._read_batches(data, first=first) if is_batches(data) else [self._read(data, first=first)]
        for rows in batches:
            waiting.raw.append(rows)
            if hasattr(self, "scaling_") or waiting.count >= self.detect_first:
                for ended in waiting.ended(self._scaled):
                    self._learn_rows(ended, waiting.seed)
        self._waiting = waiting
        return self

    def _stream(self) -> Waiting:
        """Return a copy of the waiting images with the current parameters, or a new, empty one."""
        finder = TaskFinder(lambda images: self._trial(images, waiting), self.detect_first, self.detect_most)
        waiting = Waiting(self._seed(), finder) if self._waiting is None else self._waiting.copy()
        waiting.finder.trial, waiting.finder.first, waiting.finder.most = finder.trial, finder.first, finder.most
        return waiting

    def _trial(self, images: Tensor, waiting: Waiting) -> Score:
        """Train a copy of the model on the beginning of a task, with a schedule independent of the user's."""
        open_again: dict[str, Any] = {"epochs": None, "batch_size": None, "learning_rate": None, "compile": False}
        parameters = self.get_params(deep=False) | open_again
        trainer = self._trainer(parameters, images.numpy(), waiting.seed, images)
        return Trial(trainer)(images)

    def _learn_rest(self) -> Self:
        """Learn the waiting images, if any."""
        ended, self._waiting = self._waiting, None
        if ended is None:
            return self
        ended = ended.copy()  # so that the original can be restored if learning fails
        rows = ended.rest(self._scaled)
        return self if rows is None else self._learn_rows(rows, ended.seed)

    # --- data in and out ----------------------------------------------------------------------------------------

    def _task_rows(self, data: Data) -> Rows:
        """Return a scaled copy of a task's rows (n, D), which may be modified."""
        first = not self.__sklearn_is_fitted__()
        if not is_batches(data):
            try:
                raw = self._read(data, first=first)
            except InputError as error:
                if not isinstance(data, (list, tuple)):
                    raise
                hint = "a list is read as one array; pass a list of batches as iter(X)"
                raise InputError(f"{error.text}; {hint}") from error
            return self._scaled(raw)
        batches = self._read_batches(data, first=first)
        if first:  # all of them determine the scaling
            raw = spooled(batches)
            self.scaling_ = Scaling.learned(raw, self.likelihood)
            batches = blocks_of(raw)
        return spooled(map(self._scaled, batches))

    def _scaled(self, rows: Rows) -> Rows:
        """Return rows (n, D) scaled for the model; those of the first task determine the scaling."""
        if not hasattr(self, "scaling_"):
            self.scaling_ = Scaling.learned(rows, self.likelihood)
        return self.scaling_.forward(rows)

    def _read_batches(self, data: Iterable[Any], *, first: bool) -> Iterator[Rows]:
        for batch in data:
            yield self._read(images_of_batch(batch), first=first)
            first = False

    def _read(self, data: Any, *, first: bool = False) -> Rows:
        """Return images as rows (n, D) of floats; the first task determines their shape."""
        check_kind(data)
        table = hasattr(data, "ndim") and not isinstance(data, Tensor)  # NumPy's, SciPy's, pandas'
        array = data if table else as_numpy(data, "X")
        shape = array.shape[1:]
        if array.ndim > 2:
            array = as_images(array, "X", exact=True)
            array = array.reshape(len(array), -1)
            if not first:
                self._check_shape(shape)
        rows: Rows = validate_data(self, array, reset=first, dtype=[np.float64, np.float32, np.uint8])
        if first:
            self.image_shape_ = shape
        else:
            self._check_shape(shape)
        return rows.astype(np.float32) / 255 if rows.dtype == np.uint8 else rows

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        learned = self.image_shape_
        if shape != learned and model_shape(shape) != model_shape(learned):  # colours first or last
            raise InputError(f"X has images of shape {shape}, but the model has learned {learned}: resize them")

    def _tensor(self, data: Any) -> Tensor:
        """Return images scaled for the model, (n, D)."""
        device = self._learned.device
        return torch.from_numpy(self.scaling_.forward(self._read(data))).to(device)

    def _images(self, rows: Tensor) -> Array:
        """Return rows (n, D) of the model in the shape and units of the user's images."""
        return in_given_shape(self.scaling_.back(rows.cpu().numpy()), self.image_shape_)

    # --- using --------------------------------------------------------------------------------------------------

    def sample(
        self,
        n: int = 1,
        task: int | None = None,
        *,
        noise: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> Array:
        """Return n new images of all tasks, in proportion to their numbers of images, or of one task (from 0).

        They are the means of p(x | z) at latents z of the prior; with `noise`, they are drawn from p(x | z), so that
        `score_samples` is their density. A model with an integer `random_state` returns the same images on every call;
        pass another `random_state` here for others.
        """
        trainer, count = self._learned, checked("n", n, AtLeastOne)
        self._check_task(task)
        state = check_random_state(self.random_state if random_state is None else random_state)
        seed = state.randint(2**31 - 1)
        draw = Draw("uniform", (count, self.n_features_in_))
        uniform = Generators([seed], trainer.device).draw(draw, "estimator noise") if noise else None
        return self._images(generate(trainer, count, f"estimator {seed}", task, uniform=uniform)[0])

    def score_samples(self, X: Data, task: int | None = None) -> NDArray[np.float64]:  # noqa: N803
        """Return the log-likelihood (n,) of each image in nats, by importance sampling; with `task`, under that task.

        The score of an image does not depend on the other images scored with it, bit for bit. It is too low where it
        rests on few `effective_samples`.
        """
        return self._scored(X, task)[:, 0].copy()

    def effective_samples(self, X: Data, task: int | None = None) -> NDArray[np.float64]:  # noqa: N803
        """Return how many of the importance samples carry the score of each image, (n,); below ten it is too low."""
        return self._scored(X, task)[:, 1].copy()

    def _scored(self, X: Data, task: int | None) -> NDArray[np.float64]:  # noqa: N803
        """Return the log-likelihood and the effective samples of each image, (n, 2)."""
        if is_batches(X):
            return concatenated(lambda batch: self._scored(batch, task), X)
        x, samples = self._tensor(X), checked("samples", self.samples, AtLeastOne)
        view = self._view(task)
        owners = None if task is None else torch.full((len(x),), task, device=x.device)
        result = log_likelihood(view, x, samples, tasks=owners, fixed=True)
        found: NDArray[np.float64] = torch.stack([result.own[0], result.effective_samples[0]], 1).double().cpu().numpy()
        return found - [self.scaling_.log_scale, 0.0]

    def score(self, X: Data, y: object = None) -> float:  # noqa: N803
        """Return the mean log-likelihood of the images; y is ignored."""
        return float(np.mean(self.score_samples(X)))

    def transform(self, X: Data, task: int | None = None) -> Array:  # noqa: N803
        """Return the means (n, latent_dim) of q(z | x)."""
        if is_batches(X):
            return concatenated(lambda batch: self.transform(batch, task), X)
        return self._mapped(lambda model, x: model.posterior(x).mean, self._tensor(X), task).cpu().numpy()

    def inverse_transform(self, X: ArrayLike | Tensor, task: int | None = None) -> Array:  # noqa: N803
        """Return the mean images of latents X (n, latent_dim)."""
        trainer, latents = self._learned, check_array(as_numpy(X, "X"), dtype=np.float32, input_name="X")
        if latents.shape[1] != (wanted := trainer.settings.model.latent_dim):
            raise InputError(f"X has {latents.shape[1]} latent dimensions, but the model has {wanted}")
        return self._images(self._mapped(VAE.images, torch.tensor(latents, device=trainer.device), task))

    def reconstruct(self, X: ArrayLike | Tensor, task: int | None = None) -> Array:  # noqa: N803
        """Return the reconstructions of images: the mean images at their latent means."""
        return self.inverse_transform(self.transform(X, task), task)

    @torch.no_grad()
    def _mapped(self, function: Callable[[VAE, Tensor], Tensor], rows: Tensor, task: int | None) -> Tensor:
        """Apply a function of the model to rows in chunks of fixed size, so that rows do not influence each other."""
        view, chunk = self._view(task), FIXED_CHUNK[rows.device.type]
        tensors = replica_of(view.tensors(), 0)
        parts = []
        for part in rows.split(chunk):
            padded = torch.nn.functional.pad(part, (0, 0, 0, chunk - len(part)))
            parts.append(view.call(tensors, function, padded)[: len(part)])
        return torch.cat(parts)

    def _view(self, task: int | None) -> Replicas:
        """Return the model for images of a task."""
        self._check_task(task)
        method = self.trainer_.method
        if method.knows_task and task is None:
            raise InputError(f"method '{method.name}' has a network per task: choose one, task=0 … {self.n_tasks_ - 1}")
        return self.trainer_.replicas if task is None else method.view(self.trainer_.replicas, task)

    def _check_task(self, task: int | None) -> None:
        if task is not None and not (isinstance(task, numbers.Integral) and 0 <= task < self.n_tasks_):
            raise InputError(f"task is {task!r}; the model has learned tasks 0 to {self.n_tasks_ - 1}")

    # --- what was learned ---------------------------------------------------------------------------------------

    @property
    def n_tasks_(self) -> int:
        """The number of tasks learned."""
        return self._learned.tasks_done

    @property
    def n_waiting_(self) -> int:
        """The number of images that wait for the end of their task."""
        if self._waiting is None:
            check_is_fitted(self)
            return 0
        return self._waiting.count

    @property
    def components_(self) -> Array:
        """The learned images of all tasks, (components, ...), in the units of the data."""
        return self._images(torch.stack([component.pseudo_input for component in self._components()]))

    @property
    def component_tasks_(self) -> NDArray[np.int64]:
        """The task of each learned image."""
        return np.array([component.task for component in self._components()])

    @property
    def component_weights_(self) -> NDArray[np.float64]:
        """The share of each learned image in the prior; they add up to one."""
        return np.array([component.mass for component in self._components()])

    @property
    def _learned(self) -> Trainer:
        """The trainer; raises NotFittedError if nothing was learned, with a hint if images wait."""
        if self._waiting is not None and self._waiting.count and not self.__sklearn_is_fitted__():
            raise NotFittedError(
                f"{self._waiting.count} images wait for the end of their task and none has been learned: call finish() "
                "to learn them"
            )
        check_is_fitted(self)
        return self.trainer_

    def _components(self) -> list[Component]:
        if not has_components(self._learned):
            raise AttributeError(f"method '{self.method}' stores no components; use boo or boo+distill")
        return components(self.trainer_)

    @property
    def _n_features_out(self) -> int:
        return int(self.trainer_.settings.model.latent_dim)

    # --- moving and saving --------------------------------------------------------------------------------------

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device; later tasks are learned there too."""
        chosen = choose_device(str(device))
        self.device = str(device)
        if self.__sklearn_is_fitted__():
            self.trainer_ = copied_to(self.trainer_, chosen)
        return self

    def save(self, folder: str | Path) -> Path:
        """Write the model to a folder, without pickle, and return the folder; an earlier save there is replaced."""
        seed, scaling = self._learned.settings.training.seed, self.scaling_
        self._check_none_waits()
        # Parameter searches produce NumPy's numbers, which JSON does not know.
        parameters = {name: plain(value) for name, value in self.get_params(deep=False).items()}
        parameters["device"] = str(self.device)
        parameters["settings"] = {name: plain(value) for name, value in (self.settings or {}).items()} or None
        if not isinstance(self.random_state, numbers.Integral | None):
            parameters["random_state"] = seed  # a generator cannot be stored
        names = [str(name) for name in getattr(self, "feature_names_in_", [])]
        learned = () if scaling.grey else (scaling.centre.tolist(), scaling.scale.tolist())
        record = Record(parameters, self.image_shape_, names, scaling.grey, *learned)
        return save_model(Path(folder), record, self.trainer_, self._events)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "auto") -> Self:
        """Return the model that `save`, or `boovae train --replicas 1`, wrote to a folder."""
        record, trainer, events = load_model(Path(folder), device)
        model = cls(**{**record.parameters, "device": device})
        model.scaling_ = record.scaling()
        model.image_shape_ = record.image_shape
        model.n_features_in_ = math.prod(record.image_shape)
        if record.feature_names:
            model.feature_names_in_ = np.array(record.feature_names, dtype=object)
        model.trainer_, model._events = trainer, events
        return model

    def _check_none_waits(self) -> None:
        if self._waiting is not None and self._waiting.count:
            raise InputError(
                f"{self._waiting.count} images wait for the end of their task, and a stored model keeps no images: "
                "call finish() first to learn them"
            )

    def __getstate__(self) -> dict[str, Any]:
        self._check_none_waits()
        state: dict[str, Any] = dict(super().__getstate__())
        state.pop("_waiting", None)  # nothing waits
        if "trainer_" in state:
            state["trainer_"] = to_plain(state["trainer_"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "trainer_" in state:
            device = choose_device(state["device"] if torch.cuda.is_available() else "auto")
            state = {**state, "trainer_": from_plain(state["trainer_"], device)}
        super().__setstate__(state)

    # --- scikit-learn's hooks ------------------------------------------------------------------------------------

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "trainer_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = []  # always float32, as in the network
        return tags


def _split(rows: Rows) -> Split:
    return Split(torch.from_numpy(rows), torch.zeros(len(rows), dtype=torch.long))
