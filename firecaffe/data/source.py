"""Where a run's data comes from: the Config of the data, and one function per source.

Each `open_*` takes the Config and returns the training and the test set.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from firecaffe.data.cifar10 import ARCHIVE, open_cifar10
from firecaffe.data.dataset import Dataset
from firecaffe.data.folder import open_folder
from firecaffe.data.generated import generate
from firecaffe.data.idx import open_idx
from firecaffe.errors import DataError, RecipeError


@dataclass(frozen=True)
class DataConfig:
    """The data set and what is done to its images.

    Args:
        name: Data set: fashion-mnist, mnist, cifar10, folder or generated.
        path: Folder that holds its files. Empty: the folder of that name in $FIRECAFFE_DATA or
            ~/.cache/firecaffe.
        resize: Side in pixels to which the images of a folder are resized (folder only).
        crop: Side in pixels of the crop: at random in training, from the center in a test. 0 keeps
            the size.
        pad: Rows and columns of zeros to add on each side before cropping.
        mirror: Mirror half of the training images left to right.
        mean: Mean to subtract, one value or one per channel, in units of full scale (0 to 1).
            Empty: none.
        std: Standard deviation to divide by, one value or one per channel, in units of full scale.
            Empty: none.
    """

    name: str = "fashion-mnist"
    path: str = ""
    resize: int = 256
    crop: int = 0
    pad: int = 0
    mirror: bool = False
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Data:
    """A run's training and test set, and one line that says what they are."""

    train: Dataset
    test: Dataset
    description: str


def data_home() -> Path:
    """The folder of data sets: $FIRECAFFE_DATA, or ~/.cache/firecaffe."""
    home = os.environ.get("FIRECAFFE_DATA")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "firecaffe"


def data_path(config: DataConfig) -> Path:
    """The folder or file of the data: `data.path`, or the folder of that name in the data home."""
    return Path(config.path).expanduser() if config.path else data_home() / config.name


def _existing_path(config: DataConfig, remedy: str) -> Path:
    path = data_path(config)
    if not path.exists():
        raise DataError(f"{path}: does not exist, expected {config.name}; {remedy}")
    return path


def open_fashion_mnist(config: DataConfig) -> tuple[Dataset, Dataset]:
    """60,000 + 10,000 gray images of clothes, 28 x 28, 10 classes.

    Source: Xiao, Rasul and Vollgraf 2017, arXiv 1708.07747.
    """
    return open_idx(_existing_path(config, "`firecaffe data get fashion-mnist` fetches it"), 10)


def open_mnist(config: DataConfig) -> tuple[Dataset, Dataset]:
    """60,000 + 10,000 gray images of digits, 28 x 28, 10 classes.

    Source: LeCun, Bottou, Bengio and Haffner 1998.
    """
    return open_idx(_existing_path(config, "put its four idx files there or set data.path"), 10)


def open_cifar(config: DataConfig) -> tuple[Dataset, Dataset]:
    """50,000 + 10,000 color images, 32 x 32, 10 classes. Source: Krizhevsky 2009."""
    return open_cifar10(_existing_path(config, f"put {ARCHIVE} there or set data.path"))


def open_image_folder(config: DataConfig) -> tuple[Dataset, Dataset]:
    """Images in train/class/ and test/class/ (or val/class/), resized when they are read."""
    if config.resize < 1:
        raise RecipeError(f"data.resize is {config.resize}, expected at least 1")
    return open_folder(_existing_path(config, "set data.path to your folder"), config.resize)


def open_generated(config: DataConfig) -> tuple[Dataset, Dataset]:
    """10,000 + 2,000 generated gray images, 28 x 28, 10 classes, always the same ones."""
    return generate()
