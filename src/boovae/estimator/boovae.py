"""`BooVAE`: the whole of this package as a scikit-learn estimator.

A thin front: data come in as arrays, tensors or batches and go through `data/features.py`; `Trainer` learns, with the
methods and priors of the command line; what is saved is a run folder (docs/estimator.md).
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, DensityMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import validate_data
from torch import Tensor

from boovae.data import scaling as features
from boovae.data.arrays import as_images, as_numpy
from boovae.data.scaling import Rows, Scaling
from boovae.data.tasks import Split, Task
from boovae.errors import InputError
from boovae.estimator.borderless import Borderless
from boovae.estimator.detection import Trial
from boovae.estimator.parameters import at_least_one, check_parameters, check_same_model, task_settings
from boovae.metrics.likelihood import FIXED_CHUNK, log_likelihood
from boovae.model.vae import VAE
from boovae.replicas.devices import choose_device, compiling_pays
from boovae.replicas.randomness import Draw, Generators
from boovae.replicas.stacked import Replicas, replica_of
from boovae.runs.inspection import Component, components, has_components
from boovae.runs.progress import Watcher, make_display
from boovae.training.sampling import generate
from boovae.training.trainer import Trainer
from boovae.training.transfer import carry, rebuilt

#: An array, a tensor, a table, or an iterable of such batches.
Data = Any
Array = NDArray[Any]
#: The shape of a picture on which parameters are tried before data are read.
PICTURE = (3, 32, 32)


class BooVAE(ClassNamePrefixFeaturesOutMixin, TransformerMixin, DensityMixin, Borderless):  # type: ignore[misc]
    """A variational autoencoder that learns one task after another and needs no old data.

    Every call of `partial_fit` is one task, unless `detect_tasks` finds tasks; `fit` starts anew. Of a finished task
    the default method keeps a few learned images (`components_`), never the data. X is an array or tensor
    (n, features), (n, height, width) or (n, height, width, colours), uint8 or float; or any iterable of such batches,
    which may be larger than memory (docs/estimator.md).

    Parameters
    ----------
    latent_dim : dimension of the latent space; by default a sixth of the features, at least 2 and at most 40.
    components : learned images that a task may keep.
    method : continual-learning method, `a+b` combines two (`boovae methods` lists them).
    net : encoder and decoder, `mlp:WIDTH`; by default `mlp:128` up to 256 features, then `mlp:300`.
    epochs, batch_size, learning_rate : of each task; by default chosen from its number of images.
    likelihood : "bernoulli" (grey values), "normal" (any numbers, standardised), "logistic" (pixels); "auto" takes
        "bernoulli" if the first task lies in [0, 1] or is uint8, else "normal".
    validation_fraction : share of a task's images that chooses the best epoch; tasks under 50 images hold none back.
    samples : importance samples per image of `score_samples`.
    detect_tasks : `partial_fit` takes a stream without borders and learns a task when the data have changed, which it
        notices from the ELBO; `finish` learns what waits for that (docs/task-free.md).
    detect_first : images from which the beginning of a task is learned; no shorter task is found.
    detect_most : so many images at most wait; if nothing changes among them, they are a task.
    settings : any other setting of `boovae.config.Settings` by name, for example {"distill_weight": 1.0}.
    random_state : seed, generator or None, as in scikit-learn.
    device : "auto", "cpu" or "cuda".
    compile : compile the training step; "auto" does so on a GPU where it pays.
    verbose : 0 is silent, 1 shows the progress on stderr.

    Attributes
    ----------
    n_tasks_ : tasks learned.
    n_waiting_ : images that wait for the end of their task.
    components_ : learned images of all tasks, with `component_tasks_` and `component_weights_` (shares of the prior).
    image_shape_ : shape of one image as it was handed in.
    n_features_in_ : numbers in one image.
    trainer_ : the trainer, with the model and the method's memory: the way to everything below.

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

    # --- learning -----------------------------------------------------------------------------------------------

    def fit(self, X: Data, y: object = None) -> BooVAE:  # noqa: N803 (scikit-learn's name)
        """Forget everything and learn X as the first task, or as a whole stream (`detect_tasks`); y is ignored."""
        with self._whole_or_as_before():
            self._forget()
            if not self.detect_tasks:
                return self._learn(X)
            if not self._feed(X)._learn_rest().__sklearn_is_fitted__():
                raise InputError("X holds no images: there is nothing to learn")
            return self

    def partial_fit(self, X: Data, y: object = None) -> BooVAE:  # noqa: N803
        """Learn X as one more task; y is ignored. If it fails or is interrupted, the model is as before.

        With `detect_tasks` X is the next part of a stream: the tasks that have ended are learned, the rest waits.
        """
        with self._whole_or_as_before():
            if self.detect_tasks:
                return self._feed(X)
            self._learn_rest()
            return self._learn(X)

    def _learn(self, data: Data) -> BooVAE:
        """Learn data as one task."""
        first = not self.__sklearn_is_fitted__()
        self._check(self.get_params(deep=False))
        rows, scaling = self._task_rows(data, first=first)
        return self._learn_rows(rows, scaling, self._seed() if first else self.trainer_.settings.training.seed)

    def _learn_rows(self, rows: Rows, scaling: Scaling, seed: int) -> BooVAE:
        """Learn scaled rows (n, D), which may be changed, as a task."""
        first = not self.__sklearn_is_fitted__()
        index = 0 if first else self.trainer_.tasks_done
        train, valid = features.divided(rows, self.validation_fraction, np.random.default_rng([seed, index]))
        task = Task(str(index), _split(train), _split(valid), _split(rows[:0]), (index,))
        with closing(make_display(quiet=not self.verbose)) as display:
            trainer = self._trainer(self.get_params(deep=False), rows, scaling, seed, images=len(train))
            watcher = Watcher(display)
            display.task(index, index + 1, task.name, trainer.settings.training.epochs)
            trainer.learn(task, watcher)
        if trainer.frozen.any():
            warnings.warn(
                f"task {task.name} diverged again and again; the model is where it was best: lower learning_rate",
                ConvergenceWarning,
                stacklevel=4,
            )
        self.scaling_ = scaling
        self.trainer_ = rebuilt(trainer, trainer.device)  # without the images
        self._events = watcher.events if first else [*self._events, *watcher.events]
        return self

    def _trainer(self, parameters: dict[str, Any], rows: Rows, scaling: Scaling, seed: int, *, images: int) -> Trainer:
        """Return a trainer that knows the past, for a task of scaled rows (n, D), so many of which train it."""
        device, compile = choose_device(str(self.device)), parameters["compile"]
        settings = task_settings(parameters, images, rows.shape[1], grey=scaling.grey, seed=seed)
        extent = scaling.extent(rows)
        before = self.trainer_ if self.__sklearn_is_fitted__() else None
        if before is not None:
            extent = min(extent[0], before.pixel_range[0]), max(extent[1], before.pixel_range[1])
        compile = compiling_pays(images, settings, device) if compile == "auto" else bool(compile)
        trainer = Trainer(settings, features.model_shape(self.image_shape_), extent, device=device, compile=compile)
        if before is not None:
            carry(before, trainer)
            trainer.frozen[:] = False  # a task that diverged is no reason not to try the next, with a lower rate say
        return trainer

    def _check(self, parameters: dict[str, Any]) -> None:
        """Refuse parameters before data are read, which may take long."""
        check_parameters(parameters)
        choose_device(str(self.device))
        before = self.trainer_ if self.__sklearn_is_fitted__() else None
        count, grey = (1, True) if before is None else (self.n_features_in_, self.scaling_.grey)
        settings = task_settings(parameters, images=1, features=count, grey=grey, seed=0)
        # It knows its method and its networks, or says so. What needs pictures may get some: that is checked later.
        trainer = Trainer(settings, PICTURE)
        if before is not None:
            check_same_model(before.settings, settings)
            if before.binarize != "none":
                raise InputError("this model learned black and white pixels: it goes on with `boovae extend RUN`")
        if self.detect_tasks:
            Trial(trainer)  # knows whether its method can find tasks

    def _seed(self) -> int:
        if isinstance(self.random_state, numbers.Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    # --- data in and out ----------------------------------------------------------------------------------------

    def _task_rows(self, data: Data, *, first: bool) -> tuple[Rows, Scaling]:
        """Return a task's rows (n, D) as the model takes them, a copy that may be changed, and the scaling."""
        if not features.is_batches(data):
            with features.told_from_batches(data):
                raw = self._read(data, first=first)
            scaling = Scaling.learned(raw, self.likelihood) if first else self.scaling_
            return scaling.forward(raw), scaling
        batches = self._read_batches(data, first=first)
        if not first:
            return features.spooled(map(self.scaling_.forward, batches)), self.scaling_
        raw = features.spooled(batches)
        scaling = Scaling.learned(raw, self.likelihood)
        return features.spooled(map(scaling.forward, features.blocks_of(raw))), scaling

    def _read_batches(self, data: Iterable[Any], *, first: bool) -> Iterator[Rows]:
        for batch in data:
            yield self._read(features.without_labels(batch), first=first)
            first = False

    def _read(self, data: Any, *, first: bool = False) -> Rows:
        """Return images as rows (n, D) of floats; a first task says what shape they have."""
        features.check_kind(data)
        table = hasattr(data, "ndim") and not isinstance(data, Tensor)  # NumPy's, SciPy's, pandas'
        array = data if table else as_numpy(data, "X")
        shape: tuple[int, ...] | None = None
        if array.ndim > 2:
            shape, array = array.shape[1:], as_images(array, "X", exact=True)
            array = array.reshape(len(array), -1)
        if shape is not None and not first:
            self._check_shape(shape)
        rows: Rows = validate_data(self, array, reset=first, dtype=[np.float64, np.float32, np.uint8])
        shape = rows.shape[1:] if shape is None else shape
        if first:
            self.image_shape_ = shape
        else:
            self._check_shape(shape)
        return rows.astype(np.float32) / 255 if rows.dtype == np.uint8 else rows

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        learned = self.image_shape_
        if shape != learned and features.model_shape(shape) != features.model_shape(learned):  # colours first or last
            raise InputError(f"X has images of shape {shape}, but the model has learned {learned}: resize them")

    def _tensor(self, data: Any) -> Tensor:
        """Return images as the model takes them, (n, D)."""
        self._check_learned()
        return torch.from_numpy(self.scaling_.forward(self._read(data))).to(self.trainer_.device)

    def _images(self, rows: Tensor) -> Array:
        """Return rows (n, D) of the model in the shape and the units in which images were handed in."""
        return features.as_given(self.scaling_.back(rows.cpu().numpy()), self.image_shape_)

    # --- using --------------------------------------------------------------------------------------------------

    def sample(
        self,
        n: int = 1,
        task: int | None = None,
        *,
        noise: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> Array:
        """Return n new images, of all tasks in proportion to their numbers of images, or of one task (from 0).

        They are the means of p(x | z) at latents z of the prior; with `noise`, draws from it, whose density is the one
        of `score_samples`. A model with an integer as `random_state` gives the same images every time; `random_state`
        here gives others.
        """
        self._check_learned()
        count = at_least_one("n", n)
        self._check_task(task)
        state = check_random_state(self.random_state if random_state is None else random_state)
        seed = state.randint(2**31 - 1)
        images = generate(self.trainer_, count, f"estimator {seed}", task)[0]
        if noise:
            draw = Draw("uniform", tuple(images.shape))
            uniform = Generators([seed], images.device).draw(draw, "estimator noise")[0]
            images = self.trainer_.replicas.model.likelihood.draw(images, uniform)
        return self._images(images)

    def score_samples(self, X: Data, task: int | None = None) -> NDArray[np.float64]:  # noqa: N803
        """Return the log-likelihood (n,) of each image in nats, by importance sampling; with `task`, as one of it.

        An image's score is the same, bit for bit, whatever other images are scored with it.
        """
        if features.is_batches(X):
            return features.of_each(lambda batch: self.score_samples(batch, task), X)
        x, samples = self._tensor(X), at_least_one("samples", self.samples)
        view = self._view(task)
        owners = None if task is None else torch.full((len(x),), task, device=x.device)
        result = log_likelihood(view, x, samples, tasks=owners, fixed=True)
        scores: NDArray[np.float64] = result.own[0].double().cpu().numpy()
        return scores - self.scaling_.log_scale

    def score(self, X: Data, y: object = None) -> float:  # noqa: N803
        """Return the mean log-likelihood of the images; y is ignored."""
        return float(np.mean(self.score_samples(X)))

    def transform(self, X: Data, task: int | None = None) -> Array:  # noqa: N803
        """Return the means (n, latent_dim) of q(z | x)."""
        if features.is_batches(X):
            return features.of_each(lambda batch: self.transform(batch, task), X)
        return self._mapped(lambda model, x: model.posterior(x).mean, self._tensor(X), task).cpu().numpy()

    def inverse_transform(self, X: ArrayLike | Tensor, task: int | None = None) -> Array:  # noqa: N803
        """Return the mean images of latents X (n, latent_dim)."""
        self._check_learned()
        latents = check_array(as_numpy(X, "X"), dtype=np.float32, input_name="X")
        if latents.shape[1] != (wanted := self.trainer_.settings.model.latent_dim):
            raise InputError(f"X has {latents.shape[1]} latent dimensions, but the model has {wanted}")
        return self._images(self._mapped(VAE.images, torch.tensor(latents, device=self.trainer_.device), task))

    def reconstruct(self, X: ArrayLike | Tensor, task: int | None = None) -> Array:  # noqa: N803
        """Return what the model makes of images: the mean images at their latent means."""
        return self.inverse_transform(self.transform(X, task), task)

    @torch.no_grad()
    def _mapped(self, function: Callable[[VAE, Tensor], Tensor], rows: Tensor, task: int | None) -> Tensor:
        """Return a function of the model for rows, in chunks of fixed size: a row gets the same bits anywhere."""
        view, chunk = self._view(task), FIXED_CHUNK[rows.device.type]
        tensors = replica_of(view.tensors(), 0)
        parts = []
        for part in rows.split(chunk):
            padded = torch.nn.functional.pad(part, (0, 0, 0, chunk - len(part)))
            parts.append(view.call(tensors, function, padded)[: len(part)])
        return torch.cat(parts)

    def _view(self, task: int | None) -> Replicas:
        """Return the model as it is for images of a task."""
        self._check_task(task)
        method = self.trainer_.method
        if method.knows_task and task is None:
            raise InputError(f"method '{method.name}' has a network per task: say which, task=0 … {self.n_tasks_ - 1}")
        return self.trainer_.replicas if task is None else method.view(self.trainer_.replicas, task)

    def _check_task(self, task: int | None) -> None:
        if task is not None and not (isinstance(task, numbers.Integral) and 0 <= task < self.n_tasks_):
            raise InputError(f"task is {task!r}; the model has learned tasks 0 to {self.n_tasks_ - 1}")

    # --- what it has learned ------------------------------------------------------------------------------------

    @property
    def n_tasks_(self) -> int:
        """How many tasks have been learned."""
        return int(self._fitted.tasks_done)

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
    def _fitted(self) -> Trainer:
        if not self.__sklearn_is_fitted__():
            raise AttributeError("this BooVAE has learned nothing yet; call fit or partial_fit")
        return self.trainer_

    def _components(self) -> list[Component]:
        if not has_components(self._fitted):
            raise AttributeError(f"method '{self.method}' stores no components; use boo or boo+distill")
        return components(self.trainer_)

    @property
    def _n_features_out(self) -> int:
        return int(self.trainer_.settings.model.latent_dim)

    # --- scikit-learn's questions ------------------------------------------------------------------------------------

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "trainer_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = []  # float32, as the network has it
        return tags


def _split(rows: Rows) -> Split:
    return Split(torch.from_numpy(rows), torch.zeros(len(rows), dtype=torch.long))
