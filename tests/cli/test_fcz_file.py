"""A network in a .fcz file is used as a run is: evaluated, asked, exported; and unpacked."""

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import firecaffe
from firecaffe.cli import main
from firecaffe.cli.trained_network import make_parser_export
from firecaffe.compression import fcz
from firecaffe.compression.fcz.format import MAGIC, VERSION, varint
from firecaffe.errors import CheckpointError
from firecaffe.models.network import make_network
from firecaffe.training.export_file import FORMATS
from firecaffe.training.fcz_description import describe, described, tensors_of
from firecaffe.training.given_parts import NOTHING
from firecaffe.training.load import load_run
from tests.cli.test_trained_network import NETWORK
from tests.ranks.networks import Everything
from tests.typed import refused, said_by


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = firecaffe.Recipe(
        model=firecaffe.ModelConfig("lenet"),
        data=firecaffe.DataConfig("generated", mean=[0.5], augment="none"),
        train=firecaffe.TrainConfig(8, 4, steps=2, device="cpu"),
        run=firecaffe.RunConfig(str(tmp_path_factory.mktemp("runs") / "run"), tensorboard=False),
    )
    return firecaffe.train(recipe).folder


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    """In the run's folder, which does not make it one."""
    trained = load_run(run)
    path = run / "net.fcz"
    fcz.write(path, tensors_of(trained.model), describe(trained.recipe, trained.about))
    return path


def test_a_file_is_evaluated_as_its_run(run: Path, file: Path) -> None:
    of_run, of_file = (json.loads(said_by("evaluate", each, "--json")) for each in (run, file))
    assert of_file["step"] is None
    assert {**of_run, "run": "", "step": 0} == {**of_file, "run": "", "step": 0}
    assert "net.fcz  test: top-1" in said_by("evaluate", file)


def test_a_file_is_asked_for_predictions(run: Path, file: Path) -> None:
    of_run, of_file = (said_by("predict", each, "--csv", "-") for each in (run, file))
    assert of_run == of_file


def test_a_file_says_how_long_it_takes_over_a_link(file: Path) -> None:
    weights = 431_080
    profile = json.loads(said_by("profile", file, "--json"))
    assert profile["parameters"] == weights
    assert profile["input_CHW"] == [1, 28, 28]
    (plan,) = json.loads(
        said_by(
            *("plan", "--model", "lenet", "--workers", "1", "--json"),
            *("--cluster", "ethernet-1g", "--fcz", file),
        )
    )
    size = file.stat().st_size
    for found in (profile["transfer"], plan["transfer"]):
        assert (found["file_bytes"], found["float_bytes"]) == (size, 4 * weights)
        # 10^7 bits a second.
        times = found["seconds"]["10 Mbit/s"]
        assert times == pytest.approx({"file": 8 * size / 1e7, "float": 32 * weights / 1e7})
    assert plan["transfer"]["seconds"].keys() != profile["transfer"]["seconds"].keys()
    assert f"over 10 Mbit/s: {8 * size / 1e7:.3g} s" in said_by("profile", file)
    assert "no .fcz file" in refused(
        4, "plan", "--model", "lenet", "--fcz", str(file.with_name("recipe.toml"))
    )


def test_a_file_is_exported_and_unpacked_beside_it(run: Path, file: Path) -> None:
    text = said_by("export", file, "--to", "safetensors")
    assert "net.safetensors: weights of" in text
    exported = load_file(run / "net.safetensors")
    assert main(["unpack", str(file)]) == 8  # it is there already
    text = said_by("unpack", file, "--overwrite")
    assert '"name": "lenet"' in text
    assert "8 tensors" in text
    unpacked = load_file(run / "net.safetensors")
    assert exported.keys() == unpacked.keys()
    assert all(torch.equal(each, unpacked[name]) for name, each in exported.items())


def test_code_of_others_has_to_be_named(tmp_path: Path) -> None:
    path = tmp_path / "own.fcz"
    recipe = firecaffe.Recipe(
        model=firecaffe.ModelConfig(NETWORK), data=firecaffe.DataConfig("generated")
    )
    network = describe(recipe, NOTHING)
    fcz.write(path, tensors_of(Everything()), network)
    error = refused(2, "evaluate", path)
    assert "networks.py:Everything', code that is not firecaffe's" in error
    assert f"--model.name {NETWORK}" in error


OWN = """
import torch
from firecaffe import TensorDataset
X, Y = torch.rand(8, 4), torch.arange(8) % 2
def data():
    return {"train": TensorDataset(X, Y), "test": TensorDataset(X, Y)}
def network():
    return torch.nn.Linear(4, 2)
"""


def test_a_file_whose_code_is_trusted_is_used_as_a_run(tmp_path: Path) -> None:
    """Its code is not run before, nor while tensors are made on the meta device."""
    code, path = tmp_path / "own_net.py", tmp_path / "own.fcz"
    code.write_text(OWN)
    recipe = firecaffe.Recipe(
        model=firecaffe.ModelConfig(f"{code}:network"),
        data=firecaffe.DataConfig(f"{code}:data"),
        task=firecaffe.TaskConfig(args={"num_classes": 2}),
    )
    fcz.write(path, tensors_of(torch.nn.Linear(4, 2)), describe(recipe, NOTHING))
    assert main(["evaluate", str(path)]) == 2
    for command in (["evaluate"], ["predict"], ["export", "--to", "safetensors"]):
        assert main([*command, str(path), "--trust-code"]) == 0


PROTOTXT = """
layer { name: "in" type: "Input" top: "in" input_param { shape { dim: 1 dim: 1 dim: 28 dim: 28 } } }
layer {
  name: "ip" type: "InnerProduct" bottom: "in" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } }
}
"""


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """The file of a net of Caffe's on firecaffe's own data, beside its prototxt."""
    net = tmp_path / "net.prototxt"
    net.write_text(PROTOTXT)
    recipe = firecaffe.Recipe(
        model=firecaffe.ModelConfig(f"caffe:{net}"), data=firecaffe.DataConfig("generated")
    )
    path = tmp_path / "net.fcz"
    about = replace(NOTHING, input_shape=(1, 28, 28), sample_CHW=(1, 28, 28), input_dtype="float32")
    fcz.write(path, tensors_of(make_network(recipe.model)), describe(recipe, about))
    return path


def test_a_net_of_caffes_is_used_from_its_file(imported: Path) -> None:
    evaluated = json.loads(said_by("evaluate", imported, "--json"))
    table = said_by("predict", imported, "--csv", "-").splitlines()
    column = table[0].split(",").index("class_1")
    found = [int(line.split(",")[column]) for line in table[1:]]
    right = [label == number % 10 for number, label in enumerate(found)]
    assert evaluated["top1"] == pytest.approx(sum(right) / len(right))
    assert json.loads(said_by("profile", imported, "--json"))["parameters"] == 7_850
    imported.with_name("net.prototxt").unlink()
    for command in ("evaluate", "predict", "profile"):
        error = refused(2, command, imported)
        assert "there is no net.prototxt in" in error
        assert error.count("\n") == 1


def test_files_for_caffe_do_not_take_the_place_of_the_net(imported: Path) -> None:
    net, words = imported.with_name("net.prototxt"), ("export", str(imported), "--to", "caffemodel")
    assert "the network's own prototxt" in refused(2, *words, "--overwrite")
    assert net.read_text() == PROTOTXT
    out = imported.with_name("back.caffemodel")
    said_by(*words, "--out", out)
    out.unlink()
    assert "back.prototxt: exists already" in refused(8, *words, "--out", out)


def test_every_format_can_be_typed() -> None:
    (typed,) = (each.choices for each in make_parser_export().own if "--to" in each.option_strings)
    assert typed is not None
    assert set(typed) == set(FORMATS)


def test_a_tensor_that_safetensors_cannot_have(tmp_path: Path) -> None:
    path = tmp_path / "net.fcz"
    fcz.write(path, {"__metadata__": np.ones(3, np.float32)}, {})
    assert "cannot have a tensor called __metadata__" in refused(4, "unpack", path)
    assert not path.with_suffix(".safetensors").exists()


def test_text_that_no_terminal_can_print(tmp_path: Path) -> None:
    """Half a pair of UTF-16 is JSON, and no text."""
    text = rb'{"a":"\ud800"}'
    plain = varint(len(text)) + text + varint(0)
    start = MAGIC + bytes([VERSION]) + varint(len(plain)) * 2 + varint(0)
    path = tmp_path / "net.fcz"
    path.write_bytes(start + zlib.crc32(plain, zlib.crc32(start)).to_bytes(4, "little") + plain)
    assert r'network: {"a": "\ud800"}' in said_by("unpack", path)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["unpack"], 2, "unpack takes one file, found none"),
        (["unpack", "a", "b"], 2, "unpack takes one file, found a and b"),
        (["unpack", "none.fcz"], 4, "none.fcz: No such file"),
        (["evaluate", "FILE", "--best"], 2, "best is asked of a run's folder"),
        (["evaluate", "FILE", "--train.steps", "3"], 2, "--train.steps has no effect"),
        (["evaluate", "CUT"], 4, "cut.fcz: no .fcz file, or damaged: it has"),
        (["export", "CUT", "--to", "safetensors"], 4, "cut.fcz: no .fcz file, or damaged: it has"),
        (["unpack", "CUT"], 4, "cut.fcz: no .fcz file, or damaged: it has"),
        (["unpack", "FILE", "--to", "x.pt"], 2, "must end in .safetensors"),
    ],
)
def test_what_is_wrong_is_one_line(
    file: Path,
    tmp_path: Path,
    words: list[str],
    code: int,
    line: str,
) -> None:
    cut = tmp_path / "cut.fcz"
    cut.write_bytes(file.read_bytes()[:-5])
    places = {"FILE": str(file), "CUT": str(cut)}
    error = refused(code, *(places.get(word, word) for word in words))
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("section", "word"), [("data", "path"), ("model", "weights")])
def test_a_file_says_no_path_of_a_machine(tmp_path: Path, section: str, word: str) -> None:
    sections: dict[str, Any] = {"model": {"name": "lenet"}, "data": {"name": "mnist"}}
    sections[section][word] = "/etc"
    fcz.write(tmp_path / "net.fcz", {"w": np.zeros(3)}, sections)
    with pytest.raises(CheckpointError, match=rf"{section}\.{word} is no word of a file"):
        described(tmp_path / "net.fcz", ())
