"""What is written is read, to the bit: any type, any shape, any values."""

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from firecaffe.compression.fcz import CODES, read, write
from firecaffe.compression.fcz.format import DTYPES
from firecaffe.compression.fcz.sequence import How
from firecaffe.errors import FirecaffeError
from tests.kit.models_refused import refused
from tests.unit.compression.fcz.made import NETWORK, bytes_of, decoded, pruned, same, small

ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)


@given(st.dictionaries(st.text(max_size=8), ARRAYS, max_size=3), st.sampled_from(CODES))
def test_any_tensors_come_back(tensors: dict[str, NDArray[Any]], code: How) -> None:
    assert same(decoded(bytes_of(tensors, code)), tensors)


@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.floats(0, 1),
    st.integers(1, 300),
    st.integers(0, 99),
    st.sampled_from(CODES),
)
def test_any_pruned_tensor_comes_back(
    rows: int, columns: int, keep: float, values: int, seed: int, code: How
) -> None:
    tensors = {"w": pruned((rows, columns), keep, values, seed)}
    assert same(decoded(bytes_of(tensors, code)), tensors)


@pytest.mark.parametrize("code", CODES)
def test_odd_values_come_back(code: How) -> None:
    bits = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0, 1, 0x7F800000], np.uint32)
    tensors: dict[str, NDArray[Any]] = {
        "nan": bits.view(np.float32),
        "many nans": np.resize(bits, 1000).view(np.float32),
        "number": np.array(-0.0),
        "one zero": np.zeros((1, 1), np.float16),
        "empty": np.empty((3, 0, 2), np.int64),
        "strided": np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3],
        "fortran": np.asfortranarray(pruned((30, 20), 0.3, 5)),
        "truths": np.array([True, False, True]),
    }
    assert same(decoded(bytes_of(tensors, code)), tensors)


def test_another_byte_order_comes_back_in_this_machines() -> None:
    tensor = np.array([1, 0, 258], ">i4")
    found = decoded(bytes_of({"w": tensor}))["w"]
    assert found.dtype == np.int32
    assert found.tolist() == [1, 0, 258]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("keep", [0.002, 0.1, 0.6, 1.0])
def test_tensors_of_many_blocks_come_back(code: How, keep: float) -> None:
    tensors = {
        "codebook": pruned((700, 1000), keep, 32),
        "bytes": np.random.default_rng(0).standard_normal(200_000).astype(np.float32),
    }
    assert same(decoded(bytes_of(tensors, code)), tensors)


@pytest.mark.parametrize("code", CODES)
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


def test_distances_longer_than_any_symbol_come_back() -> None:
    tensor = np.zeros(300_000, np.float32)
    tensor[[0, 1, 40_000, 299_999]] = [1, 2, 3, 4]
    for code in CODES:
        assert same(decoded(bytes_of({"w": tensor}, code)), {"w": tensor})


def test_network_and_order_come_back(tmp_path: Path) -> None:
    tensors = {name: np.zeros(2) for name in "zay"}
    write(tmp_path / "net.fcz", tensors, NETWORK)
    with read(tmp_path / "net.fcz") as file:
        assert file.network == NETWORK
        assert [each.name for each in file.outlines] == list("zay")
        assert [name for name, _ in file.tensors()] == list("zay")
        assert [name for name, _ in file.tensors()] == list("zay")  # once more


def test_same_tensors_give_the_same_bytes() -> None:
    for code in CODES:
        assert bytes_of(small(), code) == bytes_of(small(), code)


def test_a_file_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "net.fcz"
    write(path, small(), NETWORK)
    before = path.read_bytes()
    with pytest.raises(FirecaffeError, match="has to be JSON"):
        write(path, small(), {"model": object()})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["net.fcz"]


@pytest.mark.parametrize(
    ("tensors", "network", "words"),
    [
        ({"w": np.array(["a"])}, {}, "w is of <U1; a .fcz file has float32"),
        ({"w": np.zeros(1, np.complex128)}, {}, "w is of complex128"),
        ({"w": np.zeros(1)}, {"x": float("nan")}, "has to be JSON"),
        ({"w" * 5000: np.zeros(1)}, {}, "a name of 5000 bytes"),
    ],
)
def test_what_cannot_be_written_is_said(
    tmp_path: Path, tensors: dict[str, NDArray[Any]], network: dict[str, Any], words: str
) -> None:
    with refused(FirecaffeError, [words]):
        write(tmp_path / "net.fcz", tensors, network)
    assert not list(tmp_path.iterdir())


def test_an_unknown_code_is_said(tmp_path: Path) -> None:
    with pytest.raises(FirecaffeError, match="code is 'gzip'; expected one of best, huffman"):
        write(tmp_path / "net.fcz", {}, {}, code="gzip")  # type: ignore[arg-type]
