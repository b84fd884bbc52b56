"""A network as a file: the rows that it is tried on, what counts as equal, and torch's refusals."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.training.export_file import export_onnx, export_program

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
