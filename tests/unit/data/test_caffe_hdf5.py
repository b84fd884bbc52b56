"""HDF5Data: any number of tops, from the files of a list."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from firecaffe.data import DataConfig, open_data
from firecaffe.errors import FirecaffeError


def write(path: Path, **tops: NDArray[Any]) -> None:
    with h5py.File(path, "w") as file:
        for name, values in tops.items():
            file[name] = values


def net(folder: Path, words: str = "", tops: str = 'top: "data" top: "label"') -> DataConfig:
    (folder / "net.prototxt").write_text(
        f'layer {{ name: "d" type: "HDF5Data" {tops} {words}'
        ' hdf5_data_param { source: "list.txt" batch_size: 4 } }'
    )
    return DataConfig(name=f"caffe:{folder}/net.prototxt")


def two_files(folder: Path) -> dict[str, NDArray[Any]]:
    """Three and four samples; what the two files hold together."""
    random = np.random.default_rng(1)
    tops: dict[str, NDArray[Any]] = {
        "data": random.standard_normal((7, 2, 3)),
        "label": np.arange(7),
        "more": random.standard_normal((7, 1)).astype(np.float32),
    }
    write(folder / "a.h5", **{name: each[:3] for name, each in tops.items()})
    write(folder / "b.h5", **{name: each[3:] for name, each in tops.items()})
    (folder / "list.txt").write_text("a.h5\nb.h5\n")
    return tops


@pytest.mark.parametrize("held_bytes", [0, 1 << 20])
def test_tops_are_float32_in_the_order_of_the_list(
    held_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firecaffe.data.caffe_hdf5.HELD_BYTES", held_bytes)
    tops = two_files(tmp_path)
    train = open_data(net(tmp_path, tops='top: "data" top: "label" top: "more"')).train
    assert len(train) == 7
    samples_B = torch.tensor([5, 0, 2, 5, 3, 6, 1])
    inputs, targets = train.batch(samples_B)
    for top, name in zip((inputs, *targets), ("data", "label", "more"), strict=True):
        assert np.array_equal(top.numpy(), tops[name].astype(np.float32)[samples_B])
        assert top.dtype == torch.float32
    alone, labels_B = open_data(net(tmp_path)).train.batch(torch.tensor([4]))
    assert (labels_B.tolist(), alone.shape) == ([4.0], (1, 2, 3))


@pytest.mark.parametrize(
    ("tops", "expected"),
    [
        ({"data": np.zeros((2, 3))}, "b.h5: holds no numbers named label, as the top is called"),
        ({"data": np.zeros((2, 3)), "label": np.zeros(3)}, "b.h5: holds 2 data, 3 label"),
        ({"data": np.zeros((2, 4)), "label": np.zeros(2)}, "expected the same but for the rows"),
        ({"data": np.zeros((0, 3)), "label": np.zeros(0)}, "b.h5: holds no samples"),
        ({}, "b.h5: holds no numbers named data"),
    ],
)
def test_files_that_are_not_alike(
    tops: Mapping[str, NDArray[Any]], expected: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.h5", data=np.zeros((2, 3)), label=np.zeros(2))
    write(tmp_path / "b.h5", **tops)
    (tmp_path / "list.txt").write_text("a.h5\nb.h5\n")
    with pytest.raises(FirecaffeError, match=expected):
        open_data(net(tmp_path))


def test_what_is_no_file_of_it(tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / "b.h5").write_bytes(b"text")
    with pytest.raises(FirecaffeError, match=r"b\.h5: cannot be read as HDF5"):
        open_data(net(tmp_path))
    (tmp_path / "b.h5").unlink()
    with pytest.raises(FirecaffeError, match=r'list\.txt: file "b\.h5" is not there'):
        open_data(net(tmp_path))
    with pytest.raises(FirecaffeError, match="HDF5Data takes no transform_param"):
        open_data(net(tmp_path, "transform_param { scale: 2 }"))
