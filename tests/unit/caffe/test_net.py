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


class TestGraph:
    def test_a_layer_in_place_is_seen_by_those_behind_it_alone(self) -> None:
        text = DATA + full("a", "data", "a") + layer("AbsVal", "a", "first")
        text += layer("Power", "a", "a", "power_param { shift: 5 }")
        net = net_of(text + layer("Power", "a", "second", name="last"))
        found = net(samples())
        before = net.layers["a"](samples())
        torch.testing.assert_close(found["first"], before.abs())
        torch.testing.assert_close(found["second"], before + 5)
        assert [*found] == ["first", "second"]
        torch.testing.assert_close(net.blobs["a"], before + 5)

    def test_relu_writes_over_only_what_nobody_else_needs(self) -> None:
        before, relu = full("a", "data", "a"), layer("ReLU", "a", "a")
        for body, is_inplace in (
            (before + relu, True),
            (before + layer("AbsVal", "a", "b") + relu, False),
            (before + layer("Sigmoid", "a", "a") + relu, False),
            (layer("ReLU", "data", "data") + before, False),
        ):
            net, x = net_of(DATA + body), samples().requires_grad_()
            module = net.layers["relu"]
            assert isinstance(module, nn.ReLU)
            assert module.inplace == is_inplace
            sum(each.sum() for each in net(x).values()).backward()
            assert x.grad is not None

    def test_outputs_are_what_no_layer_takes_and_losses(self) -> None:
        text = DATA + LABEL + full("a", "data", "a") + layer("SoftmaxWithLoss", "a label", "loss")
        net = net_of(text + layer("Power", "loss", "twice", "power_param { scale: 2 }"))
        assert (net.inputs, net.outputs) == (["data", "label"], ["loss", "twice"])

    def test_layers_without_their_bottoms_are_left_out(self) -> None:
        text = DATA + LABEL + full("a", "data", "a") + layer("SoftmaxWithLoss", "a label", "loss")
        net = net_of(text + layer("Softmax", "a", "p"))
        assert [*net(samples())] == [*net(samples())] == ["p"]
        assert [*net(samples(), torch.zeros(4, dtype=torch.long))] == ["loss", "p"]
        assert [*net(None, torch.zeros(4, dtype=torch.long))] == []
        with pytest.raises(ValueError, match="3 inputs are given"):
            net(samples(), samples(), samples())

    def test_blobs_are_let_go_of_unless_kept(self) -> None:
        text = DATA + full("a", "data", "a") + full("b", "a", "b")
        kept, not_kept = net_of(text), net_of(text, keep_blobs=False)
        not_kept.load_state_dict(kept.state_dict())
        torch.testing.assert_close(kept(samples()), not_kept(samples()))
        assert ([*kept.blobs], [*not_kept.blobs]) == (["data", "a", "b"], [])

    def test_no_gradient_where_propagate_down_is_false(self) -> None:
        text = DATA + full("a", "data", "a") + full("b", "data", "b")
        more = "propagate_down: true propagate_down: false"
        net = net_of(text + layer("Eltwise", "a b", "c", more))
        net(samples())["c"].sum().backward()
        assert net.get_parameter("a.weight").grad is not None
        assert net.get_parameter("b.weight").grad is None

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (full("a", "nothing", "a"), "'a' takes 'nothing', which no layer before it gives"),
            (full("a", "data", "data2") + full("b", "data", "data2"), "which another layer gives"),
            (layer("Foo", "data", "b") + layer("Bar", "data", "c") + layer("Foo", "b", "d"),
             "3 layers of types that are not known: \"Foo\" at lines 2, 4, \"Bar\" at line 3"),
            ('layer { type: "Python" bottom: "data" top: "p" python_param { module: "rpn" '
             'layer: "Proposal" } }', r"Python \"rpn.Proposal\" at line 2; .* in PyTorch"),
            (layer("ReLU", "data", "r", "loss_weight: 1 loss_weight: 2"), "2 loss_weight for 1"),
            (layer("ReLU", "data", "r", "propagate_down: 1 propagate_down: 1"), "2 propagate_down"),
            (layer("ReLU", "data", "r", 'param { name: "w" }'), "1 param for 0 blobs"),
        ],
    )  # fmt: skip
    def test_refused(self, text: str, said: str) -> None:
        with pytest.raises(CaffeError, match=said):
            net_of(DATA + text)

    def test_a_shape_that_nobody_says(self) -> None:
        text = 'layer { name: "d" type: "HDF5Data" top: "data" top: "label" }' + full(
            "a", "data", "a"
        )
        with pytest.raises(CaffeError, match="HDF5Data does not say the shape of 'data'"):
            net_of(text)
        assert Net(parse(text), inputs={"data": (2, 7)}).shapes["a"] == (2, 3)
        with pytest.raises(CaffeError, match="for 'image', which is no input"):
            Net(parse(text), inputs={"image": (2, 7)})


class TestNames:
    def test_of_modules(self) -> None:
        net = net_of(
            DATA + full("conv1/3x3.a", "data", "a") + full("loss", "a", "b") + full("a", "b", "c")
            + full("a", "c", "d")
        )  # fmt: skip
        assert [*net.layers] == ["conv1/3x3.a", "loss", "a", "a_2"]
        assert [name for name, _ in net.named_children()] == ["conv1_3x3_a", "loss_", "a", "a_2"]

    def test_unread_words(self) -> None:
        net = net_of(DATA + full("a", "data", "a", more="blob_share: 3"))
        assert net.unread() == [("a.blob_share", 2)]


class TestLoss:
    TEXT = DATA + LABEL + full("a", "data", "a")

    def test_weights(self) -> None:
        text = self.TEXT + layer("SoftmaxWithLoss", "a label", "one", "loss_weight: 0.5", "l1")
        text += layer("SoftmaxWithLoss", "a label", name="two")
        text += layer("Reduction", "a", "sum", "loss_weight: 2")
        net = net_of(text)
        assert net.losses == {"one": 0.5, "two": 1.0, "sum": 2.0}
        outputs = net(samples(), torch.tensor([0, 1, 2, 1]))
        expected = 1.5 * outputs["one"] + 2 * outputs["sum"]
        torch.testing.assert_close(net.loss(outputs), expected)

    def test_there_may_be_none(self) -> None:
        net = net_of(self.TEXT)
        with pytest.raises(CaffeError, match="no loss among the outputs"):
            net.loss(net(samples()))


class TestSharedWeights:
    def test_have_one_parameter_and_both_gradients(self) -> None:
        more = 'param { name: "w" lr_mult: 3 } param { name: "b" }'
        net = net_of(DATA + full("a", "data", "a", more=more) + full("c", "a", "c", more=more))
        assert [*dict(net.named_parameters())] == ["a.weight", "a.bias"]
        weight = net.get_parameter("a.weight")
        assert net.layers["c"].weight is weight
        y = net(samples())["c"]
        expected = samples() @ weight.t() @ weight.t()
        torch.testing.assert_close(y, expected)
        assert net.multipliers == {"a.weight": (3, 1), "a.bias": (1, 1)}

    def test_must_have_one_shape(self) -> None:
        more = 'param { name: "w" }'
        text = DATA + full("a", "data", "a", 4, more) + full("c", "a", "c", 4, more)
        with pytest.raises(
            CaffeError, match=r"shares 'w' with 'a', whose shape is 4 x 3; .* 4 x 4"
        ):
            net_of(text)

    def test_must_not_have_two_rates(self) -> None:
        text = DATA + full("a", "data", "a", more='param { name: "w" lr_mult: 3 }')
        text += full("c", "a", "c", more='param { name: "w" lr_mult: 2 }')
        with pytest.raises(CaffeError, match="says lr_mult: 2; another layer says 3"):
            net_of(text)


def test_multipliers() -> None:
    more = "param { lr_mult: 0 } param { lr_mult: 2 decay_mult: 0 }"
    text = DATA + full("a", "data", "a", more=more) + full("b", "a", "b")
    text += layer("BatchNorm", "b", "b", "param { lr_mult: 0 }")
    kept = {"b.weight": (1, 1), "b.bias": (1, 1)}
    assert net_of(text).multipliers == {"a.weight": (0, 1), "a.bias": (2, 0), **kept}


def test_the_mode_is_the_phases() -> None:
    text = DATA + layer("Dropout", "data", "d")
    assert net_of(text, "TRAIN").layers["dropout"].training
    assert not net_of(text, "TEST").layers["dropout"].training


class TestLoad:
    TEXT = DATA + full("a", "data", "a") + full("b/c", "a", "b") + layer("BatchNorm", "b", "b")

    def blobs(self) -> dict[str, list[Tensor]]:
        return {
            "a": [torch.full((1, 1, 3, 3), 2.0), torch.full((1, 1, 1, 3), 3.0)],
            "batchnorm": [torch.ones(3), torch.ones(3) * 2, torch.ones(1)],
            "other": [torch.ones(1)],
        }

    def test_by_name(self) -> None:
        net = net_of(self.TEXT)
        loaded = net.load(self.blobs())
        assert loaded.filled == ["a", "batchnorm"]
        assert loaded.tensors == [
            *("a.weight", "a.bias", "batchnorm.mean", "batchnorm.variance", "batchnorm.factor")
        ]
        assert (loaded.fresh, loaded.unused) == (["b/c"], ["other"])
        assert (net.get_parameter("a.weight") == 2).all()
        assert (net.get_buffer("batchnorm.variance") == 2).all()

    @pytest.mark.parametrize(("blobs", "said"), [([(3, 4), (3,)], "3 x 4, 3"), ([(3, 3)], "3 x 3")])
    def test_other_shapes_are_refused(self, blobs: list[tuple[int, ...]], said: str) -> None:
        with pytest.raises(CaffeError, match=f"blobs of {said}; the layer has 3 x 3, 3"):
            net_of(self.TEXT).load({"a": [torch.ones(shape) for shape in blobs]})

    def test_from_a_file(self, tmp_path: Path) -> None:
        file, blobs = tmp_path / "x.caffemodel", [torch.ones(3, 3).numpy(), torch.ones(3).numpy()]
        caffemodel.write(file, [caffemodel.TrainedLayer("b/c", "InnerProduct", blobs)])
        assert (Net(parse(self.TEXT), file).get_parameter("b_c.weight") == 1).all()
        assert net_of(self.TEXT).get_parameter("b_c.weight").std() > 0


LINE = inputs(x=(2, 100_000))
MAPS = inputs(x=(1, 3, 4, 4))
CONVOLVED = "convolution_param { num_output: 4 kernel_size: %d %s }"
HUGE = {
    "an input": inputs(x=(200_000, 200_000)),
    "a batch": inputs(x=(2**62, 2**62)),
    "a weight": LINE + layer("InnerProduct", "x", "y", "inner_product_param { num_output: 90000 }"),
    "beyond 64 bits": MAPS + layer("Convolution", "x", "y", CONVOLVED % (2**40, "")),
    "a filler": MAPS
    + layer("Convolution", "x", "y", CONVOLVED % (2**40, 'weight_filler { type: "bilinear" }')),
    "a top": LINE + layer("Tile", "x", "y", "tile_param { tiles: 20000 }"),
    "a blob without bottoms": layer(
        "Parameter", "", "y", "parameter_param { shape { dim: 4000000000 dim: 8 } }"
    ),
    "ones": layer(
        *("ContinuationIndicator", "", "y"),
        "continuation_indicator_param { time_step: 100000 batch_size: 100000 }",
    ),
    "steps": inputs(x=(1_000_000, 1, 2), cont=(1_000_000, 1))
    + layer("LSTM", "x cont", "y", "recurrent_param { num_output: 2 }"),
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


def test_a_net_without_layers_is_told() -> None:
    with pytest.raises(CaffeError, match="no layer in TEST"):
        Net(parse('name: "nothing"'))


def test_an_input_of_no_shape_that_nobody_takes_is_told() -> None:
    net = 'layer { name: "d" type: "Data" top: "x" data_param { source: "s" } }'
    with pytest.raises(CaffeError, match="does not say the shape"):
        TrainedNet(parse(net))
