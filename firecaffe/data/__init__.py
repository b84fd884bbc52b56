"""The data of a run: data sets, the order of their samples, and the augmentation of images."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firecaffe.data.batches import Batches, eval_batches, given_layout, output_shape
    from firecaffe.data.config import DataConfig
    from firecaffe.data.dataset import (
        Batch,
        Dataset,
        Images,
        Layout,
        TensorDataset,
        is_images,
        num_classes,
        num_samples,
    )
    from firecaffe.data.datasets import DATASETS, check_data, divide, open_data, open_test
    from firecaffe.data.hash import current_key
    from firecaffe.data.hold_out import num_held_out
    from firecaffe.data.sample_order import SampleOrder, epoch_order
    from firecaffe.data.sample_weights import drawing_of
    from firecaffe.data.sources import Data, DataParts, check_words, data_home, shard_counts
    from firecaffe.data.torch_set import from_torch

_PLACES = {
    "Batch": "dataset",
    "Batches": "batches",
    "DATASETS": "datasets",
    "Data": "sources",
    "DataConfig": "config",
    "DataParts": "sources",
    "Dataset": "dataset",
    "Images": "dataset",
    "Layout": "dataset",
    "SampleOrder": "sample_order",
    "TensorDataset": "dataset",
    "check_data": "datasets",
    "check_words": "sources",
    "current_key": "hash",
    "data_home": "sources",
    "divide": "datasets",
    "drawing_of": "sample_weights",
    "epoch_order": "sample_order",
    "eval_batches": "batches",
    "from_torch": "torch_set",
    "given_layout": "batches",
    "is_images": "dataset",
    "num_classes": "dataset",
    "num_held_out": "hold_out",
    "num_samples": "dataset",
    "open_data": "datasets",
    "open_test": "datasets",
    "output_shape": "batches",
    "shard_counts": "sources",
}
"""The module of each name, imported on first use: reading a recipe needs no torch."""

__all__ = [
    "DATASETS",
    "Batch",
    "Batches",
    "Data",
    "DataConfig",
    "DataParts",
    "Dataset",
    "Images",
    "Layout",
    "SampleOrder",
    "TensorDataset",
    "check_data",
    "check_words",
    "current_key",
    "data_home",
    "divide",
    "drawing_of",
    "epoch_order",
    "eval_batches",
    "from_torch",
    "given_layout",
    "is_images",
    "num_classes",
    "num_held_out",
    "num_samples",
    "open_data",
    "open_test",
    "output_shape",
    "shard_counts",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
