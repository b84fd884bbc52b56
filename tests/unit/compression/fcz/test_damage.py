"""Files that are cut, flipped, changed or made to mislead: one line each, in bounded memory."""

import io
import random
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from firecaffe.compression.fcz import CODES, mask, read, values, write
from firecaffe.compression.fcz.format import (
    FEW_DECODED,
    MAGIC,
    BlockReader,
    BlockWriter,
    DamagedError,
    Outline,
    header_bytes,
    read_varint,
    varint,
)
from firecaffe.compression.fcz.sequence import How
from firecaffe.errors import CheckpointError, RecipeError
from tests.unit.compression.fcz.made import (
    body_start,
    bytes_of,
    decoded,
    same,
    small,
    smooth,
    with_sums,
)

MOST_BYTES = 1 << 20
"""What the tensors of a changed file may need: the small one needs 12 KB."""

TRACED = 300
"""Changes of which the memory is measured."""


def refusal(data: bytes) -> str:
    """The line that a file is refused with."""
    with pytest.raises(CheckpointError) as caught:
        decoded(data, most_bytes=MOST_BYTES)
    line = str(caught.value)
    assert "net.fcz: " in line
    assert "\n" not in line
    return line


@pytest.mark.parametrize("code", CODES)
def test_a_file_cut_anywhere_is_refused(code: How) -> None:
    data = bytes_of(small(), code)
    for length in range(len(data)):
        refusal(data[:length])


def test_bytes_after_the_end_are_refused() -> None:
    data = bytes_of(small())
    assert f"it has {len(data) + 1} bytes, and says that it has {len(data)}" in refusal(data + b"x")


@pytest.mark.parametrize("code", CODES)
def test_a_flipped_bit_anywhere_is_refused(code: How) -> None:
    data = bytes_of(small(), code)
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        refusal(bytes(changed))


def test_another_version_is_refused_by_its_number() -> None:
    data = bytearray(bytes_of(small()))
    data[len(MAGIC)] = 9
    assert "it is of version 9; this program reads 1" in refusal(bytes(data))


def test_another_file_is_refused_by_its_first_bytes() -> None:
    assert "it begins with b'PK\\x03', not with b'FCZ'" in refusal(b"PK\x03\x04" + bytes(200))
    assert "it begins with b''" in refusal(b"")


@pytest.mark.parametrize("mended", [False, True])
def test_thousands_of_changes(mended: bool) -> None:
    """Changed bytes, and changed bytes whose checksums are right again: those may be decoded, to
    other tensors of the same kind, or be refused. More of them are in `benchmarks.faults.fuzz`.
    """
    files = [bytes_of(small(), code) for code in CODES]
    tracemalloc.start()
    drawn = random.Random(0)
    refused = 0
    for number in range(2_000):
        data = _changed(files[number % len(files)], drawn)
        if number == TRACED:
            assert tracemalloc.get_traced_memory()[1] < 2 * MOST_BYTES
            tracemalloc.stop()  # it takes ten times as long
        try:
            decoded(with_sums(data) if mended else data, most_bytes=MOST_BYTES)
        except (CheckpointError, DamagedError):  # the latter, of what has no sums to mend
            refused += 1
    assert refused > (400 if mended else 1_950)


def _changed(data: bytes, drawn: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(drawn.randint(1, 4)):
        place = drawn.randrange(len(changed))
        what = drawn.random()
        if what < 0.7:
            changed[place] = drawn.randrange(256)
        elif what < 0.85:
            del changed[place]
        else:
            changed.insert(place, drawn.randrange(256))
    return bytes(changed)


def test_tensors_too_large_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    huge = header_bytes({}, [Outline("w", "float32", (1 << 40, 1 << 20))], 0)
    (tmp_path / "net.fcz").write_bytes(huge)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"need 4,611,686,018,427,387,904 bytes; allowed"):
            read(tmp_path / "net.fcz")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    needed = sum(each.nbytes for each in small().values())
    with pytest.raises(CheckpointError, match=rf"need {needed:,} bytes; allowed are 1,000"):
        decoded(bytes_of(small()), most_bytes=1000)


def test_few_bytes_do_not_stand_for_much_memory(tmp_path: Path) -> None:
    few = header_bytes({}, [Outline("w", "uint8", (FEW_DECODED,))], 0)
    more = header_bytes({}, [Outline("w", "uint8", (FEW_DECODED + 1,))], 0)
    (tmp_path / "few.fcz").write_bytes(few)
    (tmp_path / "more.fcz").write_bytes(more)
    with read(tmp_path / "few.fcz"), read(tmp_path / "more.fcz", most_bytes=FEW_DECODED + 1):
        pass
    with pytest.raises(CheckpointError, match=rf"16,777,216 of a file of {len(more)}$"):
        read(tmp_path / "more.fcz")
    with pytest.raises(RecipeError, match="of which a reader allows"):
        write(tmp_path / "zeros.fcz", {"w": np.zeros(FEW_DECODED + 1, np.uint8)}, {})
    assert not list(tmp_path.glob("*zeros*"))


def test_no_elements_in_dimensions_that_no_array_has() -> None:
    for shape in ((1 << 62, 0), (0, 1 << 40, 1 << 40)):
        line = refusal(header_bytes({}, [Outline("w", "float32", shape)], 0))
        assert "a tensor's dimensions span" in line


def test_a_header_that_inflates_to_more_than_it_says_is_refused() -> None:
    plain = varint(2) + b"{}" + varint(0)
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    stored = deflate.compress(plain + bytes(10_000_000)) + deflate.flush()
    for said in (len(stored) + 5, 1 << 24, 1 << 40):
        start = MAGIC + b"\1" + varint(len(stored)) + varint(said) + varint(0)
        sum_ = zlib.crc32(stored, zlib.crc32(start)).to_bytes(4, "little")
        tracemalloc.start()
        refusal(start + sum_ + stored)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 << 20


def test_header_that_misleads_is_refused(tmp_path: Path) -> None:
    twice = [Outline("w", "float32", (1,))] * 2
    for outlines, words in ((twice, "same name"), ([Outline("w", "float32", (1,) * 33)], "33 dim")):
        assert words in refusal(header_bytes({}, outlines, 0))
    assert "no JSON object" in refusal(header_bytes([], [], 0))  # type: ignore[arg-type]
    deep = ("[" * 100_000 + "]" * 100_000).encode()
    plain = varint(len(deep)) + deep + varint(0)
    start = MAGIC + b"\1" + varint(len(plain)) * 2 + varint(0)
    sum_ = zlib.crc32(plain, zlib.crc32(start)).to_bytes(4, "little")
    assert "no JSON" in refusal(start + sum_ + plain)


def test_nothing_is_read_beyond_the_last_tensor(tmp_path: Path) -> None:
    """A block too many, with all lengths and sums right."""
    data = bytes_of({"w": np.ones(3, np.float32)})
    start = body_start(data)
    body = data[start:] * 2
    outlines = [Outline("w", "float32", (3,))]
    assert "more follows after the last tensor" in refusal(
        header_bytes({}, outlines, len(body)) + body
    )


def test_a_block_with_words_too_many_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    with open(path, "wb") as file:
        writer = BlockWriter(file)
        writer.number(5, 10)
        writer.flush()
    data = path.read_bytes()
    symbols, place = read_varint(data, 0)
    counts = varint(symbols) + varint(3)
    payload = data[place + 5 :] + bytes(8)
    path.write_bytes(
        counts + zlib.crc32(payload, zlib.crc32(counts)).to_bytes(4, "little") + payload
    )
    with open(path, "rb") as file, pytest.raises(DamagedError, match="more bytes than its symbols"):
        BlockReader(file, path.stat().st_size).number(10)


@pytest.mark.parametrize("wrong", [b"", b"\x80", b"\x80\x00", b"\xff" * 10])
def test_numbers_that_are_none_are_refused(wrong: bytes) -> None:
    with pytest.raises(DamagedError):
        read_varint(wrong, 0)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.fcz: No such file"):
        read(tmp_path / "none.fcz")


def test_what_helps_the_tests_is_right() -> None:
    data = bytes_of(small())
    assert with_sums(data) == data
    assert same(decoded(data), small())


def test_rows_that_go_one_by_one_are_counted_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes time, and many small tensors have many."""
    tensors = {name: smooth(12, 15, 60) for name in ("a", "b", "c")}
    write(tmp_path / "all.fcz", tensors, {})
    rows = 180
    monkeypatch.setattr(mask, "MOST_NEAR_ROWS_OF_FILE", 2 * rows)
    with read(tmp_path / "all.fcz") as file, pytest.raises(CheckpointError, match="look at neigh"):
        list(file.tensors())
    write(tmp_path / "two.fcz", tensors, {})  # the third does without
    with read(tmp_path / "two.fcz") as file:
        for name, array in file.tensors():
            assert array.tobytes() == tensors[name].tobytes()
    assert (tmp_path / "two.fcz").stat().st_size > (tmp_path / "all.fcz").stat().st_size


def test_a_codebook_that_does_not_ascend_is_refused() -> None:
    """So that there is one file for the same values."""
    body = io.BytesIO()
    writer = BlockWriter(body)
    writer.number(values.CODEBOOK, values.WAYS)
    writer.number(2 - 1, values.MOST_VALUES)
    values._put_bytes(writer, np.array([2, 1], np.uint8), False, "best")
    writer.flush()
    reader = BlockReader(io.BytesIO(body.getvalue()), len(body.getvalue()))
    with pytest.raises(DamagedError, match="do not ascend"):
        list(values.read_values(reader, np.dtype(np.uint8), 9, False, None, 0))
