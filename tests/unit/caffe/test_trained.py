"""What a recipe trains out of a net: what needs no labels, in two phases over the same weights."""

from itertools import pairwise

import pytest
import torch
from torch.utils._pytree import tree_map

from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.text import parse
from firecaffe.caffe.trained import Heads, TrainedNet
from firecaffe.parallel.stages import cut_stages
from tools.caffe_goldens.cases import inputs, layer

DATA = "".join(
    f'layer {{ name: "data" type: "Data" top: "data" top: "label" include {{ phase: {phase} }} '
    f"transform_param {{ crop_size: 6 }} data_param {{ batch_size: {batch} }} }}\n"
    for phase, batch in (("TRAIN", 4), ("TEST", 2))
)
LOSS = layer("SoftmaxWithLoss", "b label", "loss")
IN_TRAIN, IN_TEST = (f"include {{ phase: {phase} }}" for phase in ("TRAIN", "TEST"))
ACCURACY = layer("Accuracy", "b label", "acc", IN_TEST)


def full(name: str, bottom: str, outputs: int = 5, more: str = "") -> str:
    words = f'inner_product_param {{ num_output: {outputs} weight_filler {{ type: "xavier" }} }}'
    return layer("InnerProduct", bottom, name, f"{more} {words}")


BODY = full("a", "data") + full("b", "a")


def made(text: str, input_CHW: tuple[int, ...] | None = None) -> TrainedNet:
    return TrainedNet(parse(text, "net.prototxt"), input_CHW)


def images(count: int = 3, size: int = 6) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_one_blob_is_a_tensor_and_what_nobody_judges_is_not_there() -> None:
    more = full("d", "b") + layer("Softmax", "b", "p")
    net, x = made(DATA + BODY + more + LOSS + ACCURACY), images()
    assert [name for name, _ in net.named_children()] == ["a", "b"]
    expected = net.get_submodule("b")(net.get_submodule("a")(x.flatten(1)))
    torch.testing.assert_close(net.train()(x), expected)
    torch.testing.assert_close(net.eval()(x), expected)


def test_several_blobs_are_heads() -> None:
    auxiliary = full("c", "a", more=IN_TRAIN)
    auxiliary += layer("SoftmaxWithLoss", "c label", "aux", f"loss_weight: 0.3 {IN_TRAIN}")
    net = made(DATA + BODY + auxiliary + LOSS + ACCURACY)
    train, test = net.train()(images()), net.eval()(images())
    assert isinstance(train, Heads)
    assert isinstance(test, Heads)
    assert ([*train.blobs], train.phase) == (["c", "b"], "TRAIN")
    assert ([*test.blobs], test.phase) == (["b"], "TEST")
    assert train.logits is train.blobs["b"]
    doubled = tree_map(lambda tensor: tensor * 2, train)
    assert (doubled.phase, doubled.main) == ("TRAIN", "b")
    torch.testing.assert_close(doubled.logits, train.logits * 2)


def test_the_input_may_be_judged_too() -> None:
    flat = layer("Flatten", "data", "flat") + layer("EuclideanLoss", "a flat", "loss")
    heads = made(DATA + full("a", "data", 108) + flat)(images())
    assert isinstance(heads, Heads)
    assert torch.equal(heads.blobs["flat"], images().flatten(1))
    assert heads.main == "a"


def test_a_layer_that_stands_there_for_each_phase_has_one_set_of_weights() -> None:
    norms = "".join(
        layer(
            "BatchNorm", "a", "a", f"{phase} batch_norm_param {{ use_global_stats: {uses} }}", "n"
        )
        for phase, uses in ((IN_TRAIN, "false"), (IN_TEST, "true"))
    )
    net, x = made(DATA + full("a", "data") + norms + full("b", "a") + LOSS), images()
    assert [name for name, _ in net.named_buffers()] == ["n.mean", "n.variance", "n.factor"]
    factor = net.get_buffer("n.factor")
    for training in (True, False):
        net.train(training)(x)
        assert factor == 1
    a, b = net.get_submodule("a"), net.get_submodule("b")
    mean, variance = net.get_buffer("n.mean"), net.get_buffer("n.variance")
    expected = b((a(x.flatten(1)) - mean) / (variance + 1e-5).sqrt())
    torch.testing.assert_close(net(x), expected)


def test_shape_of_a_sample() -> None:
    text = DATA.replace("crop_size: 6", "") + BODY + LOSS
    with pytest.raises(CaffeError, match=r"net.prototxt:1: Data does not say the shape of 'data'"):
        made(text)
    assert made(text, (1, 4, 4)).get_parameter("a.weight").shape == (5, 16)


def test_a_net_without_losses_gives_what_comes_out() -> None:
    logits = made(inputs(data=(1, 4)) + BODY)(torch.randn(3, 4))
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (3, 5)


WRITES_OVER = LOSS + layer("ReLU", "b", "b", name="r") + full("c", "b")
TWO_WIDTHS = full("c", "b", 5, IN_TRAIN) + full("c", "b", 6, IN_TEST)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (BODY, "'a' takes 'data', which no layer"),
        (
            DATA + BODY + WRITES_OVER + layer("SoftmaxWithLoss", "c label", "l2"),
            "'r' writes over 'b', which 'loss' has taken before",
        ),
        (
            DATA + BODY + TWO_WIDTHS + layer("SoftmaxWithLoss", "c label", "loss"),
            "'c' has other weights in TEST than in TRAIN",
        ),
        ("", "no layer reads samples in TRAIN"),
    ],
)
def test_refused(text: str, part: str) -> None:
    with pytest.raises(CaffeError, match=part):
        made(text)


def test_it_is_exported_for_any_batch() -> None:
    net = made(DATA + BODY + LOSS).eval()
    batch = torch.export.Dim("batch")
    exported = torch.export.export(net, (images(),), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(exported.module()(images(5)), net(images(5)))


@pytest.mark.parametrize("name", ["ip", ""])
def test_layers_of_one_name_have_weights_of_their_own(name: str) -> None:
    """The n-th of TRAIN is the n-th of TEST, if the file has them once or once per phase."""
    body = "".join(full(top, bottom) for bottom, top in pairwise(("data", *"acdb")))
    for top in ("c", "d"):
        body = body.replace(f'name: "{top}"', f'name: "{name}"')
    phases = [body.replace("type:", f"{phase} type:") for phase in (IN_TRAIN, IN_TEST)]
    for net in (made(DATA + body + LOSS), made(DATA + "".join(phases) + LOSS)):
        assert len(list(net.parameters())) == 8
        torch.testing.assert_close(net.train()(images()), net.eval()(images()))


def test_a_layer_of_several_tops_is_followed_for_stages() -> None:
    sliced = layer("Slice", "a", "s1 s2", "slice_param { axis: 1 slice_point: 2 }", "cut")
    joined = layer("Concat", "s2 s1", "j") + full("b", "j")
    net, x = made(DATA + full("a", "data") + sliced + joined + LOSS).train(), images()
    first, last = cut_stages(net, ["b"])
    torch.testing.assert_close(last.module(*first.module(x)), net(x), rtol=0, atol=0)
