"""Versions of the weights in mapped files: the same tensors, with nothing left behind."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from firecaffe.errors import RunError
from firecaffe.training.served import server_memory
from firecaffe.training.served.server_memory import copy_in_file
from tests.unit.training.served.test_trainings import MODES, train


def test_the_same_values_types_and_strides(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tensors = {
        "convolution": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "half": torch.randn(7).half(),
        "count": torch.tensor(12),
        "empty": torch.empty(0, 3),
    }
    copies = copy_in_file(tensors)
    for name, each in tensors.items():
        torch.testing.assert_close(copies[name], each, rtol=0, atol=0)
        assert copies[name].stride() == each.stride()
    tensors["half"].zero_()
    assert copies["half"].abs().sum() > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_line(monkeypatch: Any) -> None:
    def full(*_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"no room for a version .* TMPDIR"):
        copy_in_file({"w": torch.ones(3)})


def test_a_training_ends_in_the_same_bits(tmp_path: Path, monkeypatch: Any) -> None:
    words = MODES["softsync"]
    expected = train(tmp_path / "memory", words, steps=8).state_sha256
    made = []

    def counted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made.append(len(tensors))
        return copy_in_file(tensors)

    monkeypatch.setattr(server_memory, "MOST_BYTES", 0)
    monkeypatch.setattr(server_memory, "copy_in_file", counted)
    assert train(tmp_path / "files", words, steps=8).state_sha256 == expected
    assert len(made) > 8
