"""Schemas for JSON and TOML files that may come from anyone, checked as they are read.

A schema is a type that msgspec knows. A `TypedDict` gives the required keys; the result keeps all
others. A dataclass is instantiated. A `Struct` is made while JSON is parsed, without memory for
further keys.
"""

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, is_typeddict

import msgspec
from msgspec import Meta

from firecaffe.errors import FirecaffeError, RunError
from firecaffe.files import MAX_BYTES, read_bytes, read_lines

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A whole number from 0 that all JSON readers represent exactly."""
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]
"""Seconds, bytes or a share: finite, not negative, and small enough to be summed."""
Real = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""A finite number, small enough to be squared and summed."""


OF_BYTE = b"\\udc"
"""The start of JSON's escape for a non-UTF-8 byte of a file name. msgspec does not read it."""


def parse_json(data: bytes) -> Any:
    """Parse JSON, without infinities and NaN. Raises ValueError, RecursionError."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        if OF_BYTE not in data:
            raise
        return json.loads(data.decode(), parse_constant=_no_number)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON's")


MAX_BITS = 64
"""Most bits of a whole number: Python cannot print those of many, nor make them floats."""

MANY_PARTS = re.compile(
    r"""(?:(?:(?<![\w-])[\w-]++|(?<!\\)"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}"""
)
"""A key of tables in tables, for which tomllib takes time and memory by the square of its parts."""


def parse_toml(data: bytes) -> Any:
    """Parse TOML. Raises ValueError, RecursionError."""
    text = data.decode("utf-8", errors="surrogateescape")  # a path in it may not be UTF-8
    if MANY_PARTS.search(text):
        raise ValueError("nested too deep")
    try:
        parsed = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"is no TOML ({error})") from error
    _check_bits(parsed)
    return parsed


def _check_bits(value: Any) -> None:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"a whole number of {value.bit_length():,} bits, more than {MAX_BITS}")
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_bits(part)


def checked(words: Any, kind: type[T]) -> T:
    """Convert parsed data to a schema. Raises ValueError that names the wrong key."""
    try:
        made: T = msgspec.convert(words, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_said(str(error), words)) from error
    return words if is_typeddict(kind) else made


def check_known(words: Any, made: Any, place: str = "$") -> None:
    """Raise ValueError for a key of `words` that the dataclass made of it lacks, at any depth."""
    if dataclasses.is_dataclass(made):
        known = [field.name for field in dataclasses.fields(made)]
        for word, value in words.items():
            if word not in known:
                raise ValueError(f"{place}: no word {word!r}; there are {', '.join(known)}")
            check_known(value, getattr(made, word), f"{place}.{word}")
    elif isinstance(made, tuple | list):
        for number, (value, part) in enumerate(zip(words, made, strict=True)):
            check_known(value, part, f"{place}[{number}]")


def decoded(
    data: bytes | bytearray | str, kind: type[T], parse: Callable[[bytes], Any] = parse_json
) -> T:
    """Parse a text and convert it to a schema. Raises ValueError in one line."""
    data = data.encode() if isinstance(data, str) else data
    try:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and OF_BYTE not in data:
            return msgspec.json.decode(data, type=kind)
        parsed = parse(bytes(data))
    except RecursionError:
        raise ValueError("nested too deep") from None
    except msgspec.ValidationError as error:
        raise ValueError(_said(str(error), None)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is no JSON ({error})") from error
    return checked(parsed, kind)


def read_file(
    path: Path,
    kind: type[T],
    error: type[FirecaffeError],
    parse: Callable[[bytes], Any] = parse_json,
    most_bytes: int = MAX_BYTES,
    absent: str = "No such file or directory",
    where: str = "",
) -> T:
    """Read a file and convert it to a schema, with `parse_json` or `parse_toml`.

    Raises `error` in one line, which names the file (as `where`, if given) and the key, or says
    `absent` if there is no file.
    """
    where = where or str(path)
    try:
        return decoded(read_bytes(path, most_bytes), kind, parse)
    except FileNotFoundError:
        raise error(f"{where}: {absent}") from None
    except (OSError, ValueError) as problem:
        raise error(f"{where}: cannot be read ({_reason(problem)})") from problem


def read_rows(
    path: Path, kind: type[T], error: type[FirecaffeError] = RunError, holding: bytes = b""
) -> Iterator[T]:
    """Yield the rows of a file of JSON lines; none if there is no file.

    A last line that a crash cut short is left out. With `holding`, only lines that contain it are
    parsed, which is faster. Raises `error` in one line, with the file, the line and the key.
    """
    number = 0
    try:
        for number, line in enumerate(read_lines(path), start=1):  # noqa: B007
            if line.endswith(b"\n") and holding in line:
                yield decoded(line, kind)
    except FileNotFoundError:
        return
    except OSError as problem:
        raise error(f"{path}: cannot be read ({_reason(problem)})") from problem
    except ValueError as problem:
        raise error(f"{path}: cannot be read (line {number}: {problem})") from problem


def _reason(problem: Exception) -> str:
    return str(getattr(problem, "strerror", None) or problem)


def _said(line: str, data: Any) -> str:
    """Return msgspec's message as `$.step: expected int, got str, found '3'`."""
    said, _, place = line.partition(" - at ")
    said, place = re.sub("`", "", said[:1].lower() + said[1:]), place.strip("`")
    return f"{place}: {said}{_found(data, place)}" if place else said.removeprefix("object ")


def _found(data: Any, place: str) -> str:
    for word, number in re.findall(r"\.([^.[]+)|\[([^]]+)\]", place):
        try:
            data = data[int(number) if number else word]
        except (LookupError, TypeError, ValueError):  # msgspec does not name some places in full
            return ""
    return f", found {data!r:.60}" if isinstance(data, int | float | str) else ""
