"""A network goes into a .fcz file and comes out; what a file says runs no code of others. Exported,
what counts as equal, and torch's refusals. And about.json: what is written is read, and damage is
told with its word.
"""

import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import firecaffe
from firecaffe.api.weight_files import write_unpacked
from firecaffe.compression import fcz
from firecaffe.errors import CheckpointError, FirecaffeError, RecipeError, RunError
from firecaffe.files import sha256_of
from firecaffe.models.network import make_network
from firecaffe.models.weights import load_weights
from firecaffe.training.export_file import export_onnx, export_program
from firecaffe.training.fcz_description import describe, described, tensors_of
from firecaffe.training.given_parts import ABOUT as ABOUT_FILE
from firecaffe.training.given_parts import About, read_about, write_about
from tests.kit.training_fixtures import Patch
from tests.ranks.networks import Everything
from tests.unit.models.own_nets import Tied

ABOUT = About(7, 1, ("a", "b"), (1, 28, 28), False, (1, 28, 28), "float32", ())
RECIPE = firecaffe.Recipe(
    model=firecaffe.ModelConfig("lenet"),
    data=firecaffe.DataConfig("generated", path="/somewhere", mean=[0.5]),
)


@pytest.fixture
def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return make_network(RECIPE.model, 7, 1)


@pytest.fixture
def file(tmp_path: Path, network: nn.Module) -> Path:
    path = tmp_path / "net.fcz"
    fcz.write(path, tensors_of(network), describe(RECIPE, ABOUT))
    return path


def zeroed(network: nn.Module) -> nn.Module:
    for each in network.parameters():
        nn.init.zeros_(each)
    return network


def equal(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return list(ours) == list(theirs) and all(map(torch.equal, ours.values(), theirs.values()))


def test_a_file_gives_its_network(file: Path, network: nn.Module, tmp_path: Path) -> None:
    loaded = firecaffe.load(file)
    assert equal(loaded, network)
    assert not loaded.training
    # It says what is of the network alone.
    recipe, about = described(file, ())
    assert about == ABOUT
    assert recipe == replace(RECIPE, data=replace(RECIPE.data, path=""))
    assert equal(firecaffe.load(str(file), lambda: make_network(RECIPE.model, 7, 1)), network)
    # First weights are taken from it; and it is unpacked.
    other = zeroed(make_network(RECIPE.model, 7, 1))
    taken = load_weights(other, str(file))
    assert (taken.taken, taken.missing, taken.unexpected) == (8, [], [])
    assert equal(other, network)
    with fcz.read(file) as opened:
        assert opened.network["model"] == {"name": "lenet"}
        assert opened.network["data"] == {"name": "generated", "mean": [0.5]}
        write_unpacked(opened, tmp_path / "net.safetensors")
    unpacked = load_file(tmp_path / "net.safetensors")
    torch.testing.assert_close(unpacked, dict(network.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("make", [Everything, partial(Tied, 5)])
def test_normalization_and_tied_weights_come_back(make: Any, tmp_path: Path) -> None:
    made, other, path = make(), zeroed(make()), tmp_path / "net.fcz"
    fcz.write(path, tensors_of(made), {})
    assert equal(firecaffe.load(path, model=other), made)
    with fcz.read(path) as opened:
        assert (len(opened.outlines) < len(made.state_dict())) == isinstance(made, Tied)


CALLED: list[str] = []


def called(**words: Any) -> nn.Module:
    CALLED.append("called")
    return nn.Linear(2, 2)


def refused(path: Path, words: str, error: type[FirecaffeError] = FirecaffeError) -> None:
    with pytest.raises(error, match=words) as caught:
        firecaffe.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_alone_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "net.fcz"
    network = nn.Linear(2, 2)
    for name in (f"{__name__}:called", f"{__file__}:called", "os:system", "timm:resnet18"):
        fcz.write(path, tensors_of(network), {"model": {"name": name, "args": {"x": 1}}})
        refused(path, "code that is not firecaffe's")
        assert equal(firecaffe.load(path, model=nn.Linear(2, 2)), network)
    assert not CALLED


PROTOTXT = """
layer { name: "in" type: "Input" top: "in" input_param { shape { dim: 1 dim: 4 } } }
layer {
  name: "ip" type: "InnerProduct" bottom: "in" top: "ip"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } }
}
"""


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """The file of a net of Caffe's, with its prototxt beside it."""
    net = tmp_path / "here" / "net.prototxt"
    net.parent.mkdir()
    net.write_text(PROTOTXT)
    recipe = RECIPE.replace("model.name", f"caffe:{net}")
    path = net.with_name("net.fcz")
    network = describe(recipe, ABOUT)
    assert network["model"]["name"] == "caffe:net.prototxt"
    assert network["nets"] == {"model": sha256_of(net)}
    fcz.write(path, tensors_of(make_network(recipe.model)), network)
    return path


def test_a_net_of_caffes_lies_beside_its_file_or_in_the_current_folder(
    imported: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    beside = firecaffe.load(imported)
    with fcz.read(imported) as opened:
        tensors = dict(opened.tensors())
    shapes = {name: each.shape for name, each in tensors.items()}
    assert shapes == {"ip.weight": (2, 4), "ip.bias": (2,)}
    assert all(np.array_equal(beside.state_dict()[name], each) for name, each in tensors.items())
    alone = imported.rename(tmp_path / "alone.fcz")
    refused(alone, r"there is no net\.prototxt in ")
    monkeypatch.chdir(imported.parent)
    assert equal(firecaffe.load(alone), beside)


def test_another_net_of_caffes_or_one_in_another_folder_is_refused(
    imported: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    wrong, elsewhere = imported.with_name("net.prototxt"), tmp_path / "elsewhere.fcz"
    with fcz.read(imported) as opened:
        tensors = dict(opened.tensors())
    fcz.write(elsewhere, tensors, {"model": {"name": f"caffe:{wrong}"}})
    refused(elsewhere, r"there is no net\.prototxt in ")
    right = wrong.rename(tmp_path / "net.prototxt")
    firecaffe.load(elsewhere)  # which says no digest
    wrong.write_text(PROTOTXT + "# of the same shapes\n")
    refused(imported, f"{wrong} is another net")
    monkeypatch.chdir(right.parent)
    firecaffe.load(imported)


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ({"model": {"name": "no_such"}}, "no_such"),
        ({"model": {"name": 3}}, "model.name"),
        ({"model": {"word": 3}}, "no such word"),
        ({"model": 3}, "does not say what its network is"),
        ({"model": {"name": "lenet"}, "num_classes": "7"}, "num_classes is '7'"),
        ({"model": {"name": "lenet"}, "sample_CHW": [1, "2"]}, "sample_CHW is"),
        ({"model": {"name": "lenet"}, "num_classes": 8, "in_channels": 1}, "of shape (7, 500)"),
        ({"model": {"name": "lenet"}, "num_classes": 10**9, "in_channels": 1}, "(1000000000, 500)"),
        ({"model": {"name": "vgg16"}}, "features.0.weight is missing"),
        ({"model": {"name": "lenet"}, "input_shape": [3, 10**5, 10**5]}, "numbers a sample"),
        ({"model": {"name": "lenet"}, "input_shape": [3, -1]}, "numbers a sample"),
        ({}, "does not say which network it is"),
    ],
)
def test_a_file_that_is_not_its_network_is_refused(
    tmp_path: Path, network: nn.Module, description: dict[str, Any], words: str
) -> None:
    path = tmp_path / "net.fcz"
    fcz.write(path, tensors_of(network), description)
    refused(path, re.escape(words))


@pytest.mark.parametrize("name", ["vgg16", "caffe"])
def test_a_file_whose_network_cannot_be_takes_no_memory_for_one(
    imported: Path, monkeypatch: Patch, name: str
) -> None:
    devices = []
    for init in (nn.Linear, nn.Conv2d, nn.Module):
        made = init.__init__

        def watched(self: nn.Module, *args: Any, made: Any = made, **words: Any) -> None:
            devices.append(str(torch.get_default_device()))
            made(self, *args, **words)

        monkeypatch.setattr(init, "__init__", watched)
    network: dict[str, Any] = {"model": {"name": "vgg16"}, "num_classes": 10**18}
    if name == "caffe":
        net = imported.with_name("net.prototxt")
        net.write_text(PROTOTXT.replace("num_output: 2", f"num_output: {2**31 - 1}"))
        net.write_text(net.read_text().replace("dim: 4", f"dim: {2**31 - 1} dim: {2**31 - 1}"))
        network = {"model": {"name": "caffe:net.prototxt"}}
    fcz.write(imported, {}, network)
    refused(imported, "cannot be a network", CheckpointError)
    assert set(devices) == {"meta"}


def test_what_else_is_asked_of_a_file_is_one_line(file: Path, tmp_path: Path) -> None:
    with pytest.raises(FirecaffeError, match="best is asked of a run's folder"):
        firecaffe.load(file, best=True)
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    for ask in (firecaffe.load, lambda path: load_weights(nn.Linear(2, 2), str(path))):
        with pytest.raises(FirecaffeError, match=r"net\.fcz: .*it has .* bytes, and says"):
            ask(file)


def test_what_is_written_of_a_run_s_network_is_read(tmp_path: Path) -> None:
    assert read_about(tmp_path) is None
    write_about(tmp_path, ABOUT)
    assert read_about(tmp_path) == ABOUT
    file = tmp_path / ABOUT_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "sample_CHW": [3, 8.5, 8]}))
    with pytest.raises(RunError, match=r"about.json: .*\$\.sample_CHW\[1\]: expected int"):
        read_about(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(RunError, match="no regular file"):
        read_about(tmp_path)


INPUTS = torch.linspace(-1, 1, 24).view(8, 3)


class Masked(nn.Module):
    """Some outputs are -inf, as those of classes that are left out, and some are no number."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.masked_fill(inputs < 0, -torch.inf).log()


class Branching(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


def test_one_sample_makes_no_batch_of_one(tmp_path: Path) -> None:
    export_program(nn.Linear(3, 2), INPUTS[:1], tmp_path / "net.pt2")
    exported = torch.export.load(tmp_path / "net.pt2").module()
    assert exported(INPUTS).shape == (8, 2)


def test_what_is_not_finite_on_both_sides_is_equal(tmp_path: Path) -> None:
    export_program(Masked(), INPUTS, tmp_path / "net.pt2")
    exported = torch.export.load(tmp_path / "net.pt2").module()
    assert torch.equal(exported(INPUTS).isnan(), INPUTS < 0)


def test_why_torch_refuses_a_network_is_said_for_onnx_too(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for export in (export_program, export_onnx):
        with pytest.raises(RecipeError, match="data-dependent"):
            export(Branching(), INPUTS, tmp_path / "net")
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_onnxruntime_does_not_run_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Half(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs.bfloat16()).float()

    with pytest.raises(RecipeError, match="onnxruntime does not run"):
        export_onnx(Half(3, 2, dtype=torch.bfloat16), INPUTS, tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []
