"""What a net's data layers will give, as far as it can be said before a training."""

from collections.abc import Sequence
from typing import NamedTuple

from firecaffe.caffe.message import Message
from firecaffe.caffe.phase import layers_of
from firecaffe.data.caffe_decode import COLOR, NATIVE
from firecaffe.data.caffe_layers import DataLayer, data_layers
from firecaffe.data.caffe_source import open_tops
from firecaffe.data.config import DataConfig
from firecaffe.errors import DataError


class Described(NamedTuple):
    """A data layer."""

    tops: tuple[str, ...]
    type: str
    source: str
    batch_size: int
    shape: tuple[int, ...] | None
    """Of a sample of the first top, as C, H and W; None if neither the source nor the net says."""
    problem: str
    """Why the source cannot be used, in a line: it is not there, or damaged; empty if it can."""


def describe(
    net: Message, phase: str, stages: Sequence[str] = (), level: int = 0, home: str = ""
) -> list[Described]:
    """The data layers of a phase, in their order; of each source the first sample is read.

    Args:
        net: In today's form (`upgrade.current`).
        phase, stages, level: As `phase.layers_of` takes them.
        home: What `data.path` will be.

    Raises: CaffeError if a layer is of a kind that is not read, or says what cannot be.
    """
    layers = data_layers(layers_of(net, phase, stages, level))
    return [_described(each, phase, home) for each in layers]


def _described(layer: DataLayer, phase: str, home: str) -> Described:
    shape, problem = _shape_by_words(layer), ""
    try:
        shape = tuple(open_tops(layer, phase, DataConfig(path=home)).fetch([0], None)[0].shape[1:])
    except DataError as error:
        problem = str(error)
    return Described(layer.tops, layer.type, layer.source, layer.batch_size, shape, problem)


def _shape_by_words(layer: DataLayer) -> tuple[int, int, int] | None:
    """Of an image, where the net alone says it."""
    transform, size = layer.transform, layer.new_HW
    if transform.crop:
        size = (transform.crop, transform.crop)
    if layer.color != NATIVE:
        channels = 3 if layer.color == COLOR else 1
    elif len(transform.mean_values) > 1:
        channels = len(transform.mean_values)
    else:
        return None
    return None if size is None else (channels, *size)
