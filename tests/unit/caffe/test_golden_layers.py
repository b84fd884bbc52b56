"""Every layer, forward and backward, against what a real Caffe made of the same numbers."""

import os
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from firecaffe.caffe import text
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.net import Net
from firecaffe.caffe.parameters import blobs_of
from tests.golden.caffe import layers, losses, nets
from tests.golden.caffe.cases import Case
from tests.golden.caffe.record import FOLDER, Record

FAMILIES = {**layers.FAMILIES, **losses.FAMILIES, **nets.FAMILIES}
TOLERANCE = 1e-4
CANCELED = 1e-5
"""What may be left where Caffe's sums come to nothing."""
CAFFE = "FIRECAFFE_CAFFE_PYTHON"

each_case = pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, id=f"{family}-{case.name}")
        for family, cases in FAMILIES.items()
        for case in cases
    ],
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@each_case
def test_blobs_and_gradients_are_those_of_caffe(family: str, case: Case) -> None:
    record = Record(family, case.name)
    net = filled(case, record)
    blobs = record.kind("blob")
    values = [torch.tensor(blobs[name]) for name in net.inputs]
    for value in values:
        value.requires_grad_(case.passes == "force")
    outputs = net(*values)
    for name, expected in blobs.items():
        close(net.blobs[name], expected, f"blob {name}")
    weights = record.kind("weight")
    for name, weight in weights.items():
        assert net.losses[name] == pytest.approx(float(weight)), name
    if case.passes == "forward":
        return

    written = Counter(top for call in net._calls for top in call.step.tops)
    kept = {name: net.blobs[name] for name in blobs if written[name] < 2}
    for blob in kept.values():
        if blob.requires_grad:
            blob.retain_grad()
    heads = record.kind("head")
    torch.autograd.backward(total(net, outputs, heads))
    for name, expected in record.kind("diff").items():
        is_given = name in heads or (case.passes == "backward" and name in net.inputs)
        if name in kept and not is_given:
            close(gradient(kept[name]), expected, f"diff {name}")
    for name, tensor in parameters(net).items():
        if name in record.kind("grad"):
            expected = record.kind("grad")[name]
            close(gradient(tensor).reshape(expected.shape), expected, f"grad {name}")


@pytest.mark.parametrize("name", ["batch", "batch_words", "batch_own_in_test"])
def test_batch_norm_stores_decaying_sums_of_means_and_variances(name: str) -> None:
    """The Caffe of the records does not. Source: BVLC/caffe, batch_norm_layer.cpp."""
    (case,) = (each for each in layers.NORM if each.name == name)
    x = Record("norm", name).kind("blob")["x"]
    fraction = 0.9 if name == "batch_words" else 0.999
    net = Net(text.parse(case.net), phase=case.phase)
    channels = x.shape[1]
    before = [torch.rand(channels), torch.rand(channels), torch.tensor([2.5])]
    net.load({"layer": before})
    net(torch.tensor(x))
    rows = np.moveaxis(x, 1, 0).reshape(channels, -1).astype(np.float64)
    added = [rows.mean(1), rows.var(1, ddof=1), np.ones(1)]
    for place, tensor in enumerate(parameters(net).values()):
        close(tensor, fraction * before[place].numpy() + added[place], f"blob {place}")


@pytest.mark.slow
def test_records_are_what_a_real_caffe_makes_today(tmp_path: Path) -> None:
    if CAFFE not in os.environ:
        pytest.skip(f"{CAFFE} names no Python that has a real Caffe (tests/golden/caffe/make.py)")
    command = [os.environ[CAFFE], str(FOLDER / "make.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    for family in (*FAMILIES, "solvers"):
        name = f"{family}.npz"
        with np.load(FOLDER / name) as kept, np.load(tmp_path / name) as made:
            assert kept.files == made.files
            for array in kept.files:
                np.testing.assert_allclose(made[array], kept[array], 1e-4, 1e-6, err_msg=array)


def filled(case: Case, record: Record) -> Net:
    """The net with the record's parameters."""
    net = Net(text.parse(case.net), phase=case.phase, stages=case.stages)
    held: dict[str, list[Tensor]] = {}
    for name, values in record.kind("param").items():
        held.setdefault(name.rpartition("/")[0], []).append(torch.tensor(values))
    loaded = net.load(held)
    assert not loaded.unused
    assert net.unread() == []
    return net


def parameters(net: Net) -> dict[str, Tensor]:
    """The blobs of the layers, by layer and place."""
    found = {}
    for call in net._calls:
        module = net.layers[call.step.name]
        for place, tensor in enumerate(blobs_of(LAYERS[call.step.type], module).values()):
            found[f"{call.step.name}/{place}"] = tensor
    return found


def total(net: Net, outputs: dict[str, Tensor], heads: dict[str, np.ndarray]) -> Tensor:
    """What the record's gradients are the gradients of."""
    parts = [
        (outputs[name] * torch.tensor(head)).sum()
        for name, head in heads.items()
        if outputs[name].requires_grad
    ]
    parts += [
        outputs[name].sum() * weight for name, weight in net.losses.items() if name not in heads
    ]
    return torch.stack([torch.zeros((), requires_grad=True), *parts]).sum()


def gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def close(found: Tensor, expected: np.ndarray, what: str) -> None:
    assert tuple(found.shape) == expected.shape, what
    ours, theirs = found.detach().double().numpy(), expected.astype(np.float64)
    difference, size = np.linalg.norm(ours - theirs), np.linalg.norm(theirs)
    assert difference <= TOLERANCE * size + CANCELED, f"{what}: {difference / (size or 1):.2g}"
