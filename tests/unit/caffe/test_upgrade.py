"""Old nets in today's form, as a real Caffe makes them, and which layers of a net take part."""

from typing import Any

import pytest

from firecaffe.caffe.graph import layers_of, phase_of
from firecaffe.caffe.message import CaffeError, Message, Note
from firecaffe.caffe.text import parse
from firecaffe.caffe.upgrade import V1_NAMES, current
from tests.kit.models_refused import refused

INPUT = 'input: "data" input_dim: 2 input_dim: 3 input_dim: 8 input_dim: 8\n'
INPUT_LAYER = (
    'layer { name: "input" type: "Input" top: "data" '
    "input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }"
)


def plain(message: Message) -> dict[str, list[Any]]:
    """Without lines, and without the order of different names."""
    found: dict[str, list[Any]] = {}
    for each in message.fields:
        value = plain(each.value) if isinstance(each.value, Message) else each.value
        found.setdefault(each.name, []).append(value)
    return found


def check(old: str, expected: str) -> list[Note]:
    net, notes = current(parse(old))
    assert plain(net) == plain(parse(expected))
    return notes


def test_v1() -> None:
    notes = check(
        """
layers { name: "a" type: CONVOLUTION bottom: "data" top: "a" param: "w" param: "b"
  blob_share_mode: PERMISSIVE blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0
  convolution_param { num_output: 4 } }
layers { name: "b" type: 4 bottom: "data" top: "b" blobs_lr: 3 include { phase: TEST } }
layers { name: "l" type: "EUCLIDEAN_LOSS" bottom: "a" bottom: "b" loss_weight: 0.3 }
layers { name: "i" type: INTERP } layers { name: "s" type: SURELY_NOT extra: 1 }
""",
        """
layer { name: "a" type: "Convolution" bottom: "data" top: "a"
  param { name: "w" share_mode: PERMISSIVE lr_mult: 1 decay_mult: 1 }
  param { name: "b" lr_mult: 2 decay_mult: 0 } convolution_param { num_output: 4 } }
layer { name: "b" type: "Convolution" bottom: "data" top: "b" param { lr_mult: 3 }
  include { phase: TEST } }
layer { name: "l" type: "EuclideanLoss" bottom: "a" bottom: "b" loss_weight: 0.3 }
layer { name: "i" type: "Interp" } layer { name: "s" type: "SURELY_NOT" extra: 1 }
""",
    )
    assert [note.place for note in notes] == ["prototxt:2"]


def test_every_member_of_v1_by_its_number_and_by_its_name() -> None:
    assert len(V1_NAMES) == 40
    for number, (name, today) in enumerate(V1_NAMES.items()):
        check(f"layers {{ type: {name} }}", f'layer {{ type: "{today}" }}')
        check(f"layers {{ type: {number} }}", f'layer {{ type: "{today}" }}')


CONV = 'num_output: 4 stride: 2 group: 1 weight_filler { type: "msra" }'
DENSE = 'num_output: 7 bias_filler { type: "constant" value: 1 }'
LIST = 'source: "list" rand_skip: 1 new_height: 12'
LRN = "local_size: 3 alpha: 0.01 beta: 0.5 k: 2"

# type and words, today's
V0 = {
    f"conv kernelsize: 3 pad: 7 biasterm: true blobs_lr: 1. weight_decay: 0. {CONV}": (
        'type: "Convolution" param { lr_mult: 1 decay_mult: 0 } '
        f"convolution_param {{ kernel_size: 3 pad: 7 bias_term: true {CONV} }}"
    ),
    "relu": 'type: "ReLU"',
    f"lrn {LRN}": f'type: "LRN" lrn_param {{ {LRN} }}',
    "pool pool: AVE kernelsize: 3 stride: 2": (
        'type: "Pooling" pooling_param { pool: AVE kernel_size: 3 stride: 2 }'
    ),
    "dropout dropout_ratio: 0.3": 'type: "Dropout" dropout_param { dropout_ratio: 0.3 }',
    "concat concat_dim: 1": 'type: "Concat" concat_param { concat_dim: 1 }',
    f"innerproduct scale: 3 kernelsize: 9 {DENSE}": (
        'type: "InnerProduct" kernelsize: 9 transform_param { scale: 3 } '
        f"inner_product_param {{ {DENSE} }}"
    ),
    "softmax_loss": 'type: "SoftmaxWithLoss"',
    f'images cropsize: 8 mirror: true meanfile: "m" batchsize: 2 shuffle_images: true {LIST}': (
        'type: "ImageData" transform_param { crop_size: 8 mirror: true mean_file: "m" } '
        f"image_data_param {{ batch_size: 2 shuffle: true {LIST} }}"
    ),
}


@pytest.mark.parametrize("old", V0)
def test_v0(old: str) -> None:
    kind, _, words = old.partition(" ")
    check(
        f'{INPUT} layers {{ layer {{ type: "{kind}" {words} }} bottom: "data" top: "y" }}',
        f'{INPUT_LAYER} layer {{ bottom: "data" top: "y" {V0[old]} }}',
    )


def test_v0_with_a_padding_layer() -> None:
    check(
        INPUT
        + 'layers { layer { type: "padding" pad: 2 } bottom: "data" top: "padded" }'
        + 'layers { layer { type: "conv" pad: 7 } bottom: "padded" top: "y" }',
        INPUT_LAYER
        + 'layer { type: "Convolution" bottom: "data" top: "y" convolution_param { pad: 2 } }',
    )


RELU = 'layer { name: "r" type: "ReLU" bottom: "data" top: "r" }'
ONE_PARAM = 'layer { type: "BatchNorm" param { lr_mult: 0 } }'
SCALE = 'layer { type: "Scale" param { lr_mult: 1 } param { lr_mult: 1 } param { lr_mult: 1 } }'
UNREAD = 'layer { type: "Data" data_param { source: "s" scale: 0.5 } }'
STILL = "param { lr_mult: 0 decay_mult: 0 }"

# old, today's, the number of notes
UPGRADES = {
    "v1 data, whose transformation wins over its transform_param": (
        'layers { name: "d" type: DATA data_param { source: "s" scale: 0.5 crop_size: 8 } '
        "transform_param { scale: 2 mean_value: 3 } }",
        'layer { name: "d" type: "Data" data_param { source: "s" } '
        "transform_param { scale: 2 mean_value: 3 scale: 0.5 crop_size: 8 } }",  # the last counts
        1,
    ),
    "today's data, of which Caffe leaves some unread": (UNREAD, UNREAD, 0),
    "an input": (INPUT + RELU, INPUT_LAYER + RELU, 1),
    "a shaped input": (
        'input_shape { dim: 2 dim: 3 dim: 8 dim: 8 } input: "data"' + RELU,
        INPUT_LAYER + RELU,
        1,
    ),
    "an input of no shape": (
        'input: "data"' + RELU,
        'layer { name: "input" type: "Input" top: "data" }' + RELU,
        1,
    ),
    "an input of no shape that a layer gives": (
        f'input: "data" {INPUT_LAYER} {RELU}',
        f"{INPUT_LAYER} {RELU}",
        1,
    ),
    "two inputs": (
        INPUT + 'input: "more" input_dim: 1 input_dim: 1 input_dim: 1 input_dim: 5',
        'layer { name: "input" type: "Input" top: "data" top: "more" input_param { '
        "shape { dim: 2 dim: 3 dim: 8 dim: 8 } shape { dim: 1 dim: 1 dim: 1 dim: 5 } } }",
        1,
    ),
    "BatchNorm with three params holds still": (
        'layer { type: "BatchNorm" param { name: "q" lr_mult: 1 } param { lr_mult: 0 } param { } }',
        'layer { type: "BatchNorm" param { name: "q" lr_mult: 0 decay_mult: 0 } '
        f"{STILL} {STILL} }}",
        1,
    ),
    "BatchNorm with one": (ONE_PARAM, ONE_PARAM, 0),
    "three params of another layer": (SCALE, SCALE, 0),
}


@pytest.mark.parametrize("name", UPGRADES)
def test_upgrades(name: str) -> None:
    old, today, notes = UPGRADES[name]
    assert len(check(old, today)) == notes


def test_an_input_in_place_is_dropped_where_a_layer_gives_it_alone() -> None:
    relu = 'layer { name: "r" type: "ReLU" bottom: "data" top: "data" }'
    (note,) = check(f'input: "data" {INPUT_LAYER} {relu}', f"{INPUT_LAYER} {relu}")
    assert "left out" in note.what
    net, _ = current(parse(f'input: "data" {relu}'))  # nobody else gives it: it stays one
    assert [each.text("type") for each in net.messages("layer")] == ["Input", "ReLU"]


def test_what_is_told_as_unread() -> None:
    """Sizes beyond the inputs, and words of the net that are strange: not those without effect."""
    net, _ = current(parse(INPUT + "input_dim: 9"))
    net.all("layer")
    assert ("input_dim", 2) in list(net.unread())
    net, notes = current(parse('name: "n" force_backward: true debug_info: true strange: 1'))
    assert [name for name, _ in net.unread()] == ["strange"]
    assert notes == []


def test_lines_stay_those_of_the_file() -> None:
    net, _ = current(parse(INPUT + '\nlayers {\n type: RELU\n blobs_lr: 1\n bottom: "b"\n}'))
    first, second = net.messages("layer")
    assert (first.line, first.message("input_param").message("shape").line) == (1, 1)
    assert (second.line, second.line_of("type"), second.line_of("bottom")) == (3, 4, 6)
    assert second.message("param").line == 5


PADDED = "input: 'a' layers { layer { type: 'padding' } bottom: 'a' top: 'p' }"
REFUSED = {
    'layers { type: RELU }\nlayer { type: "ReLU" }': ":2: layer",
    "layers { layer { } }\nlayers { type: RELU }": ":2: layers without layer",
    "layers { type: 40 }": ":1: type is 40",
    "layers {\n param { lr_mult: 1 } }": ":2: param is {",
    "\ninput: 'a' input_dim: 1": ":2: 1 input_dim; expected 4",
    "input: 'a' input: 'b' input_shape { dim: 1 }": ":1: 1 input_shape",
    "layers { layer { type: 'relu' }\n bottom: 'b' }": ":2: bottom is b",
    f"{PADDED}\nlayers {{ layer {{ type: 'relu' }} bottom: 'p' }}": ":1: a padding layer",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_caffe_refuses(text: str) -> None:
    with refused(CaffeError, [REFUSED[text]]):
        current(parse(text))


NET = """
layer { name: "always" }
layer { name: "train" include { phase: TRAIN } }
layer { name: "test" include { phase: 1 not_stage: "z" } }
layer { name: "no_test" exclude { phase: TEST } }
layer { name: "either" include { phase: TRAIN stage: "a" } include { phase: TEST min_level: 2 } }
layer { name: "both" include { stage: "a" stage: "b" } }
layer { name: "low" include { max_level: 0 } }
layer { name: "high" exclude { max_level: 1 } }
layer { name: "any" include { } }
layer { name: "never" exclude { } }
layer { name: "runs" phase: TEST }
"""


def names_of(net: str, phase: str, stages: list[str], level: int = 0) -> list[str]:
    return [layer.text("name") for layer in layers_of(parse(net), phase, stages, level)]


# phase, stages, level, layers
RULES: list[tuple[str, list[str], int, str]] = [
    ("TRAIN", [], 0, "always train no_test low any runs"),
    ("TEST", [], 0, "always test low any runs"),
    ("TRAIN", ["a"], 1, "always train no_test either any runs"),
    ("TEST", ["z", "b"], 2, "always either high any runs"),
    ("TEST", ["a", "b"], -1, "always test both low any runs"),
]


@pytest.mark.parametrize(("phase", "stages", "level", "names"), RULES)
def test_rules(phase: str, stages: list[str], level: int, names: str) -> None:
    assert names_of(NET, phase, stages, level) == names.split()


def test_a_nets_own_state_counts() -> None:
    net = NET + 'state { phase: TRAIN stage: "a" level: 2 }'
    assert names_of(net, "TEST", ["b"]) == "always test either both high any runs".split()


def test_a_layers_own_phase_says_how_it_runs() -> None:
    layers = layers_of(parse("layer { phase: TEST } layer { } layer { phase: 0 }"), "TRAIN")
    assert [phase_of(each, "TRAIN") for each in layers] == ["TEST", "TRAIN", "TRAIN"]


def test_all_of_a_rule_is_read_and_nothing_else() -> None:
    net = parse(NET + 'layer { include { phase: TRAIN min_level: 3 stage: "x" other: 1 } }')
    for phase in ("TRAIN", "TEST"):
        for layer in layers_of(net, phase):
            layer.ignore("name", "phase")
    unread = [name for name, _ in net.unread()]
    assert [name for name in unread if "name" not in name] == ["layer.include.other"]


def test_include_beside_exclude_is_refused() -> None:
    with pytest.raises(CaffeError, match=":2: both include and exclude"):
        layers_of(parse("\nlayer { include { phase: TEST } exclude { phase: TRAIN } }"), "TEST")
