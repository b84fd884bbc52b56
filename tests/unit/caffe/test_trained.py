"""What a recipe trains out of a net: what needs no labels, in two phases over the same weights."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.trained import Heads, TrainedNet

DATA = """layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { crop_size: 6 } data_param { batch_size: 4 } }
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TEST }
  transform_param { crop_size: 6 } data_param { batch_size: 2 } }
"""
LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "b" bottom: "label" top: "loss" }\n'
ACCURACY = (
    'layer { name: "acc" type: "Accuracy" bottom: "b" bottom: "label" top: "acc" '
    "include { phase: TEST } }\n"
)


def full(name: str, bottom: str, outputs: int = 5, more: str = "") -> str:
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" {more} '
        f'inner_product_param {{ num_output: {outputs} weight_filler {{ type: "xavier" }} }} }}\n'
    )


BODY = full("a", "data") + full("b", "a")


def made(tmp_path: Path, text: str, input_CHW: tuple[int, ...] | None = None) -> TrainedNet:
    file = tmp_path / "net.prototxt"
    file.write_text(text)
    return TrainedNet(file, input_CHW)


def images(count: int = 3, size: int = 6) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_one_blob_is_a_tensor(tmp_path: Path) -> None:
    net = made(tmp_path, DATA + BODY + LOSS + ACCURACY)
    assert [name for name, _ in net.named_children()] == ["a", "b"]
    x = images()
    a, b = net.get_submodule("a"), net.get_submodule("b")
    expected = b(a(x.flatten(1)))
    torch.testing.assert_close(net.train()(x), expected)
    torch.testing.assert_close(net.eval()(x), expected)


def test_several_blobs_are_heads(tmp_path: Path) -> None:
    auxiliary = full("c", "a", more="include { phase: TRAIN }") + (
        'layer { name: "aux" type: "SoftmaxWithLoss" bottom: "c" bottom: "label" top: "aux" '
        "loss_weight: 0.3 include { phase: TRAIN } }\n"
    )
    net = made(tmp_path, DATA + BODY + auxiliary + LOSS + ACCURACY)
    x = images()
    train, test = net.train()(x), net.eval()(x)
    assert isinstance(train, Heads)
    assert isinstance(test, Heads)
    assert ([*train.blobs], train.phase) == (["c", "b"], "TRAIN")
    assert ([*test.blobs], test.phase) == (["b"], "TEST")
    assert train.logits is train.blobs["b"]
    doubled = tree_map(lambda each: each * 2, train)
    assert (doubled.phase, doubled.main) == ("TRAIN", "b")
    torch.testing.assert_close(doubled.logits, train.logits * 2)


def test_what_nobody_judges_is_not_there(tmp_path: Path) -> None:
    more = full("d", "b") + 'layer { name: "p" type: "Softmax" bottom: "b" top: "p" }\n'
    net = made(tmp_path, DATA + BODY + more + LOSS)
    assert [name for name, _ in net.named_children()] == ["a", "b"]


def test_the_input_may_be_judged_too(tmp_path: Path) -> None:
    text = DATA + full("a", "data", 108)
    text += 'layer { name: "flat" type: "Flatten" bottom: "data" top: "flat" }\n'
    text += 'layer { name: "loss" type: "EuclideanLoss" bottom: "a" bottom: "flat" top: "loss" }\n'
    found = made(tmp_path, text)(images())
    assert isinstance(found, Heads)
    assert torch.equal(found.blobs["flat"], images().flatten(1))
    assert found.main == "a"


def test_a_layer_that_stands_there_for_each_phase_has_one_set_of_weights(tmp_path: Path) -> None:
    norms = "".join(
        f'layer {{ name: "n" type: "BatchNorm" bottom: "a" top: "a" include {{ phase: {phase} }} '
        f"batch_norm_param {{ use_global_stats: {uses} }} }}\n"
        for phase, uses in (("TRAIN", "false"), ("TEST", "true"))
    )
    net = made(tmp_path, DATA + full("a", "data") + norms + full("b", "a") + LOSS)
    assert [name for name, _ in net.named_buffers()] == ["n.mean", "n.variance", "n.factor"]
    x = images()
    net.train()(x)
    factor = net.get_buffer("n.factor")
    assert factor == 1
    net.eval()(x)
    assert factor == 1
    a, b = net.get_submodule("a"), net.get_submodule("b")
    expected = a(x.flatten(1))
    mean, variance = (net.get_buffer(f"n.{each}") for each in ("mean", "variance"))
    torch.testing.assert_close(net(x), b((expected - mean) / (variance + 1e-5).sqrt()))


def test_shape_of_a_sample(tmp_path: Path) -> None:
    text = DATA.replace("crop_size: 6", "") + BODY + LOSS
    with pytest.raises(CaffeError, match=r"net.prototxt:1: Data does not say the shape of 'data'"):
        made(tmp_path, text)
    net = made(tmp_path, text, (1, 4, 4))
    assert isinstance(net.a, nn.Linear)
    assert net.a.in_features == 16


def test_a_net_without_losses_gives_what_comes_out(tmp_path: Path) -> None:
    text = 'layer { name: "i" type: "Input" top: "data" input_param { shape { dim: 1 dim: 4 } } }'
    found = made(tmp_path, text + BODY)(torch.randn(3, 4))
    assert isinstance(found, torch.Tensor)
    assert found.shape == (3, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BODY, "'a' takes 'data', which no layer"),
        (
            DATA + BODY + LOSS + 'layer { name: "r" type: "ReLU" bottom: "b" top: "b" }'
            + full("c", "b") + LOSS.replace("loss", "l2").replace('"b"', '"c"'),
            "'r' writes over 'b', which 'loss' has taken before",
        ),
        (
            DATA + BODY + full("c", "b", 5, "include { phase: TRAIN }")
            + full("c", "b", 6, "include { phase: TEST }") + LOSS.replace('"b"', '"c"'),
            "'c' has other weights in TEST than in TRAIN",
        ),
        ("", "no layer reads samples in TRAIN"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CaffeError, match=said):
        made(tmp_path, text)


def test_it_is_exported_for_any_batch(tmp_path: Path) -> None:
    net = made(tmp_path, DATA + BODY + LOSS).eval()
    batch = torch.export.Dim("batch")
    exported = torch.export.export(net, (images(),), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(exported.module()(images(5)), net(images(5)))
