"""Layers of Caffe before February 2014: `layers { layer { name type: "conv" … } bottom top }`."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from firecaffe.caffe.message import Field, Message, Word


class Old(NamedTuple):
    """A layer type's name in the V1 form, the message of its fields, and their new names there."""

    type: str
    param: str = ""
    words: Mapping[str, str] = MappingProxyType({})


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


FILLED = {"biasterm": "bias_term", **_same("num_output", "weight_filler", "bias_filler")}
WINDOW = {"kernelsize": "kernel_size", **_same("pad", "stride")}
SOURCE = {"source": "source", "batchsize": "batch_size"}
DETECTION = ("fg_threshold", "bg_threshold", "fg_fraction", "context_pad", "crop_mode")
TYPES = {
    "accuracy": Old("ACCURACY"),
    "bnll": Old("BNLL"),
    "concat": Old("CONCAT", "concat_param", _same("concat_dim")),
    "conv": Old("CONVOLUTION", "convolution_param", {**FILLED, **WINDOW, **_same("group")}),
    "data": Old("DATA", "data_param", {**SOURCE, **_same("rand_skip")}),
    "dropout": Old("DROPOUT", "dropout_param", _same("dropout_ratio")),
    "euclidean_loss": Old("EUCLIDEAN_LOSS"),
    "flatten": Old("FLATTEN"),
    "hdf5_data": Old("HDF5_DATA", "hdf5_data_param", SOURCE),
    "hdf5_output": Old("HDF5_OUTPUT"),
    "im2col": Old("IM2COL"),
    "images": Old(
        "IMAGE_DATA",
        "image_data_param",
        {**SOURCE, "shuffle_images": "shuffle", **_same("rand_skip", "new_height", "new_width")},
    ),
    "infogain_loss": Old("INFOGAIN_LOSS", "infogain_loss_param", _same("source")),
    "innerproduct": Old("INNER_PRODUCT", "inner_product_param", FILLED),
    "lrn": Old("LRN", "lrn_param", _same("local_size", "alpha", "beta", "k")),
    "multinomial_logistic_loss": Old("MULTINOMIAL_LOGISTIC_LOSS"),
    "pool": Old("POOLING", "pooling_param", {**WINDOW, **_same("pool")}),
    "relu": Old("RELU"),
    "sigmoid": Old("SIGMOID"),
    "softmax": Old("SOFTMAX"),
    "softmax_loss": Old("SOFTMAX_LOSS"),
    "split": Old("SPLIT"),
    "tanh": Old("TANH"),
    "window_data": Old(
        "WINDOW_DATA",
        "window_data_param",
        {**SOURCE, **{f"det_{name}": name for name in DETECTION}},
    ),
}
TRANSFORM = {
    "scale": "scale",
    "meanfile": "mean_file",
    "cropsize": "crop_size",
    "mirror": "mirror",
}


def in_v1(net: Message, layers: Sequence[Message]) -> list[Message]:
    """Convert layers to the V1 form. Fields that a type lacks stay and count as not understood."""
    for layer in layers:
        if not layer.has("layer"):
            raise layer.error("layers without layer { … } beside some that have it")
    return [_layer(layer, fields) for layer, fields in _padded(net, layers)]


def _layer(layers: Message, bottoms: list[Field]) -> Message:
    inner = layers.message("layer")
    kind = inner.text("type")
    old = TYPES.get(kind, Old(kind))
    param_fields: list[Field] = []
    transform: list[Field] = []
    fields = [field for field in layers.fields if field.name not in ("layer", "bottom")]
    for field in inner.fields:
        if field.name in old.words:
            param_fields.append(field._replace(name=old.words[field.name]))
        elif field.name in TRANSFORM:
            transform.append(field._replace(name=TRANSFORM[field.name]))
        elif field.name == "type":
            fields.append(field._replace(value=Word(old.type)))
        else:
            fields.append(field)
    for name, moved in ((old.param, param_fields), ("transform_param", transform)):
        if moved:
            inside = Message(moved, moved[0].line, layers.where)
            fields.append(Field(name, inside, moved[0].line))
    return Message([*fields, *bottoms], layers.line, layers.where)


def _padded(net: Message, layers: Sequence[Message]) -> list[tuple[Message, list[Field]]]:
    """Drop padding layers and move their pad to the next layer. Return layers with bottoms."""
    writers: dict[str, Message | None] = dict.fromkeys(net.texts("input"))
    kept: list[tuple[Message, list[Field]]] = []
    for layer in layers:
        inner = layer.message("layer")
        kind = inner.text("type")
        bottoms = layer.all("bottom")
        changed = []
        for bottom, name in zip(bottoms, layer.texts("bottom"), strict=True):
            if name not in writers:
                raise layer.error(f"bottom is {name}, which no layer before has made", bottom.line)
            writer = writers[name]
            before = None if writer is None else writer.message("layer")
            if writer is None or before is None or before.text("type") != "padding":
                changed.append(bottom)
                continue
            is_plain = len(bottoms) == len(writer.all("bottom")) == len(writer.all("top")) == 1
            if kind not in ("conv", "pool") or not is_plain:
                raise writer.error(
                    "a padding layer; expected one bottom, one top, and a convolution or a pooling "
                    f"after it, not {kind}"
                )
            changed.append(writer.all("bottom")[0])
            others = [field for field in inner.fields if field.name != "pad"]
            pad = Field("pad", before.integer("pad"), before.line_of("pad"))
            inner = Message([*others, pad], inner.line, inner.where)
        writers.update(dict.fromkeys(layer.texts("top"), layer))
        if kind != "padding":
            others = [field for field in layer.fields if field.name != "layer"]
            whole = Message([*others, Field("layer", inner, inner.line)], layer.line, layer.where)
            kept.append((whole, changed))
    return kept
