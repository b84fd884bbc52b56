"""The sources of a run's data: each `open_*` returns the parts of one data set.

A few images are inspected first: blank, 16-bit or rotated ones are reported.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import NamedTuple

import torch

from firecaffe.data import DataConfig
from firecaffe.data.augment import AUGMENTS
from firecaffe.data.dataset import BrokenSampleError, Dataset, Layout, TensorDataset
from firecaffe.data.decode import (
    APPLY,
    DEEP_BITS,
    EXIF,
    MAX_PIXELS,
    ON_ERROR,
    UPRIGHT,
    DecodedSet,
    Encoded,
    bits_of,
    decode,
    orientation,
)
from firecaffe.data.generated import generate
from firecaffe.data.image_folder import TESTS, ImageFolder, notes_of, open_folder, open_test_folder
from firecaffe.data.packed import HELD_BYTES, PackedPart, PackedSet, RawPart, read_list
from firecaffe.data.published_formats import ARCHIVE, open_cifar10, open_idx
from firecaffe.data.sample_order import BALANCES, ORDERS
from firecaffe.data.shard_files import ShardFiles, is_remote, open_files
from firecaffe.errors import DataError, RecipeError
from firecaffe.files import cache_folder
from firecaffe.value_checks import INT64, MAX_THREADS, check_limits


class DataParts(NamedTuple):
    """The parts of a data set."""

    train: Dataset
    """The training samples."""
    test: Dataset
    """The test samples, used once, at the end."""
    validation: Dataset | None = None
    """Samples for evaluations during training, on which choices are based, if there are any."""
    notes: tuple[str, ...] = ()
    """Lines for the user about the data."""


TestPart = tuple[Dataset, tuple[str, ...]]
"""The test part of a data set that has no training samples, and lines about it."""


@dataclass(frozen=True)
class Data:
    train: Dataset
    test: Dataset
    description: str
    validation: Dataset | None = None
    notes: tuple[str, ...] = ()
    layout: Layout | None = None
    """The layout of a sample as the network receives it."""

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(map(str, getattr(self.train, "class_names", ())))

    @property
    def parts(self) -> dict[str, Dataset]:
        named = {"training": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}


SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest divisor that float32 does not treat as 0."""


def check_words(config: DataConfig) -> None:
    """Raise RecipeError if a data setting is invalid, whatever the data set is."""
    choices = {
        "augment": AUGMENTS,
        "order": ORDERS,
        "balance": BALANCES,
        "on_error": ON_ERROR,
        "exif": EXIF,
    }
    for word, known in choices.items():
        if getattr(config, word) not in known:
            raise RecipeError(
                f"data.{word} is {getattr(config, word)!r}, expected one of {', '.join(known)}"
            )
    limits = {
        "resize": (1, isqrt(MAX_PIXELS)),
        "decode_threads": (0, MAX_THREADS),
        "cache_bytes": (0, INT64),
    }
    check_limits("data", config, limits)
    if not 0 <= config.hold_out < 1:
        raise RecipeError(
            f"data.hold_out is {config.hold_out:g}, expected 0 or more and less than 1"
        )
    if any(value < SMALLEST for value in config.std):
        raise RecipeError(f"data.std is {config.std}, expected values of {SMALLEST:.2g} and more")


def data_home() -> Path:
    """Return the folder of data sets: $FIRECAFFE_DATA, or ~/.cache/firecaffe."""
    home = os.environ.get("FIRECAFFE_DATA")
    return Path(home).expanduser() if home else cache_folder()


def data_path(config: DataConfig) -> Path:
    return Path(config.path).expanduser() if config.path else data_home() / config.name


def _existing_path(config: DataConfig, remedy: str) -> Path:
    path = data_path(config)
    if not path.exists():
        raise DataError(f"{path}: does not exist, expected {config.name}; {remedy}")
    return path


def open_published(config: DataConfig) -> DataParts:
    """Open 60,000 + 10,000 gray images, 28 x 28 (LeCun et al. 1998; arXiv 1708.07747)."""
    path = _existing_path(config, f"`firecaffe data get {config.name}` fetches it")
    return DataParts(*open_idx(path, 10))


def open_cifar(config: DataConfig) -> DataParts:
    """Open 50,000 + 10,000 color images, 32 x 32, 10 classes. Source: Krizhevsky 2009."""
    return DataParts(*open_cifar10(_existing_path(config, f"put {ARCHIVE} there or set data.path")))


def open_image_folder(config: DataConfig) -> DataParts:
    """Open images in train/class/, test/class/ and val/class/; one of test and val is enough."""
    parts = open_folder(_existing_path(config, "set data.path to your folder"))
    train, test, *validation = [_decoded(part, config) for part in parts]
    notes = _notes_of_folders(parts, config)
    return DataParts(train, test, validation[0] if validation else None, notes)


def open_test_images(config: DataConfig) -> TestPart | None:
    """Open the test part of a folder without a training part. Return None if there is one."""
    part = open_test_folder(data_path(config))
    if part is None:
        return None
    return _decoded(part, config), _notes_of_folders([part], config)


def open_packed(config: DataConfig) -> DataParts:
    """Open what `firecaffe pack` wrote. Raises DataError if a part or a shard is missing."""
    packed, root = _list_of(config)
    files = open_files(root, config.cache, config.cache_bytes)
    tests = [name for name in TESTS if name in packed.parts]
    if "train" not in packed.parts or not tests:
        part_names = ", ".join(packed.parts) or "nothing"
        raise DataError(f"{root}: holds {part_names}; expected train and test (or validation)")
    names = ("train", *tests[:2])
    train, *others = [_packed_part(packed, name, files, config) for name in names]
    notes = _notes_of_shards(dict(zip(names, (train, *others), strict=True)), root, config)
    return DataParts(train, others[0], others[1] if others[1:] else None, notes)


def open_test_shards(config: DataConfig) -> TestPart | None:
    """Open the test part of packed data without a training part. Return None if there is one."""
    packed, root = _list_of(config)
    tests = [name for name in TESTS if name in packed.parts]
    if "train" in packed.parts or not tests:
        return None
    files = open_files(root, config.cache, config.cache_bytes)
    test = _packed_part(packed, tests[0], files, config)
    return test, _notes_of_shards({tests[0]: test}, root, config)


def _list_of(config: DataConfig) -> tuple[PackedSet, str]:
    root = config.path
    if not is_remote(root):
        root = str(_existing_path(config, "make it by `firecaffe pack SOURCE DEST`"))
    return read_list(root), root


def _packed_part(packed: PackedSet, name: str, files: ShardFiles, config: DataConfig) -> Dataset:
    part = PackedPart(packed, name, files)
    if packed.kind == "jpeg":
        return _decoded(part, config)
    channels, rows, columns = packed.shape
    raw = RawPart(part, (channels, rows, columns))
    if len(part) * channels * rows * columns > HELD_BYTES:
        return raw
    images, labels = raw.batch(torch.arange(len(part)))
    return TensorDataset(images, labels, part.num_classes, class_names=part.class_names)


def _decoded(source: Encoded, config: DataConfig) -> DecodedSet:
    if config.augment == "inception" and config.crop > config.resize:
        raise RecipeError(
            f"data.augment is inception with data.crop {config.crop}; a test scales the shorter "
            f"side to data.resize, {config.resize}, and cuts from it: expected at most that"
        )
    return DecodedSet(source, config.resize, config.decode_threads, config.on_error, config.exif)


def _notes_of_folders(parts: Sequence[ImageFolder], config: DataConfig) -> tuple[str, ...]:
    notes = notes_of({part.folder.name: part.unread for part in parts})
    for part in parts:
        samples = evenly(len(part))
        notes += look(part.folder.name, samples, part.head, part.read, config.exif)
    return tuple(notes)


def _notes_of_shards(
    parts: Mapping[str, Dataset], root: str, config: DataConfig
) -> tuple[str, ...]:
    notes: list[str] = []
    for name, part in parts.items():
        if isinstance(part, DecodedSet) and not is_remote(root):
            # Only the first shard: its images are in random order, and others may need copying.
            source = part.source
            samples = range(min(LOOKED_AT, source.shard_counts[0]))
            notes += look(name, samples, source.read, source.read, config.exif)
    return tuple(notes)


LOOKED_AT = 64


def evenly(count: int) -> Sequence[int]:
    """Return the numbers of at most LOOKED_AT samples, evenly spread over `count`."""
    return range(0, count, max(1, -(-count // LOOKED_AT)))


def look(
    part: str,
    samples: Sequence[int],
    head: Callable[[int], bytes],
    read: Callable[[int], bytes],
    exif: str,
) -> list[str]:
    """Inspect some images of a part, and return notes for the user. `exif` is one of EXIF.

    `head` reads the start of a sample, enough for its metadata; `read` reads all of it. Raises
    DataError if all pixels of all images have one color, so that nothing can be learned.
    """
    heads: dict[int, bytes] = {}
    for sample in samples:
        with suppress(BrokenSampleError):  # training reports it when it reads this sample
            heads[sample] = head(sample)
    deep = [sample for sample, content in heads.items() if bits_of(content) == DEEP_BITS]
    _check_not_blank(part, list(heads), read, deep)
    notes = []
    if deep:
        notes.append(
            f"{part}: {len(deep)} of {len(heads)} images looked at have 16 bits a value; they "
            "are read as 8, of which 255 stands for 65,535"
        )
    turned = sum(orientation(content) != UPRIGHT for content in heads.values())
    if turned and exif != APPLY:
        notes.append(
            f"{part}: {turned} of {len(heads)} images looked at say (EXIF) that they are to be "
            f'turned, and are read as they are stored; data.exif = "{APPLY}" turns them'
        )
    return notes


def _check_not_blank(
    part: str, samples: Sequence[int], read: Callable[[int], bytes], deep: Sequence[int]
) -> None:
    color = None
    for sample in samples:
        try:
            image_CHW = decode(read(sample))
        except BrokenSampleError:
            continue
        first_C11 = image_CHW[:, :1, :1]
        if bool((image_CHW != first_C11).any()):
            return
        if color not in (None, first_C11.flatten().tolist()):
            return
        color = first_C11.flatten().tolist()
    if color is None or len(samples) == 1:
        return
    why = ""
    if deep:
        why = (
            "; they have 16 bits a value, which are read as 8, of which 255 stands for 65,535, so "
            "scale them to all of the 16 bits"
        )
    raise DataError(
        f"{part}: all {len(samples)} images looked at have one color, {color} of 255, at every "
        f"pixel; expected images that show something{why}"
    )


def open_generated(config: DataConfig) -> DataParts:
    """Make 10,000 + 2,000 gray images, 28 x 28, 10 classes, always the same."""
    return DataParts(*generate())
