"""Data: from files and arrays to a stream of tasks."""

from boovae.data.datasets import DATASETS as DATASETS
from boovae.data.datasets import PATH_FORMS as PATH_FORMS
from boovae.data.datasets import DatasetInfo as DatasetInfo
from boovae.data.datasets import load_stream as load_stream
from boovae.data.datasets import pack_dataset as pack_dataset
from boovae.data.download import DataFile as DataFile
from boovae.data.folders import read_folder as read_folder
from boovae.data.readers import read_idx as read_idx
from boovae.data.readers import read_npz as read_npz
from boovae.data.readers import write_idx as write_idx
from boovae.data.tasks import ImageSpec as ImageSpec
from boovae.data.tasks import Split as Split
from boovae.data.tasks import Stream as Stream
from boovae.data.tasks import Task as Task
