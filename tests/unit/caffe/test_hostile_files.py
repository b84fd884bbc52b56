"""Damaged and hostile files: one clear line or a parse, in twice the file's memory and 10 MB."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firecaffe.caffe import caffemodel, text
from firecaffe.caffe.binary import field, varint
from firecaffe.caffe.message import CaffeError

ALLOWED = 10 << 20


def outcome(content: bytes, read: Callable[[Path], Any], path: Path) -> str:
    """The line, which must be one, of an error; empty for a parse."""
    path.write_bytes(content)
    line = ""
    tracemalloc.start()
    try:
        read(path)
    except CaffeError as error:
        line = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= 2 * len(content) + ALLOWED, f"{peak / 2**20:.1f} MB"
    assert line.isprintable()
    return line


MANY = 40_000


def hostile_texts() -> dict[str, bytes]:
    names = [b"a%d:1 " % number for number in range(MANY)]
    return {
        "messages": b"a{}" * MANY,
        "wide strings": b"a:'%s'" % "😀".encode() * 39_000,
        "one string": b"a:'" + b"x" * (4 << 20) + b"'",
        "neighbors": b"a:" + b"'x'" * (1 << 18),
        "escapes": b"a:'" + b"\\a" * (1 << 18) + b"'",
        "no end": b"a:'" + b"\\a" * (1 << 20),
        "digits": b"a:" + b"1" * (1 << 20) + b"x",
        "fractions": b"a:" + b"1." * (1 << 20),
        "signs": b"a:" + b"-" * (1 << 20),
        "openings": b"a{" * (1 << 20),
        "comments": b"#\n" * (1 << 20) + b"?",
        "spaces": b" " * (1 << 20) + b"?",
        "names": b"".join(names),
        "floats": b"a:.5 " * MANY,
        "words": b"a:bc " * MANY,
        "strings": b"a:'bc'" * MANY,
        "a list": b"a:[" + b"1.5," * (MANY - 1) + b"1]",
        "deep messages": b"a{b{c{d{}}}}" * (MANY // 4),
    }


SLOW_TEXTS = {"names", "floats", "words", "strings", "a list", "deep messages"}
TEXTS_THAT_ARE_READ = SLOW_TEXTS | {"messages", "wide strings"}


def hostile_binaries() -> dict[str, bytes]:
    def layer(*fields: Any) -> bytes:
        return b"".join(field(100, [part for each in fields for part in each]))

    def shape(*dims: int) -> Any:
        return field(7, field(1, b"".join(map(varint, dims))))

    empty, data = field(7, shape(0)), bytes(4 << 20)
    names = [b"%04d" % number + "😀".encode() * 249 for number in range(10_000)]
    return {
        "blobs": layer(field(1, b"a"), *[empty] * 20_000),
        "packed": layer(field(7, [*shape(1 << 20), *field(5, data)])),
        "pieces": layer(field(7, [*shape(0), *field(5, b"") * 10_000])),
        "unpacked": layer(field(7, [*shape(1 << 20), b"\x2d1234" * (1 << 20)])),
        "doubles": layer(field(7, [*shape(1 << 19), *field(8, data)])),
        "no blobs": b"".join(layer(field(7, b"") * 20_000) for _ in range(15)),
        "dims": layer(field(7, [*shape(2**31 - 1, 2**31 - 1), *field(5, b"1234")])),
        "open groups": b"\x0b" * 300_000,
        "length": b"\xa2\x06\xff\xff\xff\xff\x07" + bytes(100),
        "layers": b"".join(layer(field(1, b"%d" % n), empty) for n in range(10_000)),
        "names": b"".join(layer(field(1, name), empty) for name in names),
        "axes": b"".join(layer(field(7, shape(*[0] * 32))) for _ in range(10_000)),
        "groups": b"\x0b\x0c" * 150_000,
        "fields": b"\x08\x01" * 300_000,
    }


SLOW_BINARIES = {"layers", "names", "axes", "groups", "fields"}
BINARIES_THAT_ARE_READ = {"blobs", "packed", "pieces", "unpacked", "doubles"}
BINARIES_THAT_ARE_READ |= {"layers", "names", "axes"}


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_files_made_to_take_memory_or_time(is_slow: bool, tmp_path: Path) -> None:
    for contents, read, slow, are_read in (
        (hostile_texts(), text.read, SLOW_TEXTS, TEXTS_THAT_ARE_READ),
        (hostile_binaries(), caffemodel.read, SLOW_BINARIES, BINARIES_THAT_ARE_READ),
    ):
        names = slow if is_slow else contents.keys() - slow
        parsed = {name for name in names if not outcome(contents[name], read, tmp_path / "x")}
        assert parsed == are_read & names
