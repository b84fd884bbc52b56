"""Damage to files: of bytes, of words in texts, of values in JSON, and of the file as such."""

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NASTY = (
    *("0", "-1", "1", "2", "1.5", "-0.0", "1e308", "1e-320", "1e400", "-1e400", "NaN", "Infinity"),
    *("inf", "nan", str(2**31), str(2**63), str(-(2**63)), str(2**64), "9" * 30, "9" * 5000),
    *("null", "true", "false", '""', '"x"', '"$"', '"-"', '"\\ud800"', '"\\u0000"', '"../../x"'),
    *("[]", "{}", "[[]]", "[1, 2]", '{"a": 1}', "[" * 3000, '{"a":' * 3000, '"' + "x" * 5000 + '"'),
    *("=", ",", ":", "\n", "\0", "\t", "#", "'", '"""', "\ufeff", "\u202e", "é", "subprocess:run"),
)
"""Words that programs trip over."""

VALUES: tuple[Any, ...] = (
    *(
        0,
        1,
        -1,
        2,
        7,
        1.5,
        -0.5,
        1e308,
        -1e308,
        5e-324,
        2**31,
        2**53,
        2**63,
        2**64,
        10**30,
        -(2**63),
    ),
    *(
        float("nan"),
        float("inf"),
        None,
        True,
        False,
        "",
        "x",
        "$",
        "-1",
        "x" * 5000,
        "\0",
        "a/../b",
    ),
    *([], {}, [[]], [1], ["x"], {"a": 1}, {"": None}, [None], [0] * 3, {"0": [1, 0.5]}),
)
"""Values that readers trip over."""

NUMBERS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
)

WORD = re.compile(rb"[A-Za-z0-9_.+-]+|\"(?:[^\"\\\\\n]|\\\\.)*\"|[^\sA-Za-z0-9]")

ODD_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": lambda path: os.mkfifo(path),
    "folder": lambda path: path.mkdir(),
    "no end": lambda path: path.symlink_to("/dev/zero"),
    "missing": lambda _: None,
    "empty": lambda path: path.touch(),
}
"""What may lie there in place of a file."""

ODD = 0.01
"""How often it does."""


def damage(path: Path, content: bytes, rng: random.Random) -> None:
    """Puts a damaged file in place of one that held this content."""
    path.unlink(missing_ok=True)
    if rng.random() < ODD:
        rng.choice(list(ODD_FILES.values()))(path)
    else:
        path.write_bytes(mutated(content, rng))


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content with one to four changes."""
    is_text = b"\0" not in content and bool(content)
    for _ in range(rng.randint(1, 4)):
        kinds = (_of_json, _of_words, _of_lines, _of_bytes) if is_text else (_of_bytes,)
        content = rng.choice(kinds)(content, rng)
    return content


def _of_bytes(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    place = rng.randint(0, len(changed))
    stop = min(len(changed), place + rng.choice((1, 2, 4, 8, 16, 64, 1024)))
    match rng.choice(
        ("flip", "bit", "cut", "insert", "number", "repeat", "remove", "move", "zero")
    ):
        case "flip" if place < len(changed):
            changed[place] ^= rng.randint(1, 255)
        case "bit" if place < len(changed):
            changed[place] ^= 1 << rng.randint(0, 7)
        case "cut":
            del changed[place:]
        case "insert":
            changed[place:place] = rng.randbytes(rng.randint(1, 16))
        case "number":
            length = rng.choice((1, 2, 4, 8))
            number = rng.choice(NUMBERS) % (1 << 8 * length)
            changed[place : place + length] = number.to_bytes(length, rng.choice(("little", "big")))
        case "repeat":
            changed[place:place] = changed[place:stop] * rng.choice((1, 3, 100))
        case "remove":
            del changed[place:stop]
        case "move":
            other = rng.randint(0, len(changed))
            changed[other:other] = changed[place:stop]
        case "zero":
            changed[place:stop] = bytes(stop - place)
    return bytes(changed)


def _of_words(content: bytes, rng: random.Random) -> bytes:
    """Another word, from here or from those that programs trip over."""
    words = list(WORD.finditer(content[:200_000]))
    if not words:
        return content
    where = rng.choice(words)
    new = rng.choice(words)[0] if rng.random() < 0.3 else rng.choice(NASTY).encode()
    return content[: where.start()] + new + content[where.end() :]


def _of_lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    place, other = (rng.randrange(len(lines)) for _ in range(2)) if lines else (0, 0)
    match rng.choice(("remove", "repeat", "swap", "join")) if lines else "none":
        case "remove":
            del lines[place]
        case "repeat":
            lines[place:place] = [lines[other]] * rng.choice((1, 2, 50))
        case "swap":
            lines[place], lines[other] = lines[other], lines[place]
        case "join":
            lines[place] = lines[place].rstrip(b"\n")
    return b"".join(lines)


def _of_json(content: bytes, rng: random.Random) -> bytes:
    """A value of another kind in JSON, or in a line of JSON; other texts get another word."""
    lines = content.splitlines(keepends=True)
    place = rng.randrange(len(lines)) if lines else 0
    for before, part, behind in (
        (b"", content, b""),
        (b"".join(lines[:place]), lines[place] if lines else b"", b"".join(lines[place + 1 :])),
    ):
        try:
            tree = json.loads(part)
        except (ValueError, RecursionError):
            continue
        places = list(_places(tree))
        if places:
            _change(*rng.choice(places), rng)
        end = b"\n" if part.endswith(b"\n") else b""
        return before + json.dumps(tree).encode() + end + behind
    return _of_words(content, rng)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])


def _change(holder: Any, key: Any, rng: random.Random) -> None:
    value = holder[key]
    match rng.choice(("nasty", "nasty", "remove", "scale", "rename", "wrap")):
        case "remove":
            del holder[key]
        case "scale" if isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = value * rng.choice((-1, 0, 0.5, 1000, 10**9)) + rng.choice((0, 1))
        case "rename" if isinstance(holder, dict):
            holder[rng.choice([*map(str, holder), "x", "", "-1", "999"])] = holder.pop(key)
        case "wrap":
            holder[key] = rng.choice(([value], {"a": value}, str(value)))
        case _:
            holder[key] = rng.choice(VALUES)
