"""Data layers, with the shapes of their tops as far as the file says them, and sample selection.

Data layers are no modules: their tops are the net's inputs, and data sets replace them.
BatchReindex and Filter select samples by another bottom, as in Caffe's API documentation
(caffe.berkeleyvision.org/doxygen).
"""

from collections.abc import Callable

from torch import Tensor, nn

from firecaffe.caffe.layers.spec import Kind, Shape, Spec, want_axes, want_tops
from firecaffe.caffe.message import Message

LABELS_AXES = 8
"""Numbers per box in AnnotatedData's labels: image, class, instance, four corners, difficult."""


def _images(layer: Message, name: str) -> Shape | None:
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
    def shapes(layer: Message) -> list[Shape | None]:
        batch = max(1, layer.message(name).integer("batch_size", 1))
        return [_images(layer, name), (batch,)]

    return shapes


def _annotated(layer: Message) -> list[Shape | None]:
    return [_images(layer, "data_param"), (1, 1, 1, LABELS_AXES)]


def _memory(layer: Message) -> list[Shape | None]:
    param = layer.message("memory_data_param")
    names = ("batch_size", "channels", "height", "width")
    shape = tuple(param.integer(word) for word in names)
    return [shape if min(shape) > 0 else None, (max(1, shape[0]),)]


def _shapes(layer: Message, name: str) -> list[Shape | None]:
    return [tuple(message.integers("dim")) for message in layer.message(name).messages("shape")]


def _input(layer: Message) -> list[Shape | None]:
    return _shapes(layer, "input_param")


def _dummy(layer: Message) -> list[Shape | None]:
    param = layer.message("dummy_data_param")
    sizes = [param.integers(word) for word in ("num", "channels", "height", "width")]
    old = [*zip(*sizes, strict=False)]
    return _shapes(layer, "dummy_data_param") or [tuple(shape) for shape in old]


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


def shapes_of(layer: Message) -> list[Shape | None]:
    """Return the shape of each top of a data layer; None if the file does not say it."""
    tops = layer.texts("top")
    shapes = SOURCES.get(layer.text("type"), _unknown)(layer)
    if len(shapes) == 1:  # one shape for all tops
        shapes = shapes * len(tops)
    return [*shapes, *[None] * len(tops)][: len(tops)]


class BatchReindex(nn.Module):
    """Select samples of (B, …) by (N,) places in the batch. A sample may occur several times."""

    def forward(self, values: Tensor, places: Tensor) -> Tensor:
        return values[places.long()]


class Filter(nn.Module):
    """Keep samples for which the last bottom, (B, 1, …), is not 0; on the meta device, all."""

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        *values, selector = bottoms
        if not selector.is_meta:
            chosen = selector.flatten() != 0
            values = [value[chosen] for value in values]
        return values[0] if len(values) == 1 else tuple(values)


def batch_reindex(spec: Spec) -> BatchReindex:
    want_axes(spec, 1, bottom=1)
    return BatchReindex()


def filtered(spec: Spec) -> Filter:
    want_tops(spec, len(spec.bottoms) - 1)
    *values, selector = spec.bottoms
    if not values or any(size != 1 for size in selector[1:]):
        raise spec.error(
            f" chooses by {tuple(selector)}; expected (B, 1, …) behind what is chosen from"
        )
    for value in values:
        if value[0] != selector[0]:
            raise spec.error(
                f" chooses among {value[0]} samples by {selector[0]}; expected as many"
            )
    return Filter()


LAYERS = {
    "BatchReindex": Kind(batch_reindex, "", (), bottoms=(2,)),
    "Filter": Kind(filtered, "", (), bottoms=()),
}
