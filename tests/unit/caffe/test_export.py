"""Nets of Caffe's as ONNX, which onnxruntime and OpenCV run, and as files for Caffe."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from firecaffe.caffe.text import parse
from firecaffe.caffe.trained import Heads, TrainedNet
from firecaffe.errors import RecipeError
from firecaffe.training.export_file import export_caffemodel, export_onnx
from tools.caffe_goldens.cases import inputs, layer

INPUT = inputs(data=(3, 4, 17, 15), label=(3,))


def conv(bottom: str, top: str, words: str, kind: str = "Convolution") -> str:
    filler = 'weight_filler { type: "msra" } bias_filler { type: "uniform" min: -1 max: 1 }'
    return layer(kind, bottom, top, f"convolution_param {{ {words} {filler} }}")


def pool(bottom: str, top: str, words: str) -> str:
    return layer("Pooling", bottom, top, f"pooling_param {{ {words} }}")


LOSS = layer("SoftmaxWithLoss", "out label", "loss")
DENSE = 'inner_product_param { num_output: 5 weight_filler { type: "xavier" } }'
OUT = layer("InnerProduct", "last", "out", DENSE)
WITHIN = "lrn_param { norm_region: WITHIN_CHANNEL local_size: 3 alpha: 0.5 }"

NETS = {
    "pooling": conv("data", "a", "num_output: 8 kernel_size: 3 pad: 1 group: 2")
    + layer("ReLU", "a", "a", "relu_param { negative_slope: 0.1 }", "relu")
    + pool("a", "b", "kernel_size: 3 stride: 2 pad: 1")
    + layer("LRN", "b", "c", "lrn_param { local_size: 5 alpha: 0.5 k: 2 }")
    + pool("c", "d", "pool: AVE kernel_size: 3 stride: 2 pad: 1")
    + layer("LRN", "d", "e", WITHIN)
    + pool("e", "last", "pool: AVE kernel_size: 2 stride: 2"),
    "normalized": conv("data", "a", "num_output: 6 kernel_size: 3 dilation: 2 bias_term: false")
    + layer("BatchNorm", "a", "a", name="norm")
    + layer("Scale", "a", "a", 'scale_param { bias_term: true filler { type: "msra" } }', "scale")
    + layer("PReLU", "a", "b", 'prelu_param { filler { type: "uniform" max: 0.5 } }')
    + conv("a", "c", "num_output: 6 kernel_size: 1")
    + layer("Eltwise", "b c", "d", "eltwise_param { coeff: 1 coeff: -0.5 }")
    + layer("Dropout", "d", "d", name="drop")
    + layer("Eltwise", "d b", "e", "eltwise_param { operation: MAX }")
    + pool("e", "last", "pool: AVE global_pooling: true"),
    "in pieces": conv("data", "a", "num_output: 6 kernel_size: 3 stride: 2 pad: 1")
    + conv("a", "up", "num_output: 4 kernel_size: 4 stride: 2 pad: 1", "Deconvolution")
    + layer("Crop", "up data", "cut", "crop_param { axis: 2 offset: 0 }")
    + layer("Concat", "data cut", "both")
    + layer("Power", "both", "p", "power_param { scale: 0.5 shift: 1 power: 2 }")
    + layer("Sigmoid", "p", "s")
    + layer("Permute", "s", "turned", "permute_param { order: 0 order: 2 order: 3 order: 1 }")
    + layer("Reshape", "turned", "last", "reshape_param { shape { dim: 0 dim: -1 dim: 20 } }"),
}


def trained(name: str) -> TrainedNet:
    """With weights and statistics that matter."""
    torch.manual_seed(0)
    network = TrainedNet(parse(INPUT + NETS[name] + OUT + LOSS, name))
    with torch.no_grad():
        for key, buffer in network.named_buffers():
            buffer.copy_(torch.rand_like(buffer) + ("factor" in key) * 3)
    return network.eval()


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def logits(network: nn.Module, samples: Tensor) -> Tensor:
    with torch.no_grad():
        found = network(samples)
    return found.logits if isinstance(found, Heads) else found


@pytest.mark.parametrize("name", NETS)
def test_onnxruntime_and_opencv_come_to_the_same(name: str, tmp_path: Path) -> None:
    network, samples = trained(name), torch.rand(3, 4, 17, 15)
    path = tmp_path / "net.onnx"
    export_onnx(network, samples, path)
    expected = logits(network, samples)
    session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
    assert far(torch.from_numpy(session.run(None, {"inputs": samples.numpy()})[0]), expected) < 1e-5
    net = pytest.importorskip("cv2").dnn.readNetFromONNX(str(path))
    for sample, own in zip(samples, expected, strict=True):
        net.setInput(sample[None].numpy())
        assert far(torch.from_numpy(net.forward()), own[None]) < 1e-5


CHECK = """
import sys, numpy as np, caffe
net = caffe.Net(sys.argv[1], sys.argv[2], caffe.TEST)
given = np.load(sys.argv[3])
net.blobs["data"].data[...] = given["samples"]
np.save(sys.argv[4], net.forward()["prob"])
"""


@pytest.mark.parametrize("name", NETS)
def test_files_for_caffe_are_read_again(name: str, tmp_path: Path) -> None:
    network = trained(name)
    path = tmp_path / "net.caffemodel"
    assert "the same bits" in export_caffemodel(network, None, path).compared
    assert sorted(each.name for each in tmp_path.iterdir()) == ["net.caffemodel", "net.prototxt"]
    text = (tmp_path / "net.prototxt").read_text()
    assert "SoftmaxWithLoss" not in text
    assert 'top: "prob"' in text


@pytest.mark.parametrize("before", [None, b"before"])
@pytest.mark.parametrize("blocked", [".caffemodel", ".prototxt"])
def test_of_two_files_none_is_there_if_one_cannot_be(
    blocked: str, before: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "net.caffemodel"
    path.with_suffix(blocked).mkdir()
    (other,) = {".caffemodel", ".prototxt"} - {blocked}
    if before:
        path.with_suffix(other).write_bytes(before)
    with pytest.raises(IsADirectoryError):
        export_caffemodel(trained("pooling"), None, path)
    there = {each.suffix: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()}
    assert there == ({other: before} if before else {})


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_a_real_caffe_comes_to_the_same(name: str, tmp_path: Path) -> None:
    python = os.environ.get("FIRECAFFE_CAFFE_PYTHON", "")
    if not python:
        pytest.skip("FIRECAFFE_CAFFE_PYTHON names no Python with a real Caffe")
    network, samples = trained(name), torch.rand(3, 4, 17, 15)
    if "Permute" in NETS[name]:
        pytest.skip("Permute is a fork's")
    export_caffemodel(network, None, tmp_path / "net.caffemodel")
    np.savez(tmp_path / "in.npz", samples=samples.numpy())
    (tmp_path / "check.py").write_text(CHECK)
    words = ["check.py", "net.prototxt", "net.caffemodel", "in.npz", "out.npy"]
    subprocess.run([python, *words], cwd=tmp_path, check=True, capture_output=True)
    found = torch.from_numpy(np.load(tmp_path / "out.npy"))
    assert far(found, logits(network, samples).softmax(1)) < 1e-5


def test_the_softmax_is_along_the_axis_of_the_loss(tmp_path: Path) -> None:
    loss = LOSS.replace('top: "loss"', 'top: "loss" softmax_param { axis: -1 }')
    network = TrainedNet(parse(INPUT + NETS["pooling"] + OUT + loss, "axis"))
    export_caffemodel(network, None, tmp_path / "net.caffemodel")
    assert "axis: -1" in (tmp_path / "net.prototxt").read_text()


def test_layers_of_one_name_do_not_go_to_caffe(tmp_path: Path) -> None:
    text = conv("data", "a", "num_output: 4 kernel_size: 1") + conv(
        "a", "last", "num_output: 4 kernel_size: 1"
    ).replace('name: "last"', 'name: "a"')
    network = TrainedNet(parse(INPUT + text + OUT + LOSS, "twice"))
    with pytest.raises(RecipeError, match="'a' too"):
        export_caffemodel(network, None, tmp_path / "net.caffemodel")
    assert not list(tmp_path.iterdir())


def test_a_network_that_was_not_imported_does_not_go_to_caffe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="imported"):
        export_caffemodel(nn.Linear(2, 2), None, tmp_path / "net.caffemodel")
    assert not list(tmp_path.iterdir())
