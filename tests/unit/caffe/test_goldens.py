"""Layers, forward and backward, and trainings, against what a real Caffe made of them."""

import os
import subprocess
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from firecaffe.caffe import text
from firecaffe.caffe.net import Net
from tools.caffe_goldens import layers
from tools.caffe_goldens.cases import Case
from tools.caffe_goldens.passes import FAMILIES, filled, parameters, passed
from tools.caffe_goldens.record import FOLDER, Record
from tools.caffe_goldens.solvers import LOOKS, TRAININGS, Training
from tools.caffe_goldens.trained import errors_of

TOLERANCE = 1e-4
CANCELED = 1e-5
"""What may be left where Caffe's sums come to nothing."""
CAFFE = "FIRECAFFE_CAFFE_PYTHON"
MAKER = Path(layers.__file__).with_name("make.py")

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
    assert net.unread() == []
    for name, weight in record.kind("weight").items():
        assert net.losses[name] == pytest.approx(float(weight)), name
    for pair in passed(net, case, record):
        close(pair.ours, pair.caffes, pair.what)


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
        pytest.skip(f"{CAFFE} names no Python that has a real Caffe (tools/caffe_goldens/make.py)")
    command = [os.environ[CAFFE], str(MAKER), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    for family in (*FAMILIES, "solvers"):
        name = f"{family}.npz"
        with np.load(FOLDER / name) as kept, np.load(tmp_path / name) as made:
            assert kept.files == made.files
            for array in kept.files:
                np.testing.assert_allclose(made[array], kept[array], 1e-4, 1e-6, err_msg=array)


def close(found: Tensor, expected: np.ndarray, what: str) -> None:
    assert tuple(found.shape) == expected.shape, what
    ours, theirs = found.detach().double().numpy(), expected.astype(np.float64)
    difference, size = np.linalg.norm(ours - theirs), np.linalg.norm(theirs)
    assert difference <= TOLERANCE * size + CANCELED, f"{what}: {difference / (size or 1):.2g}"


OF_TRAININGS = 1e-5
ALIKE = {("nesterov", "old_form")}
"""Two forms of one solver."""


@pytest.mark.parametrize("training", [pytest.param(each, id=each.name) for each in TRAININGS])
def test_weights_are_those_of_caffe(tmp_path: Path, training: Training) -> None:
    errors = errors_of(training, tmp_path)
    assert set(errors) == {*LOOKS}
    assert max(errors.values()) <= OF_TRAININGS, errors


def test_trainings_come_to_weights_of_their_own() -> None:
    """Were they alike, the test above would show less than it says."""
    for one, other in combinations([each.name for each in TRAININGS], 2):
        ours, others = (
            np.concatenate([each.ravel() for each in Record("solvers", name).kind("12").values()])
            for name in (one, other)
        )
        is_apart = np.linalg.norm(ours - others) > 100 * OF_TRAININGS * np.linalg.norm(ours)
        assert is_apart == ((one, other) not in ALIKE), (one, other)
