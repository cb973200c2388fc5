"""The methods and datasets that a bench compares, those of the paper first."""

from collections.abc import Sequence

from boovae.errors import InputError

DATASETS = ("mnist", "notmnist", "fashion_mnist")
FACES = ("celeba", "celeba64")
#: Default networks for comparing faces: one trained on ImageNet, and the dataset's own classifier.
FACES_FEATURES = ("efficientnet-lite0", "classifier")
#: Number of tasks of the face datasets.
FACES_TASKS = 4
#: The methods of the paper's tables, and those of its table of faces (`coreset-80` keeps 80 images per task, not 40).
PAPER_METHODS = ("standard", "ewc", "vcl", "coreset", "mog", "boo", "boo+vcl", "multihead", "multihead+ewc")
FACES_PAPER_METHODS = ("ewc", "multihead+ewc", "vcl", "multihead+vcl", "coreset", "coreset-80", "boo")
#: Columns of the bench: the paper's methods, then those that it does not have; the same for faces.
METHODS = (*PAPER_METHODS, "multihead+vcl", "boo+ewc", "replay", "boo+distill", "joint")
FACES_METHODS = (*FACES_PAPER_METHODS[:5], "coreset-80=coreset:coreset_images=80", "boo", "boo+distill", "joint")
TITLES = {"mnist": "MNIST", "notmnist": "notMNIST", "fashion_mnist": "Fashion-MNIST", "celeba": "CelebA"}


def dataset_title(dataset: str) -> str:
    """Return the display name of a dataset.

    >>> dataset_title("fashion_mnist"), dataset_title("npz:mine.npz")
    ('Fashion-MNIST', 'npz:mine.npz')
    """
    return TITLES.get(dataset, dataset)


def distances(features: Sequence[str]) -> list[str]:
    """Return the names of the distances on these networks in the CSV files.

    >>> distances(["classifier", "inception:weights.pth"])
    ['frechet_classifier', 'fid']
    """
    kinds = [name.partition(":")[0] for name in features]
    if "torchscript" in kinds:
        raise InputError("{features}: tables of a bench cannot have torchscript:FILE; use `boovae eval` on its runs")
    return ["fid" if kind == "inception" else f"frechet_{kind}" for kind in kinds]
