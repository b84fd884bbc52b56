"""Convert nets of every age to today's form, as Caffe does when it loads them.

Source: BVLC/caffe, src/caffe/util/upgrade_proto.cpp, and what a real Caffe makes of such files.
"""

from firecaffe.caffe import v0, v1
from firecaffe.caffe.message import Field, Message, printable

NO_EFFECT = ("name", "force_backward", "debug_info")
BATCH_NORM_BLOBS = 3


def current(net: Message) -> tuple[Message, list[str]]:
    """Return the net in today's form, with the file's lines, and a line about each kind of change.

    Fields that are not understood stay in place. Raises CaffeError if Caffe would refuse the net.
    """
    fields, notes = _layers(net)
    fields, more_notes = _inputs(net, fields)
    notes += more_notes
    fields, more_notes = _batch_norms(net, fields)
    notes += more_notes
    upgraded = Message(fields, net.line, net.where)
    upgraded.ignore(*NO_EFFECT)
    return upgraded, notes


def _layers(net: Message) -> tuple[list[Field], list[str]]:
    old = net.messages("layers")
    if not old:
        return net.fields, []
    if net.has("layer"):
        raise net.error(
            "layer { … } beside layers { … }, which Caffe refuses; expected all of one form",
            net.line_of("layer"),
        )
    is_v0 = any(layer.has("layer") for layer in old)
    form = 'layers { layer { type: "conv" } }' if is_v0 else "layers { type: CONVOLUTION }"
    note = f'{form}, {len(old)} of them, read as layer {{ type: "Convolution" }}'
    layers = v0.in_v1(net, old) if is_v0 else old
    others = [field for field in net.fields if field.name != "layers"]
    upgraded = [Field("layer", v1.in_current(layer), layer.line) for layer in layers]
    return others + upgraded, [_note(net, old[0].line, note)]


def _inputs(net: Message, fields: list[Field]) -> tuple[list[Field], list[str]]:
    """Replace `input` by an Input layer at the front. Surplus sizes stay as they are."""
    names = net.all("input")
    if not names:
        return fields, []
    line = names[0].line
    if not net.has("input_shape") and not net.has("input_dim") and _are_given(names, fields):
        others = [field for field in fields if field.name != "input"]
        return others, [_note(net, line, "input without a shape left out: a layer gives that blob")]
    inside = [
        Field("name", "input", line),
        Field("type", "Input", line),
        *(name._replace(name="top") for name in names),
    ]
    shapes, used = _shapes(net, len(names))
    if shapes:
        param = Message(shapes, shapes[0].line, net.where)
        inside.append(Field("input_param", param, param.line))
    layer = Field("layer", Message(inside, line, net.where), line)
    gone = {id(name) for name in (*names, *used)}
    others = [field for field in fields if id(field) not in gone]
    shown = ", ".join(net.texts("input"))
    return [layer, *others], [_note(net, line, f"input ({shown}) read as a layer of type Input")]


def _are_given(names: list[Field], fields: list[Field]) -> bool:
    layers = [field.value for field in fields if isinstance(field.value, Message)]
    tops = {top for layer in layers if not layer.has("bottom") for top in layer.texts("top")}
    return tops.issuperset(str(name.value) for name in names)


def _shapes(net: Message, num_inputs: int) -> tuple[list[Field], list[Field]]:
    """Return each input's `shape { dim … }` and the fields used; none if the net says no shape."""
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
    return [
        Field("shape", Message(four, four[0].line, net.where), four[0].line) for four in fours
    ], dims


def _batch_norms(net: Message, fields: list[Field]) -> tuple[list[Field], list[str]]:
    """Set the multipliers of BatchNorm's three blobs to 0. Today's Caffe always fixes them."""
    changed, notes = [], []
    for field in fields:
        layer = field.value
        if field.name == "layer" and isinstance(layer, Message) and _moves_statistics(layer):
            still = [_still(part) if part.name == "param" else part for part in layer.fields]
            field = field._replace(value=Message(still, layer.line, layer.where))
            notes.append(_note(net, layer.line_of("param"), "BatchNorm's statistics get lr_mult 0"))
        changed.append(field)
    return changed, notes


def _moves_statistics(layer: Message) -> bool:
    params = layer.messages("param") if layer.text("type") == "BatchNorm" else []
    return len(params) == BATCH_NORM_BLOBS and any(
        parameter.number("lr_mult", 1.0) or parameter.number("decay_mult", 1.0)
        for parameter in params
    )


def _still(param: Field) -> Field:
    assert isinstance(param.value, Message)
    names = ("lr_mult", "decay_mult")
    kept = [field for field in param.value.fields if field.name not in names]
    zeros = [Field(name, 0.0, param.line) for name in names]
    return param._replace(value=Message([*kept, *zeros], param.line, param.value.where))


def _note(net: Message, line: int, what: str) -> str:
    return f"{net.where}{f':{line}' if line else ''}: {printable(what)}"
