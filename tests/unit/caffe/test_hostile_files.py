"""Damaged and hostile files: one clear line or a parse; never more memory than twice the file and
10 MB.
"""

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from firecaffe.caffe import caffemodel, mean, solverstate, text
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.phase import PHASES, layers_of
from firecaffe.caffe.upgrade import current
from firecaffe.caffe.wire import field, varint
from tests.unit.caffe.nets import texts

FILES = Path(__file__).parents[2] / "golden" / "caffe" / "files"
ALLOWED = 10 << 20
Reader = Callable[[Path], Any]


def net(path: Path) -> None:
    found, _ = current(text.read(path))
    for phase in PHASES:
        layers_of(found, phase)
    list(found.unread())


def numbers(tag: int, kind: str, packed: bool) -> bytes:
    """A caffemodel whose one blob is said in another way than Caffe's."""
    values = [struct.pack(kind, number / 3) for number in range(40)]
    data = field(tag, b"".join(values)) if packed else [varint(tag << 3 | 5) + v for v in values]
    blob = [*data, *field(7, [*field(1, 4), *field(1, 10)]), *field(999, b"other")]
    return b"".join(field(100, [*field(1, b"a"), *field(7, blob), bytes([0x2B, 0x2C])]))


def files() -> dict[str, tuple[bytes, Reader]]:
    found: dict[str, tuple[bytes, Reader]] = {name: (each, net) for name, each in texts().items()}
    for name in ("current", "v1", "v0"):
        found[f"{name}.caffemodel"] = (FILES / f"{name}.caffemodel").read_bytes(), caffemodel.read
    found["mean"] = (FILES / "mean.binaryproto").read_bytes(), mean.read
    found["state"] = (FILES / "sgd.solverstate").read_bytes(), solverstate.read
    found["unpacked"] = numbers(5, "<f", packed=False), caffemodel.read
    found["double"] = numbers(8, "<d", packed=True), caffemodel.read
    return found


NASTY = (
    *(sign.encode() for sign in "{}<>[]:,;-#\"'\\\n"),
    *(
        b"\0",
        b"\r",
        b"\xef\xbb\xbf",
        b"\xff" * 10,
        b"\x0b",
        b"\x0c",
        b"\x7f",
        b"\x80\x80\x80\x80\x08",
    ),
    *(b"9" * 500, b"0x", b"1e999", b"\\x", b"\\777", b"\\ud800", b"{" * 60, b"a{}" * 50, b" nan "),
    *(
        b"layer { ",
        b"layers { ",
        b"layer: 1 ",
        b"type: 3 ",
        b'input: "z" ',
        b"include { phase: 7 }",
    ),
    *(b"\xa2\x06", b"\x12", b"\x3a", b"\x2a", b"\x2d", b"\x08\xff\xff\xff\xff\x07", b"\x0a\x00"),
)


def damaged(content: bytes, other: bytes, dice: random.Random) -> bytes:
    """One to four changes: bits, bytes, parts that are gone, doubled, moved or another file's."""
    found = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at, length = dice.randrange(len(found) + 1), dice.choice((1, 1, 2, 8, 64, 1024))
        part = bytes(found[at : at + length])
        way = dice.randrange(8)
        if way == 0 and part:
            found[at] ^= 1 << dice.randrange(8)
        elif way == 1 and part:
            found[at] = dice.randrange(256)
        elif way == 2:
            del found[at : at + length]
        elif way == 3:
            found[at:at] = part * dice.choice((1, 2, 100))
        elif way == 4:
            del found[at:]
        elif way == 5:
            start = dice.randrange(len(other))
            found[at:at] = other[start : start + length]
        else:
            found[at:at] = dice.choice(NASTY)
    return bytes(found)


@contextmanager
def bounded(size: int) -> Iterator[None]:
    """Checks what is allocated meanwhile."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    yield
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before <= 2 * size + ALLOWED, f"{(peak - before) / 2**20:.1f} MB"


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def outcome(content: bytes, read: Reader, path: Path) -> str:
    """The line, which must be one, of an error; empty for a parse."""
    path.write_bytes(content)
    line = ""
    with bounded(len(content)):
        try:
            read(path)
        except CaffeError as error:
            line = str(error)
    assert line.isprintable()
    return line


def check_mutations(count: int, path: Path) -> None:
    found = files()
    contents = [content for content, _ in found.values()]
    assert len(found) == 20
    outcomes = []
    for number, (name, (content, read)) in enumerate(found.items()):
        assert not outcome(content, read, path) or name == "words"
        dice = random.Random(number)
        for _ in range(count // len(found)):
            changed = damaged(content, dice.choice(contents), dice)
            outcomes.append(outcome(changed, read, path))
    assert len(outcomes) == count
    assert 0.2 < sum(map(bool, outcomes)) / count < 0.95  # neither all refused nor all accepted


@pytest.mark.usefixtures("traced")
def test_a_thousand_mutations(tmp_path: Path) -> None:
    check_mutations(1_000, tmp_path / "x")


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_ten_thousand_mutations(tmp_path: Path) -> None:
    check_mutations(10_000, tmp_path / "x")


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


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_files_made_to_take_memory_or_time(is_slow: bool, tmp_path: Path) -> None:
    for found, read, slow, are_read in (
        (hostile_texts(), text.read, SLOW_TEXTS, TEXTS_THAT_ARE_READ),
        (hostile_binaries(), caffemodel.read, SLOW_BINARIES, BINARIES_THAT_ARE_READ),
    ):
        names = slow if is_slow else found.keys() - slow
        parsed = {name for name in names if not outcome(found[name], read, tmp_path / "x")}
        assert parsed == are_read & names
