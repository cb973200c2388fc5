"""The classifier of a dataset, which diversity and the Fréchet distance look at samples with.

Diversity counts the classes of samples and the Fréchet distance compares features of samples; both come from this small
network. `classifier_training.py` trains it once per dataset.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from boovae.errors import InputError
from boovae.metrics.cache import digest

UNCLASSIFIED = -1
"""The label of an image with values that are not finite (a sample of a diverged model)."""

_CHUNK_VALUES = 2**20  # input values per forward pass: bounds memory, independent of the number of images
_CPU_CHUNK_VALUES = 2**17  # on a CPU: activations stay in its cache, which is twice as fast
_SMALLEST_SIDE = 8  # smaller images are treated as flat features


class Classifier(nn.Module):
    """A convolutional network for images `(h, w)` or `(c, h, w)`, an MLP for flat features `(D,)`.

    Images are always flat, `(..., D)`; leading axes (replicas, images) are kept. Everything but `forward`
    runs without gradients, in chunks, and returns tensors on the classifier's device.

    >>> net = Classifier((28, 28), classes=(3, 5, 8))
    >>> images = torch.rand(2, 7, 784)
    >>> net.logits(images).shape, net.features(images).shape
    (torch.Size([2, 7, 3]), torch.Size([2, 7, 128]))
    >>> bool((net.classify_features(net.features(images), classes=[5]) == 5).all())
    True
    """

    name = "classifier"
    """The name of its features."""
    classes: tuple[int, ...]
    """The label of each column of `logits`, in increasing order."""
    accuracy: float
    """Accuracy on the dataset's test images (`nan` before training)."""
    centre: Tensor
    scale: Tensor

    def __init__(self, shape: Sequence[int], classes: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.classes = tuple(sorted(set(classes)))
        self.accuracy = math.nan
        if len(self.shape) not in (1, 2, 3) or min(self.shape) < 1:
            raise InputError(f"shape {self.shape}: use (h, w), (c, h, w) or (features,)")
        if not self.classes:
            raise InputError("classes is empty: a classifier needs at least one class")
        image = self.is_image
        self.body = _convolutional(self.image_shape) if image else _perceptron(math.prod(self.shape))
        self.head = nn.Linear(128, len(self.classes))
        # Pixels share one scale; columns of a table do not.
        self.register_buffer("centre", torch.zeros(1 if image else math.prod(self.shape)))
        self.register_buffer("scale", torch.ones(1 if image else math.prod(self.shape)))

    @property
    def is_image(self) -> bool:
        """Whether inputs are pictures large enough for convolutions."""
        return len(self.shape) > 1 and min(self.shape[-2:]) >= _SMALLEST_SIDE

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape as `(c, h, w)`; flat features are one row of pixels."""
        c, h, w = (1, 1, *self.shape)[-3:]
        return c, h, w

    @property
    def digest(self) -> str:
        """The sha256 of all weights: two classifiers with the same digest give the same results."""
        return digest(self.state_dict())

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `(n, C)` of images `(n, D)`, with gradients."""
        out: Tensor = self.head(self._embed(images))
        return out

    def _embed(self, images: Tensor) -> Tensor:
        x = (images - self.centre) / self.scale
        if self.is_image:
            # Twice as fast as the default layout for these convolutions, on CPU and GPU.
            x = x.view(-1, *self.image_shape).contiguous(memory_format=torch.channels_last)
        out: Tensor = self.body(x)
        return out

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits `(..., C)` of images `(..., D)`; column i belongs to `classes[i]`."""
        return self._in_chunks(self.forward, images)

    def features(self, images: Tensor) -> Tensor:
        """Return the penultimate layer `(..., 128)` of images `(..., D)`."""
        return self._in_chunks(self._embed, images)

    @torch.no_grad()
    def classify_features(self, features: Tensor, classes: Sequence[int]) -> Tensor:
        """Return the most likely label `(...)` among `classes` for `features` `(..., 128)` of images.

        An image whose logits are not finite gets `UNCLASSIFIED`.
        """
        unknown = sorted(set(classes) - set(self.classes))
        if unknown or not classes:
            known = ", ".join(map(str, self.classes))
            raise InputError(f"classes {list(classes)}: name at least one of the classifier's classes ({known})")
        logits = self.head(features)[..., [self.classes.index(label) for label in classes]]
        labels = torch.tensor(list(classes), device=logits.device)[logits.argmax(-1)]
        return labels.where(logits.isfinite().all(-1), UNCLASSIFIED)

    @torch.no_grad()
    def _in_chunks(self, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        size = math.prod(self.shape)
        shape = tuple(images.shape)
        if not shape or shape[-1] != size:
            raise InputError(f"images have shape {shape}: the last axis must be {size}, flat {self.shape}")
        was_training = self.training
        self.eval()
        most = _CPU_CHUNK_VALUES if self.centre.device.type == "cpu" else _CHUNK_VALUES
        chunks = images.reshape(-1, size).tensor_split(1 + images.numel() // most)
        out = torch.cat([function(chunk.to(self.centre)) for chunk in chunks])
        self.train(was_training)
        return out.view(*shape[:-1], out.shape[-1])


def _convolutional(shape: tuple[int, int, int]) -> nn.Sequential:
    """Return layers from images `(n, c, h, w)` to features `(n, 128)`.

    Convolutions halve the sides, at least once, down to 8 pixels; a linear layer follows.
    """
    channels, *sides = shape
    halvings = max(1, math.ceil(math.log2(max(sides) / 8)))
    # The first layer already halves large images: at full resolution it would cost more than all others.
    layers = [(channels, 32, 5, 1 if halvings == 1 else 2)]
    layers += [(32 if i == 0 else 64, 64, 3, 2) for i in range(max(1, halvings - 1))]
    layers += [(64, 64, 3, 1)]
    stack: list[nn.Module] = []
    for inputs, outputs, kernel, stride in layers:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        stack += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
        sides = [(side - 1) // stride + 1 for side in sides]
    stack += [nn.Flatten(), nn.Linear(64 * math.prod(sides), 128), nn.ReLU()]
    return nn.Sequential(*stack)


def _perceptron(size: int) -> nn.Sequential:
    """Return layers from flat inputs `(n, D)` to features `(n, 128)`."""
    return nn.Sequential(
        *(nn.Linear(size, 256), nn.LayerNorm(256), nn.ReLU()),
        *(nn.Linear(256, 128), nn.LayerNorm(128), nn.ReLU()),
    )
