"""Data sets of a Caffe net's data layers, one per phase: `data.name = "caffe:PATH.prototxt"`."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os.path import exists

import torch
from torch import Tensor

from firecaffe.caffe import binary
from firecaffe.caffe.graph import layers_of, phase_of
from firecaffe.caffe.message import Message
from firecaffe.caffe.upgrade import current_net
from firecaffe.data import DataConfig
from firecaffe.data.caffe_layers import (
    CONVERT,
    DataLayer,
    Transformer,
    check_understood,
    data_layers,
    draws,
)
from firecaffe.data.caffe_records import (
    COLOR,
    GRAY,
    NATIVE,
    CaffePaths,
    ImageRecords,
    ListedImages,
    LmdbRecords,
    decode_bgr,
    read_lines,
    resize,
)
from firecaffe.data.caffe_tops import Draws, Hdf5Tops, ImageTops, Tops
from firecaffe.data.dataset import Batch, Layout
from firecaffe.data.decode import FETCHERS
from firecaffe.data.hash import EVALUATION
from firecaffe.data.sources import DataParts, TestPart
from firecaffe.errors import DataError, RecipeError
from firecaffe.user_code import caffe_file


class CaffeSet:
    """Samples of several data layers: sample i joins the tops of sample i of every layer.

    Inputs are the first top. Targets are the other top, a tuple of the other tops, or (). If
    `is_training`, crops and mirrors are random in `keyed_batch` alone. Otherwise mirrors alone are
    random, with the same draws in each evaluation. `training.shared_facts` uses `transform_words`.
    """

    def __init__(self, layers: Sequence[Tops], transform_words: str, is_training: bool) -> None:
        self.layers, self.is_training = layers, is_training
        self.transform_words = transform_words
        self.class_names = layers[0].class_names if is_training else ()

    def __len__(self) -> int:
        return len(self.layers[0])

    @property
    def fetchers(self) -> int:
        return 0 if all(layer.is_held for layer in self.layers) else FETCHERS

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.batch(torch.tensor([0])))

    def batch(self, indices_B: Tensor) -> Batch:
        if self.is_training:
            return self._fetched(indices_B, None)
        return self.keyed_batch(indices_B, 0, EVALUATION)

    def keyed_batch(self, indices_B: Tensor, seed: int, epoch: int) -> Batch:
        is_random = any(layer.is_random for layer in self.layers)
        return self._fetched(indices_B, draws(indices_B, seed, epoch) if is_random else None)

    def _fetched(self, indices_B: Tensor, drawn: Draws) -> Batch:
        samples = indices_B.tolist()
        inputs, *targets = [top for layer in self.layers for top in layer.fetch(samples, drawn)]
        return inputs, targets[0] if len(targets) == 1 else tuple(targets)


TRAIN, TEST = "TRAIN", "TEST"

TESTED = (
    "Caffe tests on what it calls TEST during training: those samples are both the validation and "
    "the test samples here"
)
NOT_TESTED = (
    "the net names no data for TEST: its training samples, cut from the middle, are the test "
    "samples"
)
SHUFFLED = (
    "Caffe takes the training samples in the order in which they lie; here each epoch has a random "
    "order"
)


def open_caffe(config: DataConfig) -> DataParts:
    """Open TRAIN to train on, and TEST for validation and test. Raises RecipeError, DataError."""
    net = current_net(caffe_file("data.name", config.name))
    return open_phases({phase: layers_of(net, phase) for phase in (TRAIN, TEST)}, config)


def open_phases(phases: Mapping[str, Sequence[Message]], config: DataConfig) -> DataParts:
    """Open the samples of each phase's layers, already parsed. Raises what `open_caffe` raises."""
    layers, test_layers = (_understood(phases[phase]) for phase in (TRAIN, TEST))
    if not layers:
        raise RecipeError(
            f"data.name is {config.name!r}, which has no data layer in its TRAIN phase; "
            "expected Data, ImageData or HDF5Data"
        )
    train = _set(layers, TRAIN, config)
    notes = [TESTED if test_layers else NOT_TESTED]
    if any(layer.is_in_order for layer in layers):
        notes.append(SHUFFLED)
    if not test_layers:
        return DataParts(train, train, None, tuple(notes))
    test = _set(test_layers, TEST, config)
    return DataParts(train, test, test, tuple(notes))


def open_caffe_test(config: DataConfig) -> TestPart | None:
    """Return the test part if it exists and the training samples are missing, else None."""
    _, layers, test_layers = _opened(config)
    if not test_layers or all(is_there(layer, config.path) for layer in layers):
        return None
    return _set(test_layers, TEST, config), ()


def _opened(config: DataConfig) -> tuple[Message, list[DataLayer], list[DataLayer]]:
    net = current_net(caffe_file("data.name", config.name))
    layers, test_layers = (_understood(layers_of(net, phase)) for phase in (TRAIN, TEST))
    return net, layers, test_layers


def _understood(messages: Sequence[Message]) -> list[DataLayer]:
    layers = data_layers(messages)
    for layer in layers:
        check_understood(layer)
    return layers


def is_there(layer: DataLayer, home: str = "") -> bool:
    return any(map(exists, CaffePaths(layer.layer.where, home).of(layer.source)))


def _set(layers: Sequence[DataLayer], phase: str, config: DataConfig) -> CaffeSet:
    tops = [open_tops(layer, phase, config).in_memory() for layer in layers]
    counts = {len(top) for top in tops}
    if len(counts) > 1:
        sizes = ", ".join(
            f"{len(top)} for {layer.tops[0]}" for top, layer in zip(tops, layers, strict=True)
        )
        raise layers[0].layer.error(
            f"the data layers of {phase} have other numbers of samples ({sizes}); expected as many"
        )
    transform = "; ".join(layer.words for layer in layers)
    caffe_set = CaffeSet(tops, transform, is_training=phase == TRAIN)
    _ = caffe_set.layout  # reads the first sample now, before any rank starts
    return caffe_set


def open_tops(layer: DataLayer, phase: str, config: DataConfig) -> Tops:
    places = CaffePaths(layer.layer.where, config.path)
    at = layer.layer.place()
    if layer.backend != "LMDB":
        raise DataError(f"{at}: {CONVERT}")
    source = places.find(f"{at}: source", layer.source)
    if layer.type == "HDF5Data":
        names = [line.strip() for line in read_lines(source)]
        return Hdf5Tops([places.find(f"{source}: file", name) for name in names], layer.tops)
    transformer = _transformer(layer, phase, config)
    records: ImageRecords
    if layer.type == "Data":
        records = LmdbRecords(source, layer.color)
    else:
        records = ListedImages(source, layer.root_folder, places, layer.new_HW, layer.color)
    return ImageTops(records, transformer, len(layer.tops) > 1, config.decode_threads)


def _transformer(layer: DataLayer, phase: str, config: DataConfig) -> Transformer:
    mean_CHW = None
    if layer.transform.mean_file:
        places = CaffePaths(layer.layer.where, config.path)
        at = f"{layer.layer.place()}: mean_file"
        mean_CHW = binary.read_mean(places.find(at, layer.transform.mean_file))
    return Transformer(layer.transform, phase_of(layer.layer, phase) == TRAIN, mean_CHW)


def image_reader(config: DataConfig, channels: int) -> Callable[[bytes], Tensor]:
    """Return a function from the bytes of an image file to the test input, float32 of C x H x W.

    `channels` is that of the network's input: it chooses gray or color if the data layer does not.
    Raises RecipeError if the data are not images, DataError if the mean is missing. The function
    raises DataError, naming no file, for a file that is damaged or does not fit.
    """
    net, layers, test_layers = _opened(config)
    layer = next(iter(test_layers or layers), None)
    if layer is None or layer.type == "HDF5Data":
        reason = "there is no data layer" if layer is None else "its data are HDF5Data"
        raise RecipeError(
            f"{net.where} takes no images: {reason}; give arrays (.npy) of what the network takes"
        )
    transformer = _transformer(layer, TEST if test_layers else TRAIN, config)
    color, new_HW = layer.color, layer.new_HW
    if color == NATIVE:
        color = GRAY if channels == 1 else COLOR

    def read(content: bytes) -> Tensor:
        image_CHW = decode_bgr(content, color)
        if new_HW is not None:
            image_CHW = resize(image_CHW, *new_HW)
        to_CHW = torch.empty(transformer.shape(image_CHW))
        transformer.write(to_CHW.numpy(), image_CHW, None)
        return to_CHW

    return read
