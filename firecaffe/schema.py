"""JSON and TOML that may be anyone's: one schema for each kind of file, checked as it is read.

A schema is a type that msgspec knows. A `TypedDict` says which words have to be there, and of which
type; the words beside them stay, and it is a dictionary that comes back. A dataclass is made. A
`Struct` is made while JSON is read, so that the words beside it take no memory.
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
from firecaffe.files import MOST_BYTES, read_bytes, read_lines

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A whole number that JSON's readers agree on, from 0."""
Positive = Annotated[int, Meta(ge=1, le=2**53)]
"""The same from 1."""
Amount = Annotated[float, Meta(ge=0, le=1e30)]
"""Seconds, bytes, shares: finite, and not negative, and some may be added up."""
Real = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""A number of which some may be added up, and squared."""


OF_BYTE = b"\\udc"
"""How JSON begins a byte of a file's name that is no UTF-8, as Python has it, and msgspec not."""


def parse_json(data: bytes) -> Any:
    """Raises: ValueError, RecursionError. Infinities and NaN are none of JSON's."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        if OF_BYTE not in data:
            raise
        return json.loads(data.decode(), parse_constant=_no_number)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON's")


def parse_toml(data: bytes) -> Any:
    """Raises: ValueError, RecursionError."""
    try:
        # A path in it may be no UTF-8.
        return tomllib.loads(data.decode("utf-8", errors="surrogateescape"))
    except ValueError as error:
        raise ValueError(f"is no TOML ({error})") from error


def checked(words: Any, kind: type[T]) -> T:
    """Words as a schema has them. Raises: ValueError naming the word that is wrong."""
    try:
        made: T = msgspec.convert(words, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_said(str(error), words)) from error
    return words if is_typeddict(kind) else made


def check_known(words: Any, made: Any, place: str = "$") -> None:
    """Raises: ValueError if words have one that there is not in the dataclass made of them, or in
    one inside.
    """
    if dataclasses.is_dataclass(made):
        known = [each.name for each in dataclasses.fields(made)]
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
    """A text as a schema has it. Raises: ValueError in one line."""
    data = data.encode() if isinstance(data, str) else data
    try:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and OF_BYTE not in data:
            return msgspec.json.decode(data, type=kind)
        words = parse(bytes(data))
    except RecursionError:
        raise ValueError("nested too deep") from None
    except msgspec.ValidationError as error:
        raise ValueError(_said(str(error), None)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is no JSON ({error})") from error
    return checked(words, kind)


def read_file(
    path: Path,
    kind: type[T],
    error: type[FirecaffeError],
    parse: Callable[[bytes], Any] = parse_json,
    most_bytes: int = MOST_BYTES,
    absent: str = "No such file or directory",
    where: str = "",
) -> T:
    """What a file holds, as a schema has it.

    Args:
        path: The file.
        kind: The schema.
        error: What is raised, in one line with the file and the word, if it cannot be read.
        parse: `parse_json` or `parse_toml`.
        most_bytes: Its length at most.
        absent: What it means if the file is not there.
        where: What the line calls it. Empty: its path.
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
    """The rows of a file of JSON lines, one at a time; a last line cut short by a fault is left
    out. A file that is not there has none.

    holding: of those alone that have this text in them, which is faster for a few among many.

    Raises: the error, in one line with the file, the line and the word.
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


def _said(line: str, words: Any) -> str:
    """msgspec's words, with the place first, and what is there: `$.step: expected int, got str,
    found '3'`.
    """
    said, _, place = line.partition(" - at ")
    said, place = re.sub("`", "", said[:1].lower() + said[1:]), place.strip("`") or "$"
    return f"{place}: {said}{_found(words, place)}"


def _found(words: Any, place: str) -> str:
    """What is at a place, if it is short; msgspec does not say all of some places."""
    for word, number in re.findall(r"\.([^.[]+)|\[([^]]+)\]", place):
        try:
            words = words[int(number) if number else word]
        except (LookupError, TypeError, ValueError):
            return ""
    return f", found {words!r:.60}" if isinstance(words, int | float | str) else ""
