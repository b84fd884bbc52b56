"""The programs and recipes of examples/, typed as their first lines say, in an empty folder."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cli.shown_commands import shown
from tests.typed import firecaffe, python, torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder in which `examples/…` is found, and where the runs go."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    return tmp_path


def said_by(here: Path, *words: object) -> str:
    done = python(*words, cwd=here)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, said: str) -> list[float]:
    return [float(each) for each in re.findall(pattern, said)]


def test_own_model_alone_and_under_torchrun(here: Path) -> None:
    alone = said_by(here, "examples/own_model.py")
    done = torchrun(2, "examples/own_model.py", cwd=here)
    assert done.returncode == 0, done.stderr
    result = r"top-1 [\d.]+%, weights [0-9a-f]{12}"
    assert set(re.findall(result, done.stdout)) == set(re.findall(result, alone))
    assert numbers(r"top-1 ([\d.]+)%, weights", alone)[0] > 80


def test_own_data_end_in_the_same_weights_on_one_and_two_workers(here: Path) -> None:
    said = said_by(here, "examples/own_data.py")
    weights = re.findall(r"weights ([0-9a-f]{16})", said)
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert min(numbers(r"top-1 ([\d.]+)%", said)) > 80


def test_a_segmentation_by_the_command_line(here: Path) -> None:
    recipe = "examples/segmentation/unet.toml"
    done = firecaffe("train", recipe, "--nproc-per-node", 1, cwd=here)
    assert done.returncode == 0, done.stderr
    (share,) = numbers(r"mean IoU ([\d.]+)%", done.stdout + done.stderr)
    assert share > 50


def test_a_regression(here: Path) -> None:
    said = said_by(here, "examples/regression.py")
    (r2,), (error,) = (
        numbers(r"(?m)^R² ([-\d.]+)", said),
        numbers(r"(?m)^R².* MAE ([\d.]+) s$", said),
    )
    assert r2 > 0.9
    assert error < 0.3


def test_fine_tuning_keeps_the_frozen_backbone(here: Path) -> None:
    for name in ("first", "second"):
        recipe = f"examples/fine_tuning/{name}.toml"
        done = firecaffe("train", recipe, "--nproc-per-node", 1, "--run.folder", name, cwd=here)
        assert done.returncode == 0, done.stderr
    first, second = (load(here, name) for name in ("first", "second"))
    assert first["head.bias"].shape == (2,)
    assert second["head.bias"].shape == (3,)
    kept = [name for name in first if name.startswith("features.")]
    assert len(kept) == 12
    assert all(torch.equal(first[name], second[name]) for name in kept)
    assert json.loads((here / "second" / "result.json").read_text())["top1"] > 0.8


def load(here: Path, run: str) -> dict[str, Tensor]:
    """The weights of a run, by the network's own names."""
    (file,) = (here / run / "checkpoints").glob("*/state.safetensors")
    return {
        name.partition("/")[2]: tensor
        for name, tensor in load_file(file).items()
        if name.startswith(("parameter/", "buffer/"))
    }


def test_a_siamese_network_with_a_task_of_its_own(here: Path) -> None:
    assert numbers(r"([\d.]+)% of the pairs", said_by(here, "examples/siamese.py"))[0] > 80


def test_a_gru_over_sequences_of_several_lengths(here: Path) -> None:
    assert numbers(r"top-1 ([\d.]+)%", said_by(here, "examples/gru.py"))[0] > 70


def test_from_a_prototxt_to_onnx(here: Path) -> None:
    pytest.importorskip("onnxruntime")
    said = said_by(here, "examples/caffe_to_onnx.py")
    (of_file,), (in_onnx,) = (
        numbers(rf"([\d.]+)% {place}", said) for place in ("of the file", "in onnxruntime")
    )
    assert of_file == in_onnx
    assert of_file > 40
    # The lesson's commands, with the images that the script has written.
    page = shown("docs/tutorials/from_caffe.md")
    lesson = [found.text.split() for found in page if "lesson" in found.text]
    assert [words[1] for words in lesson][:4] == ["import", "train", "predict", "export"]
    for words in lesson:
        short = ("--train.steps", 4) if words[1] == "train" else ()
        done = firecaffe(*words[1:], *short, cwd=here)
        assert done.returncode == 0, done.stderr


def test_the_cells_of_the_notebook(here: Path) -> None:
    """One after the other, as a script; in a real kernel: test_launch_function.py."""
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (here / "cells.py").write_text("\n\n".join(code))
    assert "the same bits: True" in said_by(here, "cells.py")
