"""Layers that read samples: what they call them, and their shapes as far as the file knows them.

They are no modules: their tops are the net's inputs, and data sets stand for them.
"""

from collections.abc import Callable

from firecaffe.caffe.layers.spec import Shape
from firecaffe.caffe.message import Message

LABELS_AXES = 8
"""Of a box in AnnotatedData's labels: image, class, instance, four corners, whether difficult."""


def _images(layer: Message, name: str) -> Shape | None:
    """The images of a layer with a transform_param, as far as their size is said."""
    param, transform = layer.message(name), layer.message("transform_param")
    batch = max(1, param.integer("batch_size", 1))
    is_gray = transform.flag("force_gray") or not param.flag("is_color", True)
    channels = 1 if is_gray else 3
    resized = transform.message("resize_param")
    crop = transform.integer("crop_size") or param.integer("crop_size")
    rows = crop or param.integer("new_height") or resized.integer("height")
    columns = crop or param.integer("new_width") or resized.integer("width")
    return (batch, channels, rows, columns) if rows > 0 and columns > 0 else None


def _labelled(name: str) -> Callable[[Message], list[Shape | None]]:
    """Images, and a number for each."""

    def shapes(layer: Message) -> list[Shape | None]:
        batch = max(1, layer.message(name).integer("batch_size", 1))
        return [_images(layer, name), (batch,)]

    return shapes


def _annotated(layer: Message) -> list[Shape | None]:
    return [_images(layer, "data_param"), (1, 1, 1, LABELS_AXES)]


def _memory(layer: Message) -> list[Shape | None]:
    param = layer.message("memory_data_param")
    words = ("batch_size", "channels", "height", "width")
    shape = tuple(param.integer(word) for word in words)
    return [shape if min(shape) > 0 else None, (max(1, shape[0]),)]


def _shapes(layer: Message, name: str) -> list[Shape | None]:
    return [tuple(each.integers("dim")) for each in layer.message(name).messages("shape")]


def _input(layer: Message) -> list[Shape | None]:
    return _shapes(layer, "input_param")


def _dummy(layer: Message) -> list[Shape | None]:
    param = layer.message("dummy_data_param")
    sizes = [param.integers(word) for word in ("num", "channels", "height", "width")]
    old = [*zip(*sizes, strict=False)]
    return _shapes(layer, "dummy_data_param") or [tuple(each) for each in old]


def _unknown(layer: Message) -> list[Shape | None]:
    return []


SOURCES: dict[str, Callable[[Message], list[Shape | None]]] = {
    "AnnotatedData": _annotated,
    "Data": _labelled("data_param"),
    "DummyData": _dummy,
    "HDF5Data": _unknown,
    "ImageData": _labelled("image_data_param"),
    "Input": _input,
    "MemoryData": _memory,
    "WindowData": _labelled("window_data_param"),
}
"""The shapes of their tops, in their order, by type; None where the file does not say one."""


def shapes_of(layer: Message) -> list[Shape | None]:
    """The shape of each top of a layer that reads samples; None where the file does not say it.

    A layer of a type that is not known is one too, if it takes no blob.
    """
    tops = layer.texts("top")
    found = SOURCES.get(layer.text("type"), _unknown)(layer)
    if len(found) == 1:  # one for all
        found = found * len(tops)
    return [*found, *[None] * len(tops)][: len(tops)]
