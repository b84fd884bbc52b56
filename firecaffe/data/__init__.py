"""The data of a run: its [data] section, data sets, the order of samples, and augmentation."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firecaffe.data.batches import Batches as Batches
    from firecaffe.data.batches import eval_batches as eval_batches
    from firecaffe.data.batches import network_layout as network_layout
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

__all__ = sorted([*_PLACES, "DataConfig"])

IMAGE_WORDS = ("augment", "crop", "pad", "mirror", "mean", "std")
"""The settings of [data] that apply only to images of classes."""


@dataclass(frozen=True)
class DataConfig:
    """The data set and what is done to its samples.

    Args:
        name: Data set: fashion-mnist, mnist, cifar10, folder, packed or generated; a function of
            yours that returns one, package.module:function or path/file.py:function; or
            caffe:PATH.prototxt for the data that the data layers of a Caffe network name.
        path: Folder of its files; for packed data also an address, such as s3://bucket/folder.
            Empty: the folder of that name in $FIRECAFFE_DATA or ~/.cache/firecaffe; for a Caffe
            network, the current folder, the folder of the prototxt file or one above it.
        args: Arguments of your function, such as `args = { root = "photos" }`.
        resize: Side in pixels to which encoded images are resized (folder and packed photos).
        decode_threads: Threads of each rank that read and decode images. 0: the cores of the host,
            divided among its ranks.
        cache: Folder on a fast disk for copies of packed shards. Empty: the shards are read in
            place.
        cache_bytes: Largest size of that folder in bytes. 0: all of its disk but a tenth.
        order: samples (all in random order), or shards: the shards of packed data in random order,
            and samples in random order within each, for storage that is slow at random reads.
        balance: How often a training sample is used. none: once in each epoch. classes: every class
            as often as every other. own: in proportion to `sample_weights` of the data set. With
            classes or own, an epoch has as many samples, drawn with replacement.
        on_error: What happens at a damaged image. stop: the run ends. skip: the next undamaged
            image replaces it, and the run counts it.
        exif: What happens to photos whose EXIF data say that they must be rotated. ignore: they are
            read as they are stored, and counted. apply: they are rotated.
        hold_out: Share of the training samples that is not trained on. They become the validation
            samples that `train.eval_every` evaluates on, instead of the data set's own. 0: none.
        augment: caffe (random crop, mirror), inception (a box of random area and proportions scaled
            to `crop`, mirror), or none.
        crop: Side in pixels of the crop: at a random place in training, in the center in a test. 0
            keeps the size.
        pad: Rows and columns of zeros to add on each side before cropping.
        mirror: Mirror half of the training images left to right.
        mixup: Mix each training image with another of its micro-batch; the weights are drawn from
            Beta(mixup, mixup). 0: no mixing. If `cutmix` is set too, one of the two is drawn.
        cutmix: Replace a box of each training image by that of another one; the share of the box is
            drawn from Beta(cutmix, cutmix). 0: none.
        erasing: Probability that a box of a training image is set to 0, after normalization.
        mean: Mean to subtract, one value or one per channel, in units of full scale (0 to 1).
            Empty: none.
        std: Standard deviation to divide by, one value or one per channel, in units of full scale.
            Empty: none.
    """

    name: str = "fashion-mnist"
    path: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    resize: int = 256
    decode_threads: int = 0
    cache: str = ""
    cache_bytes: int = 0
    order: str = "samples"
    balance: str = "none"
    on_error: str = "stop"
    exif: str = "ignore"
    hold_out: float = 0.0
    augment: str = "caffe"
    crop: int = 0
    pad: int = 0
    mirror: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing: float = 0.0
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
