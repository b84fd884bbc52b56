"""What is written is read, to the bit: any type, any shape, any values."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from firecaffe.compression.fcz import CODES, read, write
from firecaffe.compression.fcz.format import DTYPES
from firecaffe.compression.fcz.sequence import How
from firecaffe.errors import FirecaffeError
from tests.kit.models_refused import refused
from tests.unit.compression.fcz.made import NETWORK, Tensors, bytes_of, decoded, pruned, same, small

ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)

each_code = pytest.mark.parametrize("code", CODES)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=8), ARRAYS, max_size=3), st.sampled_from(CODES))
def test_any_tensors_come_back(tensors: Tensors, code: How) -> None:
    assert same(decoded(bytes_of(tensors, code)), tensors)


SIDES = st.integers(1, 60)


@given(
    SIDES, SIDES, st.floats(0, 1), st.integers(1, 300), st.integers(0, 99), st.sampled_from(CODES)
)
def test_any_pruned_tensor_comes_back(
    rows: int, columns: int, keep: float, values: int, seed: int, code: How
) -> None:
    tensors: Tensors = {"w": pruned((rows, columns), keep, values, seed)}
    assert same(decoded(bytes_of(tensors, code)), tensors)


@each_code
def test_odd_values_come_back_and_the_bytes_are_the_same_each_time(code: How) -> None:
    bits = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0, 1, 0x7F800000], np.uint32)
    far_apart = np.zeros(300_000, np.float32)
    far_apart[[0, 1, 40_000, 299_999]] = [1, 2, 3, 4]  # further than any symbol says
    tensors: Tensors = {
        "nan": bits.view(np.float32),
        "many nans": np.resize(bits, 1000).view(np.float32),
        "number": np.array(-0.0),
        "one zero": np.zeros((1, 1), np.float16),
        "empty": np.empty((3, 0, 2), np.int64),
        "strided": np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3],
        "fortran": np.asfortranarray(pruned((30, 20), 0.3, 5)),
        "truths": np.array([True, False, True]),
        "far apart": far_apart,
        **small(),
    }
    data = bytes_of(tensors, code)
    assert same(decoded(data), tensors)
    assert bytes_of(tensors, code) == data


def test_another_byte_order_comes_back_in_this_machines() -> None:
    (again,) = decoded(bytes_of({"w": np.array([1, 0, 258], ">i4")})).values()
    assert again.dtype == np.int32
    assert again.tolist() == [1, 0, 258]


@each_code
@pytest.mark.parametrize("keep", [0.002, 0.1, 1.0])
def test_tensors_of_many_blocks_come_back(code: How, keep: float) -> None:
    drawn = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    tensors: Tensors = {"codebook": pruned((700, 1000), keep, 32), "bytes": drawn}
    assert same(decoded(bytes_of(tensors, code)), tensors)


@each_code
@pytest.mark.parametrize(("shape", "keep"), [((400, 5000), 0.1), ((50, 10_000), 1.0)])
def test_decoding_takes_less_than_1_mb_beside_the_tensor(
    tmp_path: Path, shape: tuple[int, int], keep: float, code: How
) -> None:
    tensor = pruned(shape, keep, 32)
    tensor[:, shape[1] // 2 :] *= np.random.default_rng(1).random(shape[0])[:, None] < 0.3
    write(tmp_path / "net.fcz", {"w": tensor + np.float32(0)}, {}, code=code)
    tracemalloc.start()
    try:
        with read(tmp_path / "net.fcz") as file:
            for _ in file.tensors():
                pass
        assert tracemalloc.get_traced_memory()[1] < tensor.nbytes + 1_000_000
    finally:
        tracemalloc.stop()


def test_network_and_order_come_back(tmp_path: Path) -> None:
    write(tmp_path / "net.fcz", {name: np.zeros(2) for name in "zay"}, NETWORK)
    with read(tmp_path / "net.fcz") as file:
        assert file.network == NETWORK
        assert [outline.name for outline in file.outlines] == list("zay")
        for _ in range(2):
            assert [name for name, _ in file.tensors()] == list("zay")


REFUSED: list[tuple[Tensors, dict[str, Any], str, str]] = [
    ({"w": np.array(["a"])}, {}, "best", "w is of <U1"),
    ({"w": np.zeros(1, np.complex128)}, {}, "best", "w is of complex128"),
    ({"w": np.zeros(1)}, {"x": float("nan")}, "best", "has to be JSON"),
    ({"w": np.zeros(1)}, {"model": object()}, "best", "has to be JSON"),
    ({"w" * 5000: np.zeros(1)}, {}, "best", "a name of 5000 bytes"),
    ({}, {}, "gzip", "code is 'gzip'; expected one of best, huffman"),
]


@pytest.mark.parametrize(("tensors", "network", "code", "part"), REFUSED)
def test_what_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, tensors: Tensors, network: dict[str, Any], code: Any, part: str
) -> None:
    path = tmp_path / "net.fcz"
    path.write_bytes(b"before")
    with refused(FirecaffeError, [part]):
        write(path, tensors, network, code=code)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [
        ("net.fcz", b"before")
    ]
