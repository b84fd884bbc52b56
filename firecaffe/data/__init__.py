"""Data: labeled images by number, their order, their augmentation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firecaffe.data.batches import Batches, eval_batches, output_shape
    from firecaffe.data.config import DataConfig
    from firecaffe.data.dataset import Dataset, TensorDataset
    from firecaffe.data.datasets import DATASETS, check_data, divide, open_data
    from firecaffe.data.hold_out import num_held_out
    from firecaffe.data.order import SampleOrder, epoch_order
    from firecaffe.data.source import Data, DataParts, check_words, data_home, shard_counts

_PLACES = {
    "Batches": "batches",
    "DATASETS": "datasets",
    "Data": "source",
    "DataConfig": "config",
    "Dataset": "dataset",
    "DataParts": "source",
    "SampleOrder": "order",
    "TensorDataset": "dataset",
    "check_data": "datasets",
    "check_words": "source",
    "data_home": "source",
    "divide": "datasets",
    "epoch_order": "order",
    "eval_batches": "batches",
    "num_held_out": "hold_out",
    "open_data": "datasets",
    "output_shape": "batches",
    "shard_counts": "source",
}
"""The place of each name, imported when it is asked for: the words of a recipe need no torch."""

__all__ = [
    "DATASETS",
    "Batches",
    "Data",
    "DataConfig",
    "DataParts",
    "Dataset",
    "SampleOrder",
    "TensorDataset",
    "check_data",
    "check_words",
    "data_home",
    "divide",
    "epoch_order",
    "eval_batches",
    "num_held_out",
    "open_data",
    "output_shape",
    "shard_counts",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
