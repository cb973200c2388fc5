"""Networks that turn images into features, by name. The name of a distance contains the name of its network.

==========================  ==========================================================================================
`classifier`                boovae's own, trained on the dataset
`efficientnet-lite0`        ImageNet features, 1280; the weights come with the extra `features`, nothing to download
`inception`                 the network of the common FID, 2048 features; `inception:FILE` names the weights file,
                            by default it is searched beside the datasets and in the cache, then downloaded
`torchscript:FILE`          any network saved by `torch.jit.save`: colour pictures (n, 3, h, w) in [0, 1] to (n, F)
==========================  ==========================================================================================

Only the Fréchet distance on `inception` features is an FID.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from boovae.data import ImageSpec
from boovae.data.download import ResumingDownloader, cache_folder, search_folders
from boovae.errors import InputError, unknown_name
from boovae.metrics.classifier import Classifier
from boovae.metrics.efficientnet import EfficientNetLite0, folded, own_name, weights_file
from boovae.metrics.inception import Inception

Network = TypeVar("Network", bound=nn.Module)

NAMES = ("classifier", "efficientnet-lite0", "inception", "inception:FILE", "torchscript:FILE")
#: Batch size of a network: small on a CPU, where every layer allocates memory for its outputs.
BATCH = {"cuda": 256, "cpu": 16}

INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
INCEPTION_MIRROR = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
#: First digits of the weights' SHA-256; they are part of the file's name.
INCEPTION_HASH = "6726825d"


class PictureFeatures:
    """A network for colour pictures in [0, 1]; images of the dataset are rounded to 8 bits, as if stored."""

    def __init__(self, name: str, network: nn.Module, digest: str, spec: ImageSpec, device: torch.device) -> None:
        if len(spec.shape) < 2:
            raise InputError(
                f"{{features}} {name} is for pictures, but the data have {spec.pixels} plain features; use classifier"
            )
        self.name, self.digest = name, digest
        self.shape, self.pixel_range, self.device = (1, *spec.shape)[-3:], spec.pixel_range, device
        self.network = network.to(device).eval()

    def pictures(self, images: Tensor) -> Tensor:
        """Return flat images (n, D) as colour pictures (n, 3, h, w) in [0, 1], rounded to 8 bits."""
        low, high = self.pixel_range
        unit = ((images.to(self.device).float() - low) / (high - low)).clamp(0, 1)
        return (255 * unit).round().div(255).reshape(-1, *self.shape).expand(-1, 3, -1, -1)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return the features (..., F) of images (..., D)."""
        parts = images.reshape(-1, math.prod(self.shape)).split(BATCH[self.device.type])
        found = [self.network(self.pictures(part)) for part in parts]
        shape = tuple(found[0].shape)
        if len(shape) != 2 or shape[0] != len(parts[0]):
            raise InputError(f"{{features}} {self.name} returns shape {shape} for {len(parts[0])} pictures")
        features: Tensor = torch.cat(found).float().unflatten(0, images.shape[:-1])
        return features


#: A network on whose features samples and real images are compared. Equal digests mean equal features.
Features = PictureFeatures | Classifier


def check_names(names: Sequence[str]) -> None:
    """Refuse unknown networks before any work is done."""
    for name in names:
        kind, _, path = name.partition(":")
        if kind not in {known.partition(":")[0] for known in NAMES} or (kind == "torchscript" and not path):
            raise unknown_name("features ({features})", name, NAMES)
        if path and (kind not in ("inception", "torchscript") or not Path(path).expanduser().is_file()):
            raise InputError(f"{{features}} {name}: no such file")
    if len(set(names)) < len(names) or not names:
        raise InputError(f"{{features}} {' '.join(names)}: name each network once, and at least one")


def check_present(name: str) -> None:
    """Refuse an unknown network, or one whose package is not installed, before any work is done."""
    check_names([name])
    if name == "efficientnet-lite0":
        weights_file()


def make_features(
    name: str, spec: ImageSpec, device: torch.device, classifier: Classifier | None = None, data_dir: Path | None = None
) -> Features:
    """Return the network called `name` for images of a format; `classifier` is the dataset's own."""
    check_names([name])
    kind, _, path = name.partition(":")
    if kind == "classifier":
        if classifier is None:
            raise InputError("{features} classifier: a single class has no classifier; choose another network")
        return classifier
    if kind == "torchscript":
        file = Path(path).expanduser()
        digest = _sha256(file)
        return PictureFeatures(f"{file.name}:{digest[:8]}", _script(file, device), digest, spec, device)
    if kind == "inception":
        file = Path(path).expanduser() if path else _inception_file(data_dir)
        network: nn.Module = _with_weights(Inception(), file)
    else:
        file = weights_file()
        network = folded(_with_weights(EfficientNetLite0(), file))
    return PictureFeatures(kind, network, _sha256(file), spec, device)


def _with_weights(network: Network, file: Path) -> Network:
    """Load the weights of a file, without executing anything in it, and return the network.

    Names in the file may begin with underscores. The error names a weight that does not fit.
    """
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files fail in too many ways to list
        raise InputError(f"{file}: cannot be read as weights ({type(error).__name__}); download it again") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"{file}: does not contain named weights; download it again")
    own, weights = network.state_dict(), {own_name(name): value for name, value in found.items()}
    for name in sorted(own.keys() ^ weights.keys()):
        raise InputError(f"{file}: {'lacks' if name in own else 'has the unknown'} '{name}'; these are not its weights")
    for name, value in weights.items():
        found_shape, shape = tuple(value.shape), tuple(own[name].shape)
        if found_shape != shape:
            raise InputError(f"{file}: '{name}' is {found_shape}, not {shape}; these are other weights")
    network.load_state_dict(weights)
    return network


def _script(file: Path, device: torch.device) -> nn.Module:
    try:
        network: nn.Module = torch.jit.load(str(file), map_location=device)
    except Exception as error:  # damaged files fail in too many ways to list
        raise InputError(f"{{features}} torchscript:{file}: not a TorchScript file ({type(error).__name__})") from error
    return network


def _inception_file(data_dir: Path | None) -> Path:
    """Return the weights of the common FID: beside the datasets, in the cache, or downloaded."""
    import filelock
    import pooch

    for folder in search_folders(data_dir):
        if (folder / "inception" / INCEPTION_FILE).is_file():
            return folder / "inception" / INCEPTION_FILE
    folder = cache_folder() / "inception"
    pooch.get_logger().setLevel("WARNING")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        url, fetch = INCEPTION_MIRROR + INCEPTION_FILE, ResumingDownloader(folder / f"{INCEPTION_FILE}.part")
        # One process downloads; others that need the file, such as cells of a bench, wait and then find it.
        with filelock.FileLock(folder / f"{INCEPTION_FILE}.lock", timeout=1800):
            file = Path(pooch.retrieve(url, None, fname=INCEPTION_FILE, path=folder, downloader=fetch))
    except (OSError, ValueError, NotImplementedError) as error:  # the last: a file system that has no locks
        raise InputError(
            f"{{features}} inception: {INCEPTION_FILE} was not found and could not be downloaded ({error}).\n"
            f"Put it at {search_folders(data_dir)[0] / 'inception' / INCEPTION_FILE}, or name it: inception:FILE"
        ) from error
    if not _sha256(file).startswith(INCEPTION_HASH):
        file.unlink()
        raise InputError(
            f"{{features}} inception: the file downloaded from {INCEPTION_MIRROR} is not the weights file; try again"
        )
    return file


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
