"""Data: from files and arrays to a stream of tasks."""

from boovae.data.datasets import DATASETS, PATH_FORMS, DatasetInfo, load_stream, pack_dataset
from boovae.data.download import DataFile
from boovae.data.folders import read_folder
from boovae.data.readers import read_idx, read_npz, write_idx
from boovae.data.tasks import ImageSpec, Split, Stream, Task

__all__ = [
    "DATASETS",
    "PATH_FORMS",
    "DataFile",
    "DatasetInfo",
    "ImageSpec",
    "Split",
    "Stream",
    "Task",
    "load_stream",
    "pack_dataset",
    "read_folder",
    "read_idx",
    "read_npz",
    "write_idx",
]
