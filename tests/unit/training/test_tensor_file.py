"""Tensors that are written one at a time: a file as the safetensors library reads it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from firecaffe.errors import CheckpointError
from firecaffe.training import tensor_file
from firecaffe.training.tensor_file import DTYPES, TensorFile, Under, write_tensors
from firecaffe.transport.collect import Whole

TENSORS = {
    **{str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES},
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "matrix/é": torch.randn(3, 5),
}
LISTED = [
    Whole(name, tuple(each.shape), each.dtype, ((0, None),)) for name, each in TENSORS.items()
]


def raw(tensor: Tensor) -> Tensor:
    """Its bytes; torch compares no float8."""
    return tensor.reshape(-1).view(torch.uint8)


def test_the_library_reads_what_was_written_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    assert write_tensors(path, LISTED, TENSORS.items()) is None
    found, one_by_one = load_file(path), TensorFile(path)
    assert found.keys() == TENSORS.keys() == set(one_by_one)
    for name, each in TENSORS.items():
        for read in (found[name], one_by_one[name]):
            assert (read.dtype, read.shape) == (each.dtype, each.shape)
            assert torch.equal(raw(read), raw(each))


def test_rows_are_read_without_the_others(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    write_tensors(path, LISTED, TENSORS.items())
    name, matrix = next(reversed(TENSORS.items()))
    file = Under(TensorFile(path), "matrix")
    with open(path, "r+b") as damaged:  # the file's last row, which is not asked for
        damaged.truncate(path.stat().st_size - 4)
    for rows in (range(0), range(2), range(1, 2), range(3, 3)):
        assert torch.equal(file.rows("é", rows), matrix[rows.start : rows.stop])
    assert (list(file), file.shape("é"), file.dtype("é")) == (["é"], (3, 5), torch.float32)
    assert file.full_name("é") == name
    with pytest.raises(CheckpointError, match="cut short"):
        file["é"]
    with pytest.raises(IndexError):
        file.rows("é", range(2, 4))


def test_a_full_disk_takes_nothing_and_all_is_gone_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For other ranks send it, and would wait."""
    taken: list[str] = []

    def coming() -> Iterator[tuple[str, Tensor]]:
        for name, each in TENSORS.items():
            yield name, each.new_zeros(100_000)
            taken.append(name)

    monkeypatch.setattr(tensor_file, "new_aside", lambda path: path)
    problem = write_tensors(Path("/dev/full"), LISTED, coming())
    assert problem is not None
    assert "No space left" in str(problem)
    assert taken == list(TENSORS)


@pytest.mark.parametrize("length", [0, 5, 100])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "some.safetensors"
    write_tensors(path, LISTED, TENSORS.items())
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"some\.safetensors"):
        TensorFile(path)


@pytest.mark.parametrize("shape", [[0, 2**64 - 1], [2**63, 0], [0, 2**62, 8]])
def test_sizes_beside_a_zero_that_nobody_can_count_with(tmp_path: Path, shape: list[int]) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "some.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="a has the shape"):
        TensorFile(path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "some.safetensors")
    with pytest.raises(CheckpointError, match=r"some\.safetensors"):
        TensorFile(path)
