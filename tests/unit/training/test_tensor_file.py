"""Tensors that are written one at a time: a file as the safetensors library reads it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from firecaffe.errors import CheckpointError
from firecaffe.training.tensor_file import DTYPES, TensorFile, write_tensors
from firecaffe.transport.collect import Held

TENSORS = {
    **{str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES},
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "matrix é": torch.randn(3, 5),
}
LISTED = [Held(name, tuple(each.shape), each.dtype, 0) for name, each in TENSORS.items()]


def test_the_library_reads_what_was_written_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    assert write_tensors(path, LISTED, TENSORS.values()) is None
    found, one_by_one = load_file(path), TensorFile(path)
    assert found.keys() == TENSORS.keys() == set(one_by_one)
    for name, each in TENSORS.items():
        for read in (found[name], one_by_one[name]):
            assert (read.dtype, read.shape) == (each.dtype, each.shape)
            assert torch.equal(read, each)


def test_a_full_disk_takes_nothing_and_all_is_gone_through() -> None:
    """For other ranks send it, and would wait."""
    taken: list[str] = []

    def coming() -> Iterator[Tensor]:
        for name, each in TENSORS.items():
            yield each.new_zeros(100_000)
            taken.append(name)

    problem = write_tensors(Path("/dev/full"), LISTED, coming())
    assert problem is not None
    assert "No space left" in str(problem)
    assert taken == list(TENSORS)


@pytest.mark.parametrize("length", [0, 5, 100])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "some.safetensors"
    write_tensors(path, LISTED, TENSORS.values())
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"some\.safetensors"):
        TensorFile(path)
