"""Converts nets in older forms (V0, V1) to the current form, as Caffe does when it loads them.

Source: BVLC/caffe, src/caffe/util/upgrade_proto.cpp, and the conversions of a real Caffe.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from firecaffe.caffe import text
from firecaffe.caffe.message import Field, Message, Note, Word, printable


class Old(NamedTuple):
    """A V0 type's name in V1, the message of its fields, and their names in that message."""

    type: str
    param: str = ""
    words: Mapping[str, str] = MappingProxyType({})


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _pairs(words: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in words.split())


FILLED = {"biasterm": "bias_term", **_same("num_output", "weight_filler", "bias_filler")}
WINDOW = {"kernelsize": "kernel_size", **_same("pad", "stride")}
SOURCE = {"source": "source", "batchsize": "batch_size"}
DETECTION = ("fg_threshold", "bg_threshold", "fg_fraction", "context_pad", "crop_mode")
V0_TYPES = {
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
V0_TRANSFORM = {"meanfile": "mean_file", "cropsize": "crop_size", **_same("scale", "mirror")}


def _group(name: str, fields: Sequence[Field], where: str) -> Field:
    line = fields[0].line
    return Field(name, Message(fields, line, where), line)


def to_v1(net: Message, layers: Sequence[Message]) -> list[Message]:
    """Convert layers to the V1 form. Fields that a type lacks are kept, and reported as unread."""
    for layer in layers:
        if not layer.has("layer"):
            raise layer.error("layers without layer { … } beside some that have it")
    return [_layer(layer, fields) for layer, fields in _padded(net, layers)]


def _layer(layers: Message, bottoms: list[Field]) -> Message:
    inner = layers.message("layer")
    kind = inner.text("type")
    old = V0_TYPES.get(kind, Old(kind))
    fields: list[Field] = []
    param_fields: list[Field] = []
    transform: list[Field] = []
    for field in inner.fields:
        if field.name in old.words:
            param_fields.append(field._replace(name=old.words[field.name]))
        elif field.name in V0_TRANSFORM:
            transform.append(field._replace(name=V0_TRANSFORM[field.name]))
        elif field.name == "type":
            fields.append(field._replace(value=Word(old.type)))
        else:
            fields.append(field)
    for name, moved in ((old.param, param_fields), ("transform_param", transform)):
        if moved:
            fields.append(_group(name, moved, layers.where))
    return layers.changed(("layer", "bottom"), [*fields, *bottoms])


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
            pad = Field("pad", before.integer("pad"), before.line_of("pad"))
            inner = inner.changed(["pad"], [pad])
        writers.update(dict.fromkeys(layer.texts("top"), layer))
        if kind != "padding":
            kept.append((layer.changed(["layer"], [Field("layer", inner, inner.line)]), changed))
    return kept


V1_NAMES = _pairs("""
    NONE= ACCURACY=Accuracy BNLL=BNLL CONCAT=Concat CONVOLUTION=Convolution DATA=Data
    DROPOUT=Dropout EUCLIDEAN_LOSS=EuclideanLoss FLATTEN=Flatten HDF5_DATA=HDF5Data
    HDF5_OUTPUT=HDF5Output IM2COL=Im2col IMAGE_DATA=ImageData INFOGAIN_LOSS=InfogainLoss
    INNER_PRODUCT=InnerProduct LRN=LRN MULTINOMIAL_LOGISTIC_LOSS=MultinomialLogisticLoss
    POOLING=Pooling RELU=ReLU SIGMOID=Sigmoid SOFTMAX=Softmax SOFTMAX_LOSS=SoftmaxWithLoss
    SPLIT=Split TANH=TanH WINDOW_DATA=WindowData ELTWISE=Eltwise POWER=Power
    SIGMOID_CROSS_ENTROPY_LOSS=SigmoidCrossEntropyLoss HINGE_LOSS=HingeLoss MEMORY_DATA=MemoryData
    ARGMAX=ArgMax THRESHOLD=Threshold DUMMY_DATA=DummyData SLICE=Slice MVN=MVN ABSVAL=AbsVal
    SILENCE=Silence CONTRASTIVE_LOSS=ContrastiveLoss EXP=Exp DECONVOLUTION=Deconvolution
""")
"""Members of a real Caffe's enum in order, from 0, with their current names."""
FORKS = _pairs("""
    CROP=Crop INTERP=Interp NORMALIZE=Normalize PRELU=PReLU PYTHON=Python RESHAPE=Reshape
    ROI_POOLING=ROIPooling SMOOTH_L1_LOSS=SmoothL1Loss
""")
"""Members that forks added, with their current names. Numbers differ between forks."""
NAMES = V1_NAMES | FORKS
BY_NUMBER = dict(enumerate(V1_NAMES.values()))
PER_BLOB = ("param", "blob_share_mode", "blobs_lr", "weight_decay")
SHARE_MODES = ("STRICT", "PERMISSIVE")
DATA_PARAMS = {
    "Data": "data_param",
    "ImageData": "image_data_param",
    "WindowData": "window_data_param",
}
V1_TRANSFORM = ("scale", "mean_file", "crop_size", "mirror")


def to_current(layers: Message) -> Message:
    """Convert a layer to current form. Keeps unknown types. Raises CaffeError on wrong values."""
    types = [field._replace(value=_type(layers, field)) for field in layers.all("type")]
    upgraded = layers.changed((*PER_BLOB, "type"), [*types, *_params(layers)])
    param = DATA_PARAMS.get(upgraded.text("type"))
    return _transformed(upgraded, param) if param else upgraded


def _type(layers: Message, field: Field) -> str:
    value = field.value
    if isinstance(value, str):
        return NAMES.get(value, str(value))
    if not isinstance(value, int) or value not in BY_NUMBER:
        raise layers.error(f"type is {value!s:.40}; expected a name such as RELU", field.line)
    return BY_NUMBER[value]


def _params(layers: Message) -> list[Field]:
    lists: tuple[tuple[str, str, Sequence[float | str]], ...] = (
        ("name", "param", layers.texts("param")),
        (
            "share_mode",
            "blob_share_mode",
            [Word(choice) for choice in layers.choices("blob_share_mode", SHARE_MODES)],
        ),
        ("lr_mult", "blobs_lr", layers.numbers("blobs_lr")),
        ("decay_mult", "weight_decay", layers.numbers("weight_decay")),
    )
    most = max(len(values) for _, _, values in lists)
    blobs: list[list[Field]] = [[] for _ in range(most)]
    for name, old, values in lists:
        for blob, value, field in zip(blobs, values, layers.all(old), strict=False):
            blob.append(Field(name, value, field.line))
    return [_group("param", blob, layers.where) for blob in blobs]


def _transformed(layer: Message, param: str) -> Message:
    data = layer.message(param)
    moved = [field for field in data.fields if field.name in V1_TRANSFORM]
    if not moved:
        return layer.changed()
    line = moved[0].line
    transform = [*layer.message("transform_param").fields, *moved]
    added = [
        Field(param, data.changed(V1_TRANSFORM), data.line),
        Field("transform_param", Message(transform, line, layer.where), line),
    ]
    return layer.changed((param, "transform_param"), added)


NO_EFFECT = ("name", "force_backward", "debug_info")
BATCH_NORM_BLOBS = 3


def current_net(where: str | Path | Message) -> Message:
    """Return the net of a file, or of a parsed one, in current form. Raises CaffeError."""
    return current(where if isinstance(where, Message) else text.read(Path(where)))[0]


def current(net: Message) -> tuple[Message, list[Note]]:
    """Return the net in current form, and a note on each kind of change. Raises CaffeError."""
    notes: list[Note] = []
    for upgrade in (_layers, _inputs, _batch_norms):
        net, more_notes = upgrade(net)
        notes += more_notes
    net.ignore(*NO_EFFECT)
    return net, notes


def _layers(net: Message) -> tuple[Message, list[Note]]:
    old = net.messages("layers")
    if not old:
        return net, []
    if net.has("layer"):
        raise net.error(
            "layer { … } beside layers { … }, which Caffe refuses; expected all of one form",
            "layer",
        )
    is_v0 = any(layer.has("layer") for layer in old)
    form = 'layers { layer { type: "conv" } }' if is_v0 else "layers { type: CONVOLUTION }"
    note = f'{form}, {len(old)} of them, read as layer {{ type: "Convolution" }}'
    layers = to_v1(net, old) if is_v0 else old
    upgraded = [Field("layer", to_current(layer), layer.line) for layer in layers]
    return net.changed(["layers"], upgraded), [_note(net, old[0].line, note)]


def _inputs(net: Message) -> tuple[Message, list[Note]]:
    """Replace `input` by an Input layer at the front. Surplus shapes are kept."""
    names = net.all("input")
    if not names:
        return net, []
    line = names[0].line
    if not net.has("input_shape") and not net.has("input_dim") and _are_given(names, net.fields):
        what = "input without a shape left out: a layer gives that blob"
        return net.changed(["input"]), [_note(net, line, what)]
    inside = [
        Field("name", "input", line),
        Field("type", "Input", line),
        *(name._replace(name="top") for name in names),
    ]
    shapes, used = _shapes(net, len(names))
    if shapes:
        inside.append(_group("input_param", shapes, net.where))
    gone = {id(name) for name in (*names, *used)}
    others = [field for field in net.fields if id(field) not in gone]
    whole = Message([_group("layer", inside, net.where), *others], net.line, net.where)
    shown = ", ".join(net.texts("input"))
    return whole, [_note(net, line, f"input ({shown}) read as a layer of type Input")]


def _are_given(names: list[Field], fields: list[Field]) -> bool:
    layers = [field.value for field in fields if isinstance(field.value, Message)]
    tops = {top for layer in layers if not layer.has("bottom") for top in layer.texts("top")}
    return tops.issuperset(str(name.value) for name in names)


def _shapes(net: Message, num_inputs: int) -> tuple[list[Field], list[Field]]:
    """Return each input's `shape { dim … }`, and the fields used; none if the net has no shape."""
    shapes = net.all("input_shape")[:num_inputs]
    dims = net.all("input_dim")[: 4 * num_inputs]
    if shapes and len(shapes) < num_inputs:
        what = f"{len(shapes)} input_shape; expected one for each of {num_inputs} inputs"
        raise net.error(what, shapes[0].line)
    if shapes:
        return [shape._replace(name="shape") for shape in shapes], shapes
    if dims and len(dims) < 4 * num_inputs:
        what = f"{len(dims)} input_dim; expected 4 for each of {num_inputs} inputs"
        raise net.error(what, dims[0].line)
    named = [dim._replace(name="dim") for dim in dims]
    fours = [named[at : at + 4] for at in range(0, len(named), 4)]
    return [_group("shape", four, net.where) for four in fours], dims


def _batch_norms(net: Message) -> tuple[Message, list[Note]]:
    """Set the multipliers of BatchNorm's three blobs to 0, as the current Caffe always does."""
    changed, notes = [], []
    for field in net.fields:
        layer = field.value
        if field.name == "layer" and isinstance(layer, Message) and _moves_statistics(layer):
            still = [_still(part) if part.name == "param" else part for part in layer.fields]
            field = field._replace(value=Message(still, layer.line, layer.where))
            notes.append(_note(net, layer.line_of("param"), "BatchNorm's statistics get lr_mult 0"))
        changed.append(field)
    return Message(changed, net.line, net.where), notes


def _moves_statistics(layer: Message) -> bool:
    params = layer.messages("param") if layer.text("type") == "BatchNorm" else []
    return len(params) == BATCH_NORM_BLOBS and any(
        parameter.number("lr_mult", 1.0) or parameter.number("decay_mult", 1.0)
        for parameter in params
    )


def _still(param: Field) -> Field:
    assert isinstance(param.value, Message)
    names = ("lr_mult", "decay_mult")
    zeros = [Field(name, 0.0, param.line) for name in names]
    return param._replace(value=param.value.changed(names, zeros))


def _note(net: Message, line: int, what: str) -> Note:
    return Note(net.place(line), printable(what))
