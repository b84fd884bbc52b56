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
from tests.kit.models_refused import refused
from tests.unit.compression.fcz.made import (
    Tensors,
    body_start,
    bytes_of,
    decoded,
    same,
    small,
    smooth,
    with_sums,
)

MAX_BYTES = 1 << 20
"""What the tensors of a changed file may need: the small one needs 12 KB."""

CHANGES, TRACED = 600, 150
"""How many changes, and of how many of them the memory is measured."""

each_code = pytest.mark.parametrize("code", CODES)


def refusal(data: bytes) -> str:
    """The line that a file is refused with."""
    with refused(CheckpointError, ["net.fcz: "]) as caught:
        decoded(data, most_bytes=MAX_BYTES)
    return str(caught.value)


def with_header(stored: bytes, said: int) -> bytes:
    """A file of a header that says its length, with the right sum, and no body."""
    start = MAGIC + b"\1" + varint(len(stored)) + varint(said) + varint(0)
    return start + zlib.crc32(stored, zlib.crc32(start)).to_bytes(4, "little") + stored


@each_code
def test_a_file_cut_anywhere_is_refused(code: How) -> None:
    data = bytes_of(small(), code)
    for length in range(len(data)):
        refusal(data[:length])


@each_code
def test_a_flipped_bit_anywhere_is_refused(code: How) -> None:
    """Each bit of the numbers before the sums, and a bit of each byte that has one."""
    data = bytes_of(small(), code)
    start = body_start(data)
    numbers = {*range(8 * 16), *range(8 * start, 8 * (start + 10))}
    for place in sorted(numbers.union(range(0, 8 * len(data), 9))):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        refusal(bytes(changed))


def test_what_is_no_such_file_is_said(tmp_path: Path) -> None:
    data = bytes_of(small())
    version_9 = MAGIC + b"\x09" + data[len(MAGIC) + 1 :]
    for content, part in (
        (data + b"x", f"it has {len(data) + 1} bytes, and says that it has {len(data)}"),
        (version_9, "it is of version 9; this program reads 1"),
        (b"PK\x03\x04" + bytes(200), "it begins with b'PK\\x03', not with b'FCZ'"),
        (b"", "it begins with b''"),
    ):
        assert part in refusal(content)
    with refused(CheckpointError, ["none.fcz: No such file"]):
        read(tmp_path / "none.fcz")


@pytest.mark.parametrize("mended", [False, True])
def test_hundreds_of_changes(mended: bool) -> None:
    """Changed bytes, and changed bytes whose checksums are right again: those may be decoded, to
    other tensors of the same kind, or be refused. More of them are in `benchmarks.faults.fuzz`.
    """
    files = [bytes_of(small(), code) for code in CODES]
    assert [with_sums(data) for data in files] == files
    tracemalloc.start()
    drawn = random.Random(0)
    refusals = 0
    for number in range(CHANGES):
        data = _changed(files[number % len(files)], drawn)
        if number == TRACED:
            assert tracemalloc.get_traced_memory()[1] < 2 * MAX_BYTES
            tracemalloc.stop()  # it takes ten times as long
        try:
            decoded(with_sums(data) if mended else data, most_bytes=MAX_BYTES)
        except (CheckpointError, DamagedError):  # the latter, of what has no sums to mend
            refusals += 1
    assert refusals > CHANGES * (0.2 if mended else 0.975)


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
        with refused(CheckpointError, ["need 4,611,686,018,427,387,904 bytes; allowed"]):
            read(tmp_path / "net.fcz")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    needed = sum(each.nbytes for each in small().values())
    with refused(CheckpointError, [f"need {needed:,} bytes; allowed are 1,000"]):
        decoded(bytes_of(small()), most_bytes=1000)


def test_few_bytes_do_not_stand_for_much_memory(tmp_path: Path) -> None:
    few, more = (
        header_bytes({}, [Outline("w", "uint8", (FEW_DECODED + extra,))], 0) for extra in (0, 1)
    )
    (tmp_path / "few.fcz").write_bytes(few)
    (tmp_path / "more.fcz").write_bytes(more)
    with read(tmp_path / "few.fcz"), read(tmp_path / "more.fcz", most_bytes=FEW_DECODED + 1):
        pass
    with refused(CheckpointError, [f"16,777,216 of a file of {len(more)}"]):
        read(tmp_path / "more.fcz")
    with pytest.raises(RecipeError, match="of which a reader allows"):
        write(tmp_path / "zeros.fcz", {"w": np.zeros(FEW_DECODED + 1, np.uint8)}, {})
    assert not list(tmp_path.glob("*zeros*"))


def test_a_header_that_inflates_to_more_than_it_says_is_refused() -> None:
    plain = varint(2) + b"{}" + varint(0)
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    stored = deflate.compress(plain + bytes(10_000_000)) + deflate.flush()
    for said in (len(stored) + 5, 1 << 24, 1 << 40):
        tracemalloc.start()
        refusal(with_header(stored, said))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 << 20


def test_a_header_that_misleads_is_refused() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    nested = varint(len(deep)) + deep + varint(0)
    one = Outline("w", "float32", (1,))
    for content, part in (
        (header_bytes({}, [one, one], 0), "same name"),
        (header_bytes({}, [Outline("w", "float32", (1,) * 33)], 0), "33 dim"),
        (header_bytes({}, [Outline("w", "float32", (1 << 62, 0))], 0), "dimensions span"),
        (header_bytes({}, [Outline("w", "int8", (0, 1 << 40, 1 << 40))], 0), "dimensions span"),
        (header_bytes([], [], 0), "no JSON object"),  # type: ignore[arg-type]
        (with_header(nested, len(nested)), "no JSON"),
    ):
        assert part in refusal(content)


def test_nothing_is_read_beyond_the_last_tensor() -> None:
    """A block too many, with all lengths and sums right."""
    data = bytes_of({"w": np.ones(3, np.float32)})
    body = data[body_start(data) :] * 2
    start = header_bytes({}, [Outline("w", "float32", (3,))], len(body))
    assert "more follows after the last tensor" in refusal(start + body)


def test_a_block_with_words_too_many_is_refused() -> None:
    written = io.BytesIO()
    writer = BlockWriter(written)
    writer.number(5, 10)
    writer.flush()
    symbols, place = read_varint(written.getvalue(), 0)
    counts, payload = varint(symbols) + varint(3), written.getvalue()[place + 5 :] + bytes(8)
    data = counts + zlib.crc32(payload, zlib.crc32(counts)).to_bytes(4, "little") + payload
    with pytest.raises(DamagedError, match="more bytes than its symbols"):
        BlockReader(io.BytesIO(data), len(data)).number(10)


@pytest.mark.parametrize("wrong", [b"", b"\x80", b"\x80\x00", b"\xff" * 10])
def test_numbers_that_are_none_are_refused(wrong: bytes) -> None:
    with pytest.raises(DamagedError):
        read_varint(wrong, 0)


def test_rows_that_go_one_by_one_are_counted_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes time, and many small tensors have many."""
    tensors: Tensors = {name: smooth(12, 15, 60) for name in ("a", "b", "c")}
    whole, two = tmp_path / "all.fcz", tmp_path / "two.fcz"
    write(whole, tensors, {})
    rows = 180
    monkeypatch.setattr(mask, "MAX_NEAR_ROWS_OF_FILE", 2 * rows)
    with read(whole) as file, pytest.raises(CheckpointError, match="look at neigh"):
        list(file.tensors())
    write(two, tensors, {})  # the third does without
    with read(two) as file:
        assert same(dict(file.tensors()), tensors)
    assert two.stat().st_size > whole.stat().st_size


def test_a_codebook_that_does_not_ascend_is_refused() -> None:
    """So that there is one file for the same values."""
    body = io.BytesIO()
    writer = BlockWriter(body)
    writer.number(values.CODEBOOK, values.WAYS)
    writer.number(2 - 1, values.MAX_VALUES)
    values._put_bytes(writer, np.array([2, 1], np.uint8), False, "best")
    writer.flush()
    reader = BlockReader(io.BytesIO(body.getvalue()), len(body.getvalue()))
    with pytest.raises(DamagedError, match="do not ascend"):
        list(values.read_values(reader, np.dtype(np.uint8), 9, False, None, 0))
