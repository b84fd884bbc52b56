"""Find a net's samples: the batch size, the files, and the shapes."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from firecaffe.caffe.layers.data_layers import shapes_of
from firecaffe.caffe.layers.spec import Shape
from firecaffe.caffe.message import CaffeError, Message
from firecaffe.data import open_data
from firecaffe.data.caffe_layers import CONVERT, OF_A_PROGRAM, data_layers
from firecaffe.data.config import DataConfig
from firecaffe.data.dataset import Layout
from firecaffe.errors import DataError, RecipeError
from firecaffe.from_caffe.import_report import Report
from firecaffe.from_caffe.nets import find_file, looked_for
from firecaffe.user_code import CAFFE

FILES = ("source", "mean_file")

Phases = Mapping[str, Sequence[Message]]
"""The layers of each phase, TRAIN and TEST."""


@dataclass(frozen=True)
class NetSamples:
    batch_size: int
    """The batch size of TRAIN on one of Caffe's GPUs; 0 if the file says none."""
    test_batch_size: int
    input: str
    """The network's input: the first top of the first data layer."""
    shapes: dict[str, Shape]
    """The known shapes of the sample blobs, without the batch."""
    root: str
    """The folder of the data's relative paths; empty if it is not needed."""
    are_named: bool
    """Whether data layers name the data to train on."""


def sources_of(layers: Iterable[Message]) -> list[Message]:
    return [layer for layer in layers if not layer.has("bottom") and layer.has("top")]


def read_samples(path: str, phases: Phases, root: str, given: Shape, report: Report) -> NetSamples:
    """Read both phases' samples. Raises CaffeError on an invalid data layer or unknown shape."""
    sources = {phase: sources_of(layers) for phase, layers in phases.items()}
    first = (sources["TRAIN"] or sources["TEST"])[:1]
    if not first:
        raise CaffeError(f"{path}: no layer gives samples; expected a data layer, or Input")
    blob = first[0].texts("top")[0]
    unread: list[str] = []
    can_be_read = {phase: _can_read(layers, report, unread) for phase, layers in sources.items()}
    are_named = can_be_read["TRAIN"]
    files, missing = _find_files(path, sources, root, report)
    shapes = _guessed(sources)
    if are_named and not missing:
        try:
            shapes |= _of_data(path, files, sources["TRAIN"])
        except CaffeError:
            raise
        except (DataError, RecipeError) as error:
            missing = [f"the data cannot be read: {error}"]
            report.needs(sources["TRAIN"][0], "type", missing[0])
    elif first[0].text("type") != "Input" and not given:
        _say_guess(first[0], shapes, report)
    if given:
        shapes[blob] = given
    if blob not in shapes:
        why = next(iter([*missing, *unread]), "nothing says it")
        raise first[0].error(
            f"the shape of the samples is not known: {why}; --input-shape 1x28x28 says it, too"
        )
    train, test = (_batch_size(sources[phase]) for phase in ("TRAIN", "TEST"))
    return NetSamples(train, test or train, blob, shapes, files, are_named)


def _batch_size(sources: Sequence[Message]) -> int:
    for layer in sources:
        for field in layer.fields:
            if isinstance(field.value, Message) and field.value.has("batch_size"):
                return max(1, field.value.integer("batch_size", 1))
        shape = shapes_of(layer)[0]
        if shape:
            return shape[0]
    return 0


def _can_read(sources: Sequence[Message], report: Report, unread: list[str]) -> bool:
    try:
        layers = data_layers(sources)
    except CaffeError as error:
        kinds = {source.text("type") for source in sources}
        if not kinds.issubset(OF_A_PROGRAM):
            report.lacks_as(error)
            unread.append(str(error))
        elif kinds != {"Input"}:
            report.needs_as(error)
        return False
    for layer in layers:
        if layer.backend != "LMDB":
            report.needs(layer.layer, "type", CONVERT)
    return bool(layers)


def _find_files(path: str, sources: Phases, root: str, report: Report) -> tuple[str, list[str]]:
    folders: dict[str, None] = {}
    missing = []
    for phase, layers in sources.items():
        for param, name in _naming(layers):
            value = param.text(name)
            taken, folder = find_file(value, path, root)
            if taken is not None:
                report.became(param, name, f"{phase} {name}: {taken}")
                if not os.path.isabs(value):
                    folders.setdefault(folder)
                continue
            missing.append(
                f'{phase} {name} "{value}" is not there; {looked_for(value, path, root)}'
            )
            report.needs(param, name, f"{missing[-1]}, or --data.path when you train")
    return next(iter(folders), root), missing


def _naming(layers: Sequence[Message]) -> list[tuple[Message, str]]:
    return [
        (field.value, name)
        for layer in layers
        for field in layer.fields
        if isinstance(field.value, Message)
        for name in FILES
        if field.value.text(name)
    ]


def _guessed(sources: Phases) -> dict[str, Shape]:
    return {
        top: tuple(shape[1:])
        for layers in (sources["TEST"], sources["TRAIN"])
        for layer in layers
        for top, shape in zip(layer.texts("top"), shapes_of(layer), strict=True)
        if shape is not None
    }


def _of_data(path: str, root: str, sources: Sequence[Message]) -> dict[str, Shape]:
    data = open_data(DataConfig(name=f"{CAFFE}{path}", path=root))
    layout = data.layout or Layout.of(data.train.batch(torch.tensor([0])))
    tops = [top for layer in sources for top in layer.texts("top")]
    leaves = tree_leaves((layout.inputs, layout.targets))
    return dict(zip(tops, (leaf.shape for leaf in leaves), strict=False))


def _say_guess(layer: Message, shapes: Mapping[str, Shape], report: Report) -> None:
    shape = shapes.get(layer.texts("top")[0])
    if shape is not None:
        report.differs(
            layer,
            "type",
            f"samples of {'x'.join(map(str, shape))}, as the layer's words allow, for the data are "
            "not there; --input-shape says another",
        )
