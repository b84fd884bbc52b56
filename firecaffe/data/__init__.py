"""The data of a run: data sets, the order of their samples, and the augmentation of images."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firecaffe.data.batches import Batches as Batches
    from firecaffe.data.batches import eval_batches as eval_batches
    from firecaffe.data.batches import network_layout as network_layout
    from firecaffe.data.config import DataConfig as DataConfig
    from firecaffe.data.dataset import Batch as Batch
    from firecaffe.data.dataset import Dataset as Dataset
    from firecaffe.data.dataset import Images as Images
    from firecaffe.data.dataset import Layout as Layout
    from firecaffe.data.dataset import TensorDataset as TensorDataset
    from firecaffe.data.dataset import is_images as is_images
    from firecaffe.data.dataset import num_classes as num_classes
    from firecaffe.data.dataset import num_samples as num_samples
    from firecaffe.data.datasets import check_data as check_data
    from firecaffe.data.datasets import divide as divide
    from firecaffe.data.datasets import open_data as open_data
    from firecaffe.data.datasets import open_test as open_test
    from firecaffe.data.hash import current_key as current_key
    from firecaffe.data.sample_order import SampleOrder as SampleOrder
    from firecaffe.data.sample_order import shard_counts as shard_counts
    from firecaffe.data.sample_order import weighted_draws as weighted_draws
    from firecaffe.data.sources import Data as Data
    from firecaffe.data.sources import DataParts as DataParts
    from firecaffe.data.sources import data_home as data_home
    from firecaffe.data.torch_set import from_torch as from_torch

_PLACES = {
    "Batch": "dataset",
    "Batches": "batches",
    "Data": "sources",
    "DataConfig": "config",
    "DataParts": "sources",
    "Dataset": "dataset",
    "Images": "dataset",
    "Layout": "dataset",
    "SampleOrder": "sample_order",
    "TensorDataset": "dataset",
    "check_data": "datasets",
    "current_key": "hash",
    "data_home": "sources",
    "divide": "datasets",
    "weighted_draws": "sample_order",
    "eval_batches": "batches",
    "from_torch": "torch_set",
    "network_layout": "batches",
    "is_images": "dataset",
    "num_classes": "dataset",
    "num_samples": "dataset",
    "open_data": "datasets",
    "open_test": "datasets",
    "shard_counts": "sample_order",
}
"""The module of each name, imported on first use: reading a recipe needs no torch."""

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
