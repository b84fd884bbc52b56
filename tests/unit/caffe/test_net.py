"""Nets: what takes what, names, shared weights, multipliers, losses; nothing huge is made."""

import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from firecaffe.caffe import Net, caffemodel
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.text import parse
from firecaffe.caffe.trained import TrainedNet
from tools.caffe_goldens.cases import inputs

DATA = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 } } }\n'
LABEL = 'layer { name: "y" type: "Input" top: "label" input_param { shape { dim: 4 } } }\n'
FILLED = 'weight_filler { type: "xavier" }'


def full(name: str, bottom: str, top: str, outputs: int = 3, more: str = "") -> str:
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{top}" {more} '
        f"inner_product_param {{ num_output: {outputs} {FILLED} }} }}\n"
    )


def layer(type_: str, bottoms: str, top: str = "", more: str = "", name: str = "") -> str:
    taken = " ".join(f'bottom: "{each}"' for each in bottoms.split())
    given = f'top: "{top}"' if top else ""
    return f'layer {{ name: "{name or type_.lower()}" type: "{type_}" {taken} {given} {more} }}\n'


def net_of(text: str, phase: str = "TEST", keep_blobs: bool = True) -> Net:
    return Net(parse(text), phase=phase, keep_blobs=keep_blobs)


def samples() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


A, B = full("a", "data", "a"), full("b", "a", "b")
LOSS = layer("SoftmaxWithLoss", "a label", "loss")
SHIFTED = layer("Power", "a", "a", "power_param { shift: 5 }")


def test_a_layer_in_place_is_seen_by_those_behind_it_alone() -> None:
    text = DATA + A + layer("AbsVal", "a", "first") + SHIFTED
    net = net_of(text + layer("Power", "a", "second", name="last"))
    outputs, before = net(samples()), net.layers["a"](samples())
    assert [*outputs] == ["first", "second"]
    torch.testing.assert_close(outputs["first"], before.abs())
    torch.testing.assert_close(outputs["second"], before + 5)
    torch.testing.assert_close(net.blobs["a"], before + 5)


def test_relu_writes_over_only_what_nobody_else_needs() -> None:
    relu = layer("ReLU", "a", "a")
    for body, is_inplace in (
        (A + relu, True),
        (A + layer("AbsVal", "a", "b") + relu, False),
        (A + layer("Sigmoid", "a", "a") + relu, False),
        (layer("ReLU", "data", "data") + A, False),
    ):
        net, x = net_of(DATA + body), samples().requires_grad_()
        module = net.layers["relu"]
        assert isinstance(module, nn.ReLU)
        assert module.inplace == is_inplace
        sum(each.sum() for each in net(x).values()).backward()
        assert x.grad is not None


def test_outputs_are_what_no_layer_takes_and_losses() -> None:
    net = net_of(DATA + LABEL + A + LOSS + layer("Power", "loss", "twice"))
    assert (net.inputs, net.outputs) == (["data", "label"], ["loss", "twice"])


def test_layers_without_their_bottoms_are_left_out() -> None:
    net = net_of(DATA + LABEL + A + LOSS + layer("Softmax", "a", "p"))
    labels = torch.zeros(4, dtype=torch.long)
    assert [*net(samples())] == [*net(samples())] == ["p"]
    assert [*net(samples(), labels)] == ["loss", "p"]
    assert [*net(None, labels)] == []
    with pytest.raises(ValueError, match="3 inputs are given"):
        net(samples(), samples(), samples())


def test_blobs_are_let_go_of_unless_kept() -> None:
    kept, not_kept = net_of(DATA + A + B), net_of(DATA + A + B, keep_blobs=False)
    not_kept.load_state_dict(kept.state_dict())
    torch.testing.assert_close(kept(samples()), not_kept(samples()))
    assert ([*kept.blobs], [*not_kept.blobs]) == (["data", "a", "b"], [])


def test_no_gradient_where_propagate_down_is_false() -> None:
    more = "propagate_down: true propagate_down: false"
    net = net_of(DATA + A + full("b", "data", "b") + layer("Eltwise", "a b", "c", more))
    net(samples())["c"].sum().backward()
    assert net.get_parameter("a.weight").grad is not None
    assert net.get_parameter("b.weight").grad is None


SHARED = 'param { name: "w" }'
PYTHON = 'type: "Python" bottom: "data" python_param { module: "rpn" layer: "Proposal" }'
REFUSED = {
    full("a", "nothing", "a"): "'a' takes 'nothing', which no layer before it gives",
    full("a", "data", "c") + full("b", "data", "c"): "which another layer gives",
    layer("Foo", "data", "b") + layer("Bar", "data", "c") + layer("Foo", "b", "d"): (
        '3 layers of types that are not known: "Foo" at lines 2, 4, "Bar" at line 3'
    ),
    f"layer {{ {PYTHON} }}": r"Python \"rpn.Proposal\" at line 2; .* in PyTorch",
    layer("ReLU", "data", "r", "loss_weight: 1 loss_weight: 2"): "2 loss_weight for 1",
    layer("ReLU", "data", "r", "propagate_down: 1 propagate_down: 1"): "2 propagate_down",
    layer("ReLU", "data", "r", SHARED): "1 param for 0 blobs",
    full("a", "data", "a", 4, SHARED) + full("c", "a", "c", 4, SHARED): (
        r"shares 'w' with 'a', whose shape is 4 x 3; .* 4 x 4"
    ),
    full("a", "data", "a", more='param { name: "w" lr_mult: 3 }')
    + full("c", "a", "c", more='param { name: "w" lr_mult: 2 }'): "lr_mult: 2; another .* says 3",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(CaffeError, match=REFUSED[text]):
        net_of(DATA + text)


def test_a_shape_that_nobody_says() -> None:
    text = 'layer { name: "d" type: "HDF5Data" top: "data" top: "label" }' + A
    with pytest.raises(CaffeError, match="HDF5Data does not say the shape of 'data'"):
        net_of(text)
    assert Net(parse(text), inputs={"data": (2, 7)}).shapes["a"] == (2, 3)
    with pytest.raises(CaffeError, match="for 'image', which is no input"):
        Net(parse(text), inputs={"image": (2, 7)})
    untaken = 'layer { name: "d" type: "Data" top: "x" data_param { source: "s" } }'
    with pytest.raises(CaffeError, match="does not say the shape"):
        TrainedNet(parse(untaken))
    with pytest.raises(CaffeError, match="no layer in TEST"):
        net_of('name: "nothing"')


def test_names_of_modules_and_unread_words() -> None:
    text = full("conv1/3x3.a", "data", "a") + full("loss", "a", "b")
    net = net_of(DATA + text + full("a", "b", "c", more="blob_share: 3") + full("a", "c", "d"))
    assert [*net.layers] == ["conv1/3x3.a", "loss", "a", "a_2"]
    assert [name for name, _ in net.named_children()] == ["conv1_3x3_a", "loss_", "a", "a_2"]
    assert net.unread() == [("a.blob_share", 4)]


def test_losses_are_added_by_their_weights() -> None:
    text = DATA + LABEL + A
    text += layer("SoftmaxWithLoss", "a label", "one", "loss_weight: 0.5", "l1")
    text += layer("SoftmaxWithLoss", "a label", name="two")
    net = net_of(text + layer("Reduction", "a", "sum", "loss_weight: 2"))
    assert net.losses == {"one": 0.5, "two": 1.0, "sum": 2.0}
    outputs = net(samples(), torch.tensor([0, 1, 2, 1]))
    torch.testing.assert_close(net.loss(outputs), 1.5 * outputs["one"] + 2 * outputs["sum"])
    without = net_of(DATA + A)
    with pytest.raises(CaffeError, match="no loss among the outputs"):
        without.loss(without(samples()))


def test_shared_weights_are_one_parameter() -> None:
    more = 'param { name: "w" lr_mult: 3 } param { name: "b" }'
    net = net_of(DATA + full("a", "data", "a", more=more) + full("c", "a", "c", more=more))
    assert [*dict(net.named_parameters())] == ["a.weight", "a.bias"]
    weight = net.get_parameter("a.weight")
    assert net.layers["c"].weight is weight
    torch.testing.assert_close(net(samples())["c"], samples() @ weight.t() @ weight.t())
    assert net.multipliers == {"a.weight": (3, 1), "a.bias": (1, 1)}


def test_multipliers() -> None:
    more = "param { lr_mult: 0 } param { lr_mult: 2 decay_mult: 0 }"
    text = DATA + full("a", "data", "a", more=more) + B
    text += layer("BatchNorm", "b", "b", "param { lr_mult: 0 }")
    kept = {"b.weight": (1, 1), "b.bias": (1, 1)}
    assert net_of(text).multipliers == {"a.weight": (0, 1), "a.bias": (2, 0), **kept}


def test_the_mode_is_the_phases() -> None:
    text = DATA + layer("Dropout", "data", "d")
    assert net_of(text, "TRAIN").layers["dropout"].training
    assert not net_of(text, "TEST").layers["dropout"].training


LOADED = DATA + A + full("b/c", "a", "b") + layer("BatchNorm", "b", "b")


def test_blobs_of_a_name_that_two_layers_have_are_refused() -> None:
    text = LOADED.replace("b/c", "a")
    blobs = {"a": [torch.ones(3, 3), torch.ones(3)]}
    with pytest.raises(CaffeError, match=r":3: 'a' is the name of line 2 too"):
        net_of(text).load(blobs)
    loaded = net_of(text).load({"batchnorm": [torch.ones(3), torch.ones(3), torch.ones(1)]})
    assert loaded.fresh == ["a", "a"]
    shared = 'param { name: "w" } param { name: "b" }'
    twice = full("a", "data", "a", more=shared) + full("a", "a", "b", more=shared)
    assert net_of(DATA + twice).load(blobs).filled == ["a", "a"]


def test_blobs_are_loaded_by_name() -> None:
    net = net_of(LOADED)
    blobs = {
        "a": [torch.full((1, 1, 3, 3), 2.0), torch.full((1, 1, 1, 3), 3.0)],
        "batchnorm": [torch.ones(3), torch.ones(3) * 2, torch.ones(1)],
        "other": [torch.ones(1)],
    }
    loaded = net.load(blobs)
    assert loaded.filled == ["a", "batchnorm"]
    statistics = [f"batchnorm.{blob}" for blob in ("mean", "variance", "factor")]
    assert loaded.tensors == ["a.weight", "a.bias", *statistics]
    assert (loaded.fresh, loaded.unused) == (["b/c"], ["other"])
    assert (net.get_parameter("a.weight") == 2).all()
    assert (net.get_buffer("batchnorm.variance") == 2).all()


@pytest.mark.parametrize(("blobs", "part"), [([(3, 4), (3,)], "3 x 4, 3"), ([(3, 3)], "3 x 3")])
def test_blobs_of_other_shapes_are_refused(blobs: list[tuple[int, ...]], part: str) -> None:
    with pytest.raises(CaffeError, match=f"blobs of {part}; the layer has 3 x 3, 3"):
        net_of(LOADED).load({"a": [torch.ones(shape) for shape in blobs]})


def test_blobs_are_loaded_from_a_file(tmp_path: Path) -> None:
    file, blobs = tmp_path / "x.caffemodel", [torch.ones(3, 3).numpy(), torch.ones(3).numpy()]
    caffemodel.write(file, [caffemodel.TrainedLayer("b/c", "InnerProduct", blobs)])
    assert (Net(parse(LOADED), file).get_parameter("b_c.weight") == 1).all()
    assert net_of(LOADED).get_parameter("b_c.weight").std() > 0


LINE, MAPS = inputs(x=(2, 100_000)), inputs(x=(1, 3, 4, 4))
STEPS = inputs(x=(1_000_000, 1, 2), cont=(1_000_000, 1))


def wide(words: str = "") -> str:
    words = f"convolution_param {{ num_output: 4 kernel_size: {2**40} {words} }}"
    return MAPS + layer("Convolution", "x", "y", words)


ONES = "continuation_indicator_param { time_step: 100000 batch_size: 100000 }"
HUGE = {
    "an input": inputs(x=(200_000, 200_000)),
    "a batch": inputs(x=(2**62, 2**62)),
    "a weight": LINE + layer("InnerProduct", "x", "y", "inner_product_param { num_output: 90000 }"),
    "beyond 64 bits": wide(),
    "a filler": wide('weight_filler { type: "bilinear" }'),
    "a top": LINE + layer("Tile", "x", "y", "tile_param { tiles: 20000 }"),
    "no bottoms": layer(
        "Parameter", "", "y", "parameter_param { shape { dim: 4000000000 dim: 8 } }"
    ),
    "ones": layer("ContinuationIndicator", "", "y", ONES),
    "steps": STEPS + layer("LSTM", "x cont", "y", "recurrent_param { num_output: 2 }"),
}


@pytest.mark.parametrize("net", HUGE.values(), ids=HUGE)
def test_one_line_and_no_memory(net: str) -> None:
    message = parse(net)
    tracemalloc.start()
    try:
        with pytest.raises(CaffeError) as found:
            Net(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "prototxt:" in str(found.value)
    assert str(found.value).isprintable()
    assert peak < 64 << 20


def test_the_outline_draws_no_numbers() -> None:
    """A layer's outline is made before the layer: its fillers must not be."""
    words = 'inner_product_param { num_output: 3 weight_filler { type: "gaussian" } }'
    torch.manual_seed(7)
    net = Net(parse(inputs(x=(2, 5)) + layer("InnerProduct", "x", "y", words)))
    torch.manual_seed(7)
    expected = torch.empty(3, 5).normal_(0, 1)
    assert torch.equal(net.get_parameter("innerproduct.weight"), expected)
