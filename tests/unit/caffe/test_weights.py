"""Binary files. Those in tests/golden/caffe/files were written by a real Caffe (current, .h5, the
state) or by protobuf with its messages, and loaded by it (v1, v0, mean).
"""

import struct
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firecaffe.caffe import binary, caffemodel
from firecaffe.caffe.binary import Array, field, varint
from firecaffe.caffe.caffemodel import TrainedLayer
from firecaffe.caffe.message import CaffeError
from tests.kit.models_refused import refused

FILES = Path(__file__).parents[2] / "golden" / "caffe" / "files"
FORK = 999
"""A field that Caffe does not have."""


def ramp(number: int, *shape: int) -> Array:
    """What the golden files hold: 0, 1/8, 2/8, … less the number of the blob."""
    count = int(np.prod(shape))
    return (np.arange(count) / 8 - number).reshape(shape).astype(np.float32)


CURRENT = {
    "conv/1": [ramp(0, 3, 2, 2, 2), ramp(1, 3)],
    "bn": [ramp(2, 3), ramp(3, 3), ramp(4, 1)],
    "ip": [ramp(5, 2, 27), ramp(6, 2)],
}
OLD = {
    "conv/1": [ramp(0, 3, 2, 2, 2), ramp(1, 1, 1, 1, 3)],
    "ip": [ramp(5, 1, 1, 2, 27), ramp(6, 1, 1, 1, 2)],
}


def same(found: dict[str, list[Array]], expected: dict[str, list[Array]]) -> None:
    assert list(found) == list(expected)
    for name, blobs in expected.items():
        assert [each.shape for each in found[name]] == [each.shape for each in blobs]
        assert all(map(np.array_equal, found[name], blobs))
        assert all(each.dtype == np.float32 and each.flags.writeable for each in found[name])


@pytest.mark.parametrize(("name", "expected"), [("current", CURRENT), ("v1", OLD), ("v0", OLD)])
def test_caffes_own_files(name: str, expected: dict[str, list[Array]]) -> None:
    same(caffemodel.read(FILES / f"{name}.caffemodel"), expected)


def test_caffes_own_hdf5_file() -> None:
    pytest.importorskip("h5py")
    renamed = {name.replace("/", ""): blobs for name, blobs in CURRENT.items()}
    found = caffemodel.read(FILES / "current.caffemodel.h5")
    same({name: found[name] for name in renamed}, renamed)
    assert len(found) == len(renamed)


def test_hdf5_without_h5py_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with refused(CaffeError, ["need h5py; pip install 'firecaffe[hdf5]'"]):
        caffemodel.read(FILES / "current.caffemodel.h5")


HDF5: dict[str, dict[str, Any]] = {
    "has no group /data": {"other/a/0": {"data": [1.0]}},
    "a has the blobs [1]; a blob that is shared stands": {"data/a/1": {"data": [1.0]}},
    "/data/a/x is no numbered blob": {"data/a/x": {"data": [1.0]}},
    "is no numbered blob": {b"data/a/\xff": {"data": [1.0]}},  # type: ignore[dict-item]
    "/data/a/0 itself holds no numbers": {"data/a/0": {"data": b"text"}},
    "would have 4,398,046,511,104 bytes, more than the file": {
        "data/a/0": {"shape": (1 << 40,), "dtype": "f4", "chunks": (1024,)}
    },
    "its blobs would have 32,000 bytes, more than the file": {
        f"data/a/{number}": {"shape": (1000,), "dtype": "f4", "chunks": (1000,)}
        for number in range(8)
    },
}


@pytest.mark.parametrize("part", HDF5)
def test_damaged_hdf5_is_one_line(part: str, tmp_path: Path) -> None:
    with pytest.importorskip("h5py").File(tmp_path / "x.h5", "w") as file:
        for name, words in HDF5[part].items():
            file.create_dataset(name, **words)
    assert part in damaged(tmp_path, tmp_path / "x.h5")


def test_hdf5_that_is_cut_short_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    whole = (FILES / "current.caffemodel.h5").read_bytes()
    for length in (8, 100, len(whole) // 2):
        (tmp_path / "x.h5").write_bytes(whole[:length])
        assert "not a whole HDF5 file" in damaged(tmp_path, tmp_path / "x.h5")


def test_what_is_written_is_what_caffe_writes(tmp_path: Path) -> None:
    """But for what a weight file has beside the weights, and the order of a blob's fields."""
    path = tmp_path / "w.caffemodel"
    caffemodel.write(path, [TrainedLayer(name, "T", blobs) for name, blobs in CURRENT.items()])
    same(caffemodel.read(path), CURRENT)
    data = field(5, CURRENT["ip"][0].tobytes())
    assert b"".join([*data, *shape(2, 27)]) in (FILES / "current.caffemodel").read_bytes()
    assert b"".join([*shape(2, 27), *data]) in path.read_bytes()


def test_what_is_written_has_the_fields_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "w.caffemodel"
    caffemodel.write(path, [TrainedLayer("é", "ReLU", [np.array([[1.5], [-2]], np.float32)])], "n")
    numbers = struct.pack("<2f", 1.5, -2)
    blob = b"\x3a\x04\x0a\x02\x02\x01" + b"\x2a\x08" + numbers
    layer = b"\x0a\x02\xc3\xa9" + b"\x12\x04ReLU" + b"\x3a" + bytes([len(blob)]) + blob
    assert path.read_bytes() == b"\x0a\x01n" + b"\xa2\x06" + bytes([len(layer)]) + layer


def test_more_than_protobuf_can_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, layers = tmp_path / "w.caffemodel", [TrainedLayer("a", "T", [ramp(0, 4)])]
    caffemodel.write(path, layers)
    size = path.stat().st_size
    monkeypatch.setattr(caffemodel, "MAX_MESSAGE_BYTES", size - 1)
    with refused(CaffeError, [f"would have {size} bytes; protobuf reads {size - 1}"]):
        caffemodel.write(path, layers)


def test_odd_shapes_come_back_of_the_last_layer_of_a_name(tmp_path: Path) -> None:
    """And layers without blobs are left out."""
    path = tmp_path / "w.caffemodel"
    odd = [np.full((), 3.5, np.float32), np.zeros((0, 4), np.float32), ramp(0, 1, 1, 300)]
    odd.append(ramp(0, 4, 6)[:, ::2])
    layers = [("a", [ramp(0, 2)]), ("b", []), ("a", odd)]
    caffemodel.write(path, [TrainedLayer(name, "T", blobs) for name, blobs in layers])
    same(caffemodel.read(path), {"a": odd})


Parts = list[Any]


def model(tmp_path: Path, *blob: Parts, layer: Parts | None = None) -> Path:
    """A file of one layer, a, with one blob of these fields."""
    path = tmp_path / "x.caffemodel"
    content = [*field(1, b"a"), *field(7, list(chain(*blob))), *(layer or [])]
    path.write_bytes(b"".join(field(100, content)))
    return path


def shape(*dims: int) -> Parts:
    return field(7, field(1, b"".join(map(varint, dims))))


ONE = struct.pack("<f", 1)
GROUP = bytes([15 << 3 | 3, 14 << 3 | 3, 14 << 3 | 4, *field(3, 7)[0], 15 << 3 | 4])
UNPACKED_DIMS = field(7, [*field(1, 2), *field(1, 3)])
SIX = struct.pack("<6f", *range(6))
UNPACKED = [b"\x2d" + SIX[at : at + 4] for at in range(0, 24, 4)]


@pytest.mark.parametrize(
    "blob",
    [
        [shape(2, 3), field(5, SIX)],
        [field(5, SIX), shape(2, 3)],
        [UNPACKED_DIMS, field(5, SIX[:8]), field(5, b""), field(5, SIX[8:])],
        [shape(2, 3), UNPACKED],
        [shape(2, 3), field(5, SIX[:4]), UNPACKED[1:]],
        [UNPACKED, field(FORK, SIX), shape(2, 3)],
        [shape(2, 3), field(8, struct.pack("<6d", *range(6)))],
        [shape(2, 3), [b"\x41" + struct.pack("<d", n) for n in range(6)], field(5, ONE)],
        [field(FORK, b"?"), shape(2, 3), [GROUP], field(6, SIX), field(5, SIX), field(FORK, 5)],
        [shape(2, 3), field(5, SIX), field(5, 77), [varint(7 << 3 | 5) + ONE], field(1, b"1")],
        [field(7, field(1, b"\x82\x80\x00\x03")), field(5, SIX)],
    ],
    ids=str,
)
def test_every_way_to_say_a_blob(tmp_path: Path, blob: list[Parts]) -> None:
    found = caffemodel.read(model(tmp_path, *blob))
    same(found, {"a": [np.arange(6, dtype=np.float32).reshape(2, 3)]})


def test_long_runs_of_unpacked_numbers_that_look_like_tags(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (100_003, 5), np.uint8)
    rows[::7] = 0x2D
    rows[:, 0] = 0x2D
    found = caffemodel.read(model(tmp_path, shape(100_003), [rows.tobytes()]))
    numbers = rows[:, 1:].tobytes()
    assert found["a"][0].tobytes() == numbers


def test_legacy_axes_win_over_the_shape_and_missing_ones_are_zero(tmp_path: Path) -> None:
    axes = [field(3, 2), field(4, 3)]
    path = model(tmp_path, *axes, field(1, 1), field(2, 1), shape(6), field(5, SIX))
    assert caffemodel.read(path)["a"][0].shape == (1, 1, 2, 3)
    without = model(tmp_path, *axes, field(5, SIX))
    assert "shape (0, 0, 2, 3) with 6 numbers" in damaged(tmp_path, without)


def damaged(tmp_path: Path, content: bytes | Path) -> str:
    path = content if isinstance(content, Path) else tmp_path / "x.caffemodel"
    if isinstance(content, bytes):
        path.write_bytes(content)
    with refused(CaffeError, []) as caught:
        caffemodel.read(path)
    return str(caught.value)


NO_FIELD = "byte 0: no field begins here"
DAMAGE = [
    (b"", "holds no layers; expected a .caffemodel"),
    (b'layer { name: "a" }', f"{NO_FIELD}; expected protobuf's binary format"),
    (b"version https://git-lfs.github.com", NO_FIELD),
    (b"\x00\x00", NO_FIELD),
    (b"\xff" * 11, "byte 0: a number of more than 10 bytes"),
    (b"\x0a\x05ab", "byte 0: 5 bytes are said to follow, where 2 are left"),
    (b"\x0a" + b"\xff" * 9 + b"\x01ab", "18,446,744,073,709,551,615 bytes"),
    (b"\xa2\x06\x04\x0a\x05ab" + bytes(50), "byte 3: 5 bytes are said to follow"),
    (b"\x0d\x00\x00", "byte 0: a number that does not end"),
    (b"\x0b" * 60, "groups are nested more than 50 deep"),
    (b"\x0b\x0a\x00", "a group that does not end"),
    (b"\x0b\x14", "byte 1: no field begins here"),
    (b"\x0c", NO_FIELD),
    (b"".join(field(2, b"") + field(100, b"")), "layers of two ages"),
    (b"\x08\x01" * 300_001, "more than 300,000 fields"),
    (b"".join(field(100, b"")) * 10_001, "more than 10,000 layers"),
    (b"".join(field(100, field(1, b"n" * 1001))), "a name of more than 1,000 bytes"),
]


def test_damage_is_one_line(tmp_path: Path) -> None:
    whole = (FILES / "current.caffemodel").read_bytes()
    cut = [(whole[:length], "x.caffemodel: byte ") for length in (1, 40, len(whole) - 1)]
    for content, part in cut + DAMAGE:
        assert part in damaged(tmp_path, content)
    for missing in (tmp_path, tmp_path / "none", Path("/dev/zero")):
        assert "is no file" in damaged(tmp_path, missing)


BLOBS: list[tuple[list[Parts], str]] = [
    ([shape(2**31 - 1, 2**31 - 1), field(5, ONE)], "(2147483647, 2147483647) with 1 numbers"),
    ([shape(2**31, 0)], "a blob of shape (2147483648, 0)"),
    ([shape(-1, -1), field(5, ONE)], "a blob of shape (-1, -1)"),
    ([shape(*[1] * 33), field(5, ONE)], "more than 32 axes"),
    ([shape(2), field(5, ONE)], "a blob of shape (2) with 1 numbers"),
    ([field(5, SIX)], "a blob of shape () with 6 numbers"),
    ([field(5, SIX[:-1])], "23 bytes of numbers of 4 bytes each"),
    ([field(8, SIX[:-1])], "23 bytes of numbers of 8 bytes each"),
    ([shape(10_001), field(5, ONE) * 10_001], "in more than 10,000 pieces"),
]


def test_a_blob_that_cannot_be(tmp_path: Path) -> None:
    for content, part in BLOBS:
        assert part in damaged(tmp_path, model(tmp_path, *content))
    many = field(7, b"") * 20_001
    assert "more than 20,000 blobs" in damaged(tmp_path, model(tmp_path, layer=many))


def test_a_mean_image(tmp_path: Path) -> None:
    image = (np.arange(24).reshape(3, 2, 4) / 4).astype(np.float32)
    path = tmp_path / "mean.binaryproto"
    np.testing.assert_array_equal(binary.read_mean(FILES / "mean.binaryproto"), image, strict=True)
    binary.write_mean(path, image)
    assert path.read_bytes() == (FILES / "mean.binaryproto").read_bytes()
    path.write_bytes(b"".join([*shape(3, 2, 4), *field(5, image.tobytes())]))
    np.testing.assert_array_equal(binary.read_mean(path), image, strict=True)
    for dims in ((6,), (2, 1, 1, 3)):
        path.write_bytes(b"".join([*shape(*dims), *field(5, SIX)]))
        with refused(CaffeError, ["expected one image"]):
            binary.read_mean(path)


def test_where_a_solver_stood(tmp_path: Path) -> None:
    """Two inputs of 1 and a bias, all fitted to 3 from 0: three updates of a rate of 1/8, halved
    after the first, with a momentum of 1/2. All three parameters move alike.
    """
    weight = history = 0.0
    for rate in (1 / 8, 1 / 16, 1 / 16):
        history = rate * (3 * weight - 3) + history / 2
        weight -= history
    path = tmp_path / "sgd.solverstate"
    state = (FILES / "sgd.solverstate").read_bytes()
    path.write_bytes(state + b"".join(field(FORK, b"other")))
    found = binary.read_solverstate(path)
    assert (found.iteration, found.current_step) == (3, 1)
    assert found.learned_net == "g/snap_iter_3.caffemodel"
    assert [each.tolist() for each in found.history] == [[[history, history]], [history]]


def test_no_solver_state(tmp_path: Path) -> None:
    path = tmp_path / "x.solverstate"
    for content in (b"", b"".join(field(1, -1))):
        path.write_bytes(content)
        with pytest.raises(CaffeError, match=r"says no iteration; expected a \.solverstate"):
            binary.read_solverstate(path)
