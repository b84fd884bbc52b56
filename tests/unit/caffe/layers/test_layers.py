"""Layers where the records of a real Caffe say nothing: other forms, starts, training."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firecaffe.caffe.graph import SOURCES, shapes_of
from firecaffe.caffe.layers import LAYERS, elementwise
from firecaffe.caffe.layers.batch_norm import BatchNorm
from firecaffe.caffe.layers.spec import Shape
from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.caffe.net import Net
from firecaffe.caffe.text import parse
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.models.layer_costs import profile_on
from tests.unit.caffe.layers.made import (
    layer,
    layer_of,
    module_of,
    net_of,
    on_meta,
    own,
    random,
    refusal,
    run,
)
from tools.caffe_goldens.cases import inputs
from tools.caffe_goldens.cases import layer as layer_between
from tools.caffe_goldens.layers import FAMILIES

SHAPE = (2, 3, 4, 5)
FILLED = 'weight_filler { type: "xavier" }'
ONES = 'weight_filler { type: "constant" value: 3 } bias_filler { type: "constant" value: 2 }'

# type, words, formula
FORMULAS: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    ("Clip", "clip_param { min: -0.5 max: 1 }", lambda x: x.minimum(x.new_ones(())).clamp(-0.5)),
    ("ReLU6", "", lambda x: x.clamp(0, 6)),
]


@pytest.mark.parametrize(("kind", "words", "formula"), FORMULAS)
def test_formula(kind: str, words: str, formula: Callable[[Tensor], Tensor]) -> None:
    x = (random(*SHAPE) * 3).requires_grad_()
    same_with_gradients(layer_of(kind, words, SHAPE)(x), formula(x), x)


def same_with_gradients(ours: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(ours, expected)
    gradients = [torch.autograd.grad(each.square().sum(), inputs) for each in (ours, expected)]
    torch.testing.assert_close(*gradients)


def test_every_function_of_one_element_has_an_oracle() -> None:
    recorded = " ".join(case.net for cases in FAMILIES.values() for case in cases)
    others = [kind for kind in elementwise.LAYERS if f'"{kind}"' not in recorded]
    assert {*others} <= {kind for kind, _, _ in FORMULAS} | {"Axpy"}


@pytest.mark.parametrize(
    ("kind", "words", "known", "starts"),
    [
        ("Convolution", "num_output: 2 kernel_size: 1", nn.Conv2d, [0, 0]),
        ("Deconvolution", "num_output: 2 kernel_size: 1", nn.ConvTranspose2d, [0, 0]),
        ("Convolution", f"num_output: 2 kernel_size: 1 {ONES}", nn.Conv2d, [3, 2]),
        ("InnerProduct", f"num_output: 2 {ONES}", nn.Linear, [3, 2]),
        ("Dropout", "", nn.Dropout, []),
        ("PReLU", "", nn.Module, [0.25]),
        ("PReLU", 'filler { type: "constant" value: 0.5 }', nn.Module, [0.5]),
        ("Scale", "bias_term: true", nn.Module, [1, 0]),
        ("Bias", "", nn.Module, [0]),
    ],
)
def test_weights_start_as_their_fillers_say_in_layers_that_other_code_knows(
    kind: str, words: str, known: type[nn.Module], starts: list[float]
) -> None:
    module = layer_of(kind, own(kind, words), SHAPE)
    assert type(module) is known or known is nn.Module
    blobs = dict(module.named_parameters())
    names = ["bias"] if kind == "Bias" else ["weight", "bias"]
    assert list(blobs) == names[: len(starts)]
    for blob, start in zip(blobs.values(), starts, strict=True):
        assert (blob == start).all()


NEEDED = {
    **dict.fromkeys(("Convolution", "Deconvolution"), "num_output: 2 kernel_size: 1"),
    **dict.fromkeys(("DepthwiseConvolution", "Pooling"), "kernel_size: 1"),
    "InnerProduct": "num_output: 2",
    "BN": "frozen: true",
    "SPP": "pyramid_height: 1",
}


def test_the_choice_between_caffe_and_cudnn_is_read_and_has_no_effect() -> None:
    others = "BatchNorm LRN ReLU ReLU6 Sigmoid Softmax Swish TanH".split()
    for kind in (*NEEDED, *others):
        layer_of(kind, own(kind, f"engine: CUDNN {NEEDED.get(kind, '')}"), SHAPE)


def test_the_table_can_be_pickled_since_nets_hold_its_rows() -> None:
    assert pickle.loads(pickle.dumps(LAYERS)).keys() == LAYERS.keys()


def test_several_bottoms_share_the_filters_of_a_deconvolution() -> None:
    words = f"convolution_param {{ num_output: 3 kernel_size: 3 {FILLED} }}"
    net = net_of(layer("Deconvolution", words, tops=2), SHAPE, SHAPE)
    first, second = random(*SHAPE), random(*SHAPE) + 1
    for found, value in zip(net(first, second).values(), (first, second), strict=True):
        expected = nn.functional.conv_transpose2d(value, net.get_parameter("it.weight"))
        torch.testing.assert_close(found, expected)
    assert [*dict(net.named_parameters())] == ["it.weight", "it.bias"]


def test_a_transposed_product_from_another_axis() -> None:
    words = "num_output: 7 axis: 2 transpose: true bias_term: false " + FILLED
    module: Any = layer_of("InnerProduct", f"inner_product_param {{ {words} }}", SHAPE)
    assert module.weight.shape == (20, 7)
    x = random(*SHAPE)
    torch.testing.assert_close(module(x), x.flatten(2) @ module.weight)


def test_reshape_takes_any_batch_if_the_file_means_its_own() -> None:
    words = "reshape_param { shape { dim: 2 dim: 9 dim: 8 } }"
    assert layer_of("Reshape", words, (2, 6, 3, 4))(random(5, 6, 3, 4)).shape == (5, 9, 8)


@pytest.mark.parametrize(("scaled", "high", "mean"), [("true", 4, 1), ("false", 1, 0.25)])
def test_dropout_in_training(scaled: str, high: float, mean: float) -> None:
    torch.manual_seed(0)
    words = f"dropout_param {{ dropout_ratio: 0.75 scale_train: {scaled} }}"
    module = layer_of("Dropout", words, (1000, 100))
    found = module.train()(torch.ones(1000, 100))
    assert found.unique().tolist() == [0, high]
    assert found.mean().item() == pytest.approx(mean, rel=0.05)
    assert (module.eval()(torch.ones(2, 2)) == mean).all()


def test_of_equal_ones_the_second_has_the_gradient() -> None:
    values = [torch.ones(1, 2).requires_grad_() for _ in range(3)]
    net = net_of(layer("Eltwise", "eltwise_param { operation: MAX }"), *[(1, 2)] * 3)
    gradients = torch.autograd.grad(net(*values)["y0"].sum(), values)
    assert [each.tolist() for each in gradients] == [[[0, 0]], [[1, 1]], [[0, 0]]]


@pytest.mark.parametrize("operation", ["PROD", "SUM", "MAX"])
def test_eltwise_in_place_is_as_with_a_top_of_its_own(operation: str) -> None:
    """In a real Caffe it is not: of PROD the gradients, of SUM and MAX the values are wrong."""
    found = []
    for top in ("a", "c"):
        words = f"eltwise_param {{ operation: {operation} }}"
        parts = layer_between("Power", "x", "a") + layer_between("Power", "z", "b")
        parts += layer_between("Eltwise", "a b", top, words)
        torch.manual_seed(3)
        values = [torch.randn(2, 4).requires_grad_() for _ in range(2)]
        y = Net(parse(inputs(x=(2, 4), z=(2, 4)) + parts))(*values)[top]
        found.append([y, *torch.autograd.grad(y.square().sum(), values)])
    assert all(map(torch.equal, *found))


def test_split_adds_the_gradients() -> None:
    x = random(2, 3).requires_grad_()
    first, second = net_of(layer("Split", tops=2), (2, 3))(x).values()
    (gradient,) = torch.autograd.grad((first + 2 * second).sum(), x)
    assert (gradient == 3).all()


def batch_norm(shape: tuple[int, ...]) -> BatchNorm:
    module = layer_of("BatchNorm", "", shape)
    assert isinstance(module, BatchNorm)
    return module.train()


def test_batch_norm_of_lines_and_of_one_value() -> None:
    assert batch_norm((6,))(random(6)).shape == (6,)
    alone, x = batch_norm((1, 5)), random(1, 5)
    assert not alone(x).any()
    torch.testing.assert_close(alone.mean, x[0])


def test_a_step_adds_the_mean_of_its_micro_batches() -> None:
    """So that it does not matter who has computed which."""
    x = random(8, *SHAPE[1:])
    module = batch_norm(SHAPE)
    module(random(*SHAPE))
    start = module.mean.clone()
    network = nn.Sequential(module)
    changes = BufferChanges(network)
    changes.begin_step()
    totals = changes.zero_changes()
    for number, part in enumerate(torch.split(x, 2)):
        changes.begin_micro_batch()
        network(part)
        totals = [a + b for a, b in zip(totals, changes.take(number, 2.0), strict=True)]
    changes.finish_step(totals, 8.0)
    torch.testing.assert_close(module.mean, 0.999 * start + x.mean((0, 2, 3)))
    torch.testing.assert_close(module.factor, torch.tensor([1.999]))


@pytest.mark.parametrize("channels", [1, 4, 9])
def test_local_response_norm_is_torchs_with_its_gradient(channels: int) -> None:
    x = (random(2, channels, 3, 5) * 10).requires_grad_()
    same_with_gradients(LocalResponseNorm()(x), nn.LocalResponseNorm(5)(x), x)


WORDS = 'num_output: 3 weight_filler { type: "constant" value: 0.5 } bias_filler { value: 0.25 }'
PLAIN = f"recurrent_param {{ {WORDS} }}"
EXPOSED = f"recurrent_param {{ {WORDS} expose_hidden: true }}"
STATES = {"LSTM": 2, "RNN": 1}

each_kind = pytest.mark.parametrize("kind", STATES)


@each_kind
def test_recurrent_blobs_are_filled_and_stand_in_the_order_of_caffe(kind: str) -> None:
    module = module_of(layer(kind, PLAIN), (4, 2, 5), (4, 2), (2, 6))
    found = dict(module.named_parameters())
    assert tuple(found) == LAYERS[kind].blobs
    rows = {"LSTM": 12, "RNN": 3}[kind]
    shapes = [(rows, 5), (rows,), (rows, 6), (rows, 3), (3, 3), (3,)]
    assert [tuple(each.shape) for each in found.values()] == shapes[: len(found)]
    for name, each in found.items():
        assert (each == (0.25 if name.endswith("bias") else 0.5)).all(), name


@each_kind
def test_exposed_states_go_on_and_nothing_goes_back_through_them(kind: str) -> None:
    """Each batch starts from a state of 0 else, whatever `cont` says of its first step."""
    count = STATES[kind]
    shapes = [(4, 2, 5), (4, 2), *[(1, 2, 3)] * count]
    text = layer(kind, EXPOSED, tops=1 + count)
    values, cont = torch.randn(4, 2, 5), torch.ones(4, 2)
    states = [torch.zeros(1, 2, 3, requires_grad=True) for _ in range(count)]
    whole = run(module_of(text, *shapes), values, cont, *states)
    plain = module_of(layer(kind, PLAIN), *shapes[:2])
    for _ in range(2):
        torch.testing.assert_close(plain(values, cont), whole[0])
    half = module_of(text, (2, 2, 5), (2, 2), *shapes[2:])
    first = run(half, values[:2], cont[:2], *states)
    second = run(half, values[2:], cont[2:], *first[1:])
    torch.testing.assert_close(torch.cat([first[0], second[0]]), whole[0])
    for one, other in zip(second[1:], whole[1:], strict=True):
        torch.testing.assert_close(one, other)
        assert not one.requires_grad
    torch.autograd.backward(whole[0].sum())
    assert all(state.grad is None for state in states)
    assert on_meta(text, *shapes) == [(4, 2, 3), *[(1, 2, 3)] * count]


@each_kind
def test_what_no_recurrent_layer_takes_is_one_line(kind: str) -> None:
    values, cont, count = (4, 2, 5), (4, 2), STATES[kind]
    too_wide = [(1, 2, 3)] * (count - 1) + [(1, 2, 4)]
    for words, tops, shapes, part in (
        (PLAIN, 1, [values], "1 bottoms"),
        (PLAIN, 2, [values, cont], "2 tops"),
        (PLAIN, 1, [values, (4, 3)], "(steps, streams)"),
        (PLAIN, 1, [values, cont, (3, 6)], "3 streams"),
        (EXPOSED, 1 + count, [values, cont, *too_wide], "starts from"),
        (EXPOSED, 1 + count, [values, cont], "2 bottoms"),
        ("recurrent_param { }", 1, [values, cont], "no num_output"),
    ):
        line = refusal(layer(kind, words, tops), *shapes)
        assert part in line, line


MAPS, BY_4 = (2, 4, 6, 8), "data_param { batch_size: 4 }"
EXPORTED: dict[str, tuple[str, list[Shape]]] = {
    "ArgMax": ("argmax_param { axis: 1 }", [MAPS]),
    "Axpy": ("", [(2, 4, 1, 1), MAPS, MAPS]),
    "BN": ("bn_param { scale_filler { value: 2 } }", [MAPS]),
    "BatchReindex": ("", [MAPS, (3,)]),
    "Crop": ("crop_param { offset: 1 }", [MAPS, (2, 4, 3, 3)]),
    "Interp": ("interp_param { zoom_factor: 2 pad_beg: -1 }", [MAPS]),
    "LSTM": ("recurrent_param { num_output: 3 }", [(4, 2, 5), (4, 2)]),
    "MVN": ("", [MAPS]),
    "Normalize": ("norm_param { across_spatial: false channel_shared: false }", [MAPS]),
    "PSROIPooling": ("psroi_pooling_param { output_dim: 1 group_size: 2 }", [MAPS, (3, 5)]),
    "Permute": ("permute_param { order: 0 order: 2 order: 3 order: 1 }", [MAPS]),
    "PriorBox": ("prior_box_param { min_size: 5 aspect_ratio: 2 }", [MAPS, (2, 3, 60, 80)]),
    "Reduction": ("reduction_param { operation: ASUM axis: 1 }", [MAPS]),
    "Reverse": ("reverse_param { axis: 1 }", [MAPS]),
    "SPP": ("spp_param { pyramid_height: 2 }", [MAPS]),
    "ShuffleChannel": ("shuffle_channel_param { group: 2 }", [MAPS]),
    "Tile": ("tile_param { axis: 2 tiles: 2 }", [MAPS]),
    "Upsample": ("upsample_param { scale: 2 }", [MAPS]),
}


class Together(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            layer_of(kind, words, *bottoms) for kind, (words, bottoms) in EXPORTED.items()
        )

    def forward(self, bottoms: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [each(*values) for each, values in zip(self.layers, bottoms, strict=True)]


def test_layers_whose_shapes_do_not_depend_on_numbers_are_exported_in_one_graph() -> None:
    together = Together().eval()
    bottoms, others = (
        [tuple(map(torch.rand, shapes)) for _, shapes in EXPORTED.values()] for _ in range(2)
    )
    exported = torch.export.export(together, (bottoms,)).module()
    for kind, ours, expected in zip(EXPORTED, exported(others), together(others), strict=True):
        assert torch.equal(ours, expected), kind


IMAGE, MEMORY = "image_data_param", "memory_data_param"
RESIZED = "transform_param { resize_param { height: 3 width: 4 } }"
CROPPED = "transform_param { crop_size: 7 }"
SIZES = "batch_size: 2 channels: 3 height: 4 width: 5"

# type, words, shapes of two tops
DATA: list[tuple[str, str, list[Shape | None]]] = [
    ("Data", f"{BY_4} {CROPPED}", [(4, 3, 7, 7), (4,)]),
    ("Data", BY_4, [None, (4,)]),
    ("Data", "transform_param { crop_size: 7 force_gray: true }", [(1, 1, 7, 7), (1,)]),
    ("ImageData", f"{IMAGE} {{ batch_size: 2 }} {CROPPED}", [(2, 3, 7, 7), (2,)]),
    ("ImageData", f"{IMAGE} {{ new_height: 5 new_width: 6 is_color: 0 }}", [(1, 1, 5, 6), (1,)]),
    ("WindowData", "window_data_param { batch_size: 2 crop_size: 9 }", [(2, 3, 9, 9), (2,)]),
    ("AnnotatedData", f"{RESIZED} {BY_4}", [(4, 3, 3, 4), (1, 1, 1, 8)]),
    ("MemoryData", f"{MEMORY} {{ {SIZES} }}", [(2, 3, 4, 5), (2,)]),
    ("HDF5Data", "hdf5_data_param { batch_size: 2 }", [None, None]),
    ("Input", "input_param { shape { dim: 2 dim: 3 } }", [(2, 3), (2, 3)]),
    ("Input", "input_param { shape { dim: 2 } shape { } }", [(2,), ()]),
    ("Input", "", [None, None]),
    ("DummyData", "dummy_data_param { shape { dim: 2 } shape { dim: 4 } }", [(2,), (4,)]),
    ("DummyData", "dummy_data_param { num: 2 channels: 3 height: 4 width: 5 }", [SHAPE] * 2),
    ("NobodyKnows", "", [None, None]),
]


@pytest.mark.parametrize(("kind", "words", "expected"), DATA)
def test_shapes_of_data(kind: str, words: str, expected: list[Shape | None]) -> None:
    assert {*SOURCES} < {kind for kind, _, _ in DATA}
    assert shapes_of(parse(f'type: "{kind}" top: "a" top: "b" {words}')) == expected
    assert shapes_of(parse(f'type: "{kind}" top: "a" {words}')) == expected[:1]


def test_a_layer_without_weights_is_called_by_its_function() -> None:
    """In torch's picture of a net, and in a profile."""
    net = net_of(layer("Tile", "tile_param { tiles: 2 }"), (2, 3))
    assert "tile(dims=[1, 2])" in str(net)
    (row,) = profile_on(net, torch.zeros(2, 3, device="meta")).layers
    assert (row.kind, row.output_shape) == ("tile", (2, 6))
