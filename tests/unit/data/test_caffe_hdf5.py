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

MUTATIONS = 100


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


def test_a_file_that_lies_of_its_size_or_place_is_one_line(tmp_path: Path) -> None:
    two_files(tmp_path)

    def told(data: Any) -> str:
        name = f"{len(list(tmp_path.iterdir()))}.h5"  # others may still be open
        (tmp_path / "list.txt").write_text(f"a.h5\n{name}\n")
        with h5py.File(tmp_path / name, "w") as file:
            file["label"] = np.zeros(4)
            if isinstance(data, dict):
                file.create_dataset("data", dtype="f4", **data)
            else:
                file["data"] = data
        with pytest.raises(FirecaffeError) as raised:
            open_data(net(tmp_path))
        return str(raised.value)

    huge = {"shape": (4, 2, 1 << 40), "chunks": (1, 1, 1024), "compression": "gzip"}
    assert "h5: data would take 35,184,372,088,832 bytes; at most 16,777,216" in told(huge)
    chunk = {"shape": (4, 2, 3), "maxshape": (None, 2, None), "chunks": (1 << 12, 2, 1 << 12)}
    assert "data would take 134,217,728 bytes" in told(chunk)
    for link in (h5py.SoftLink("/label"), h5py.ExternalLink("a.h5", "/data")):
        assert "its data is a link" in told(link)
    apart = {"shape": (4, 2, 3), "external": [(str(tmp_path / "a.h5"), 0, h5py.h5f.UNLIMITED)]}
    assert "its data is in other files" in told(apart)


def test_damaged_files_are_one_line_or_other_numbers(tmp_path: Path) -> None:
    two_files(tmp_path)
    content = (tmp_path / "b.h5").read_bytes()
    drawn = np.random.default_rng(0)
    told = []
    for _ in range(MUTATIONS):
        changed = bytearray(content)
        for place in drawn.integers(len(content), size=16):
            changed[place] = drawn.integers(256)
        (tmp_path / "b.h5").write_bytes(changed)
        try:
            train = open_data(net(tmp_path)).train
            train.batch(torch.arange(len(train)))
        except FirecaffeError as error:
            told.append(str(error))
    assert len(told) > MUTATIONS / 2
    assert not any("\n" in line for line in told)
