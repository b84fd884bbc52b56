"""The data sets that a recipe may name, and the functions that open one of them.

A new source is a function from `DataConfig` to `DataParts`, and a row in `DATASETS`. A recipe may
also name a user's function: `data.name = "package.module:function"`.

The samples with the smallest `hash64(Stream.HOLD_OUT, sample)` are held out. Neither the seed nor
the workers change this, so trainings that are compared use the same samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from firecaffe.data import IMAGE_WORDS, DataConfig, sources
from firecaffe.data.batches import fetchers_of, network_layout
from firecaffe.data.caffe_source import open_caffe, open_caffe_test
from firecaffe.data.dataset import (
    SET_FACTS,
    Batch,
    Dataset,
    Layout,
    TensorDataset,
    ask,
    copy_facts,
    is_images,
    layout_of,
    num_classes,
    shape_text,
)
from firecaffe.data.decode import DecodedSet
from firecaffe.data.hash import Stream, hash64
from firecaffe.data.own_data import check_own, share_limits
from firecaffe.data.packed import RawPart
from firecaffe.data.sample_order import labels_of, weights_of
from firecaffe.data.sources import Data, DataParts, TestPart, check_words
from firecaffe.errors import DataError, RecipeError
from firecaffe.user_code import CAFFE, call, find, is_caffe, is_reference, shown, without_folder
from firecaffe.value_checks import did_you_mean

PARTS = ("train", "test", "validation")
BY_PLACE = {2: ("train", "test"), 3: ("train", "validation", "test")}


def open_by_name(config: DataConfig) -> DataParts:
    """Call and check the function of `data.name`. Raises RecipeError, OwnCodeError, DataError."""
    function = find("data.name", config.name)
    given = call("data.name", config.name, function, config.args)
    named = _parts(config.name, given)
    parts = {
        name: check_own(f"{config.name} {name}", part)
        for name, part in named.items()
        if part is not None
    }
    return DataParts(parts["train"], parts["test"], parts.get("validation"))


def _parts(name: str, given: Any) -> dict[str, Any]:
    if isinstance(given, tuple | list) and len(given) in BY_PLACE:
        return dict(zip(BY_PLACE[len(given)], given, strict=True))
    if isinstance(given, Mapping) and {"train", "test"} <= given.keys() <= set(PARTS):
        return dict(given)
    described = (
        f"a dict with {', '.join(map(str, given))}" if isinstance(given, Mapping) else shown(given)
    )
    raise DataError(
        f"data.name {name!r} returned {described}; expected a dict with train, test and perhaps "
        "validation, or (train, test), or (train, validation, test)"
    )


DATASETS: dict[str, Callable[[DataConfig], DataParts]] = {
    "fashion-mnist": sources.open_published,
    "mnist": sources.open_published,
    "cifar10": sources.open_cifar,
    "folder": sources.open_image_folder,
    "packed": sources.open_packed,
    "generated": sources.open_generated,
}
"""The sources of data by name: functions of [data] that return its parts."""


GIVEN = "own data"
"""The name that a run's recipe records for data sets that a script passed to `train`."""


def open_data(config: DataConfig) -> Data:
    """Open the data that a recipe names. Raises RecipeError (settings), DataError (files)."""
    open_parts: Callable[[DataConfig], DataParts]
    if is_caffe(config.name):
        open_parts = open_caffe
    elif is_reference(config.name):
        open_parts = open_by_name
    elif config.name in DATASETS:
        open_parts = DATASETS[config.name]
    else:
        if config.name == GIVEN:
            raise RecipeError(
                f"data.name is {config.name!r}: no recipe names them, a script gives them; run "
                "that, or name a function that returns them, package.module:function"
            )
        raise RecipeError(
            f"data.name is {config.name!r}, expected one of {', '.join(DATASETS)}, or "
            "package.module:function, file.py:function or caffe:PATH.prototxt"
            f"{did_you_mean(config.name, DATASETS)}"
        )
    check_words(config)
    return divide(open_parts(config), config)


TEST_ALONE: dict[str, Callable[[DataConfig], TestPart | None]] = {
    "folder": sources.open_test_images,
    "packed": sources.open_test_shards,
    CAFFE: open_caffe_test,
}


def open_test(config: DataConfig) -> Data:
    """Open a data set without hold-out. Test samples replace missing training samples.

    They are read once, so nothing is cached: a stranger's recipe may name any folder.
    """
    check_words(config)
    config = replace(config, hold_out=0.0, cache="")
    kind = CAFFE if is_caffe(config.name) else config.name
    part = TEST_ALONE[kind](config) if kind in TEST_ALONE else None
    if part is None:
        return open_data(config)
    test, notes = part
    layout = network_layout(test, config)
    description = f"{without_folder(config.name)}: {len(test)} test {_kind_text(test)}"
    return Data(test, test, description, None, notes, layout)


def divide(parts: DataParts, config: DataConfig) -> Data:
    """Return a run's parts; held-out samples replace validation. Raises RecipeError, DataError."""
    train, test, validation, notes = parts
    share_limits((train, test, validation))
    for name, part in (("test", test), ("validation", validation)):
        if part is not None:
            _check_alike(config.name, train, name, part)
    if not is_images(train):
        _check_no_image_words(config, train)
    kind = _kind_text(train)
    layout = network_layout(train, config)
    choosing = "validation"
    if config.hold_out:
        train, validation = hold_out(train, config.hold_out)
        choosing = "held-out"
    counts = [f"{len(train)} training", f"{len(test)} test"]
    if validation is not None:
        counts.insert(1, f"{len(validation)} {choosing}")
    source = without_folder(config.name)
    description = f"{source}: {', '.join(counts[:-1])} and {counts[-1]} {kind}"
    return Data(train, test, description, validation, notes, layout)


def _kind_text(dataset: Dataset) -> str:
    if is_images(dataset):
        return f"images, {dataset.num_classes} classes, {shape_text(dataset.sample_CHW)}"
    classes = num_classes(dataset)
    return f"samples, {f'{classes} classes, ' if classes else ''}{layout_of(dataset)}"


def num_held_out(num_samples: int, share: float) -> int:
    """Return the number of held-out samples. Raises RecipeError if one of the parts is empty."""
    count = round(num_samples * share)
    if share and not 0 < count < num_samples:
        raise RecipeError(
            f"data.hold_out is {share:g}, which is {count} of {num_samples} training samples; "
            "expected some to train on and some to test on"
        )
    return count


def hold_out(train: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Return the remaining training samples and the held-out samples, both in original order."""
    by_hash = hash64(int(Stream.HOLD_OUT), torch.arange(len(train))).argsort()
    count = num_held_out(len(train), share)
    rest_N, held_out_N = by_hash[count:].sort().values, by_hash[:count].sort().values
    return some_of(train, rest_N), some_of(train, held_out_N)


def some_of(dataset: Dataset, samples_N: Tensor) -> Dataset:
    """Return samples of a data set, renumbered, which are decoded and cut as in the whole set."""
    # By type: a user's data set may have an attribute `subset` that is no method.
    if isinstance(dataset, TensorDataset | DecodedSet | RawPart):
        return dataset.subset(samples_N)
    return DatasetSubset(dataset, samples_N)


class DatasetSubset:
    """Some samples of a user's data set, renumbered. Their keys keep the original numbers."""

    def __init__(self, dataset: Dataset, samples_N: Tensor) -> None:
        self.dataset = dataset
        self.samples_N = samples_N
        copy_facts(self, dataset, SET_FACTS)

    @property
    def layout(self) -> Layout:
        return layout_of(self.dataset)

    @property
    def fetchers(self) -> int:
        return fetchers_of(self.dataset)

    @property
    def sample_weights(self) -> Tensor:
        return weights_of(self.dataset)[self.samples_N]

    @property
    def targets(self) -> Tensor | None:
        of_all = labels_of(self.dataset)
        return None if of_all is None else of_all[self.samples_N]

    def __len__(self) -> int:
        return len(self.samples_N)

    def batch(self, indices_B: Tensor) -> Batch:
        return self.dataset.batch(self.samples_N[indices_B])

    def keyed_batch(self, indices_B: Tensor, seed: int, epoch: int) -> Batch:
        return ask(self.dataset, self.samples_N[indices_B], seed, epoch)


def _check_alike(source: str, train: Dataset, name: str, part: Dataset) -> None:
    if is_images(train) and is_images(part):
        if part.sample_CHW != train.sample_CHW:
            raise DataError(
                f"{source}: training images are {shape_text(train.sample_CHW)}, {name} images "
                f"{shape_text(part.sample_CHW)}, expected the same shape"
            )
    elif is_images(train):
        raise DataError(
            f"{source}: the training set says sample_CHW and num_classes, as images of classes do, "
            f"the {name} set does not; expected both"
        )
    elif _kinds(train) != _kinds(part):
        raise DataError(
            f"{source}: training samples are {layout_of(train)}, {name} samples "
            f"{layout_of(part)}; expected the same"
        )
    least, most = num_classes(train), num_classes(part)
    if least is not None and most is not None and most > least:
        raise DataError(
            f"{source}: the {name} samples have {most} classes, the training "
            f"samples {least}; expected no others"
        )


def _kinds(dataset: Dataset) -> Any:
    """Return the types of a sample's tensors. Their sizes may differ, as for sentences."""
    layout = layout_of(dataset)
    leaves, spec = tree_flatten((layout.inputs, layout.targets))
    return spec, [(leaf.dtype, len(leaf.shape)) for leaf in leaves]


def _check_no_image_words(config: DataConfig, train: Dataset) -> None:
    default = DataConfig()
    for word in IMAGE_WORDS:
        value = getattr(config, word)
        if value != getattr(default, word):
            raise RecipeError(
                f"data.{word} is {value!r}, but {config.name} has {layout_of(train)}; image "
                "settings are for a data set with sample_CHW and num_classes, as TensorDataset. "
                "Leave it out, and transform in the data set"
            )


def check_data(config: DataConfig) -> Data:
    """Open the data as a rank does, before any rank starts, and read a sample of each part."""
    data = open_data(config)
    for dataset in data.parts.values():
        dataset.batch(torch.tensor([0]))
    return data
