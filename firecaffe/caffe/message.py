"""The content of a Caffe file: named values in file order, each with its line.

There is no schema: code that reads a value states its kind. Fields that no code has read were not
understood. They can be listed, so nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

from firecaffe.errors import RecipeError

INT64 = 2**63
FLAGS: dict[Any, bool] = {
    **dict.fromkeys(("true", "t", "True", 1), True),
    **dict.fromkeys(("false", "f", "False", 0), False),
}


class CaffeError(RecipeError):
    """Error in a Caffe file: damage, or an impossible value. The text names file and line."""


class Word(str):
    """An unquoted value that is not a number: a member of an enum, true or false."""

    __slots__ = ()


class Field(NamedTuple):
    name: str
    value: int | float | str | Word | Message
    """A number, a str (quoted in the file), a Word (unquoted) or a message."""
    line: int
    """The line, from 1; 0 in a binary file and for fields made in code."""


class Note(NamedTuple):
    """A remark on a file. `place` is FILE:LINE or FILE."""

    place: str
    what: str


class Message:
    """Fields in the file's order, and the names of fields that have been read."""

    __slots__ = ("_asked", "fields", "line", "where")

    def __init__(self, fields: Sequence[Field] = (), line: int = 0, where: str = "") -> None:
        self.fields = list(fields)
        self.line, self.where = line, where
        self._asked: set[str] | None = None

    @property
    def asked(self) -> set[str]:
        if self._asked is None:
            self._asked = set()
        return self._asked

    def changed(self, without: Collection[str] = (), added: Iterable[Field] = ()) -> Message:
        kept = [field for field in self.fields if field.name not in without]
        return Message([*kept, *added], self.line, self.where)

    def place(self, at: int | str | None = None) -> str:
        """Return FILE:LINE, or FILE without a line. `at`: a line or a field; None: the message."""
        line = self.line if at is None else self.line_of(at) if isinstance(at, str) else at
        return f"{self.where}:{line}" if line else self.where

    def error(self, what: str, at: int | str | None = None) -> CaffeError:
        return CaffeError(f"{self.place(at)}: {printable(what)}")

    def all(self, name: str) -> list[Field]:
        self.asked.add(name)
        return [field for field in self.fields if field.name == name]

    def has(self, name: str) -> bool:
        return bool(self.all(name))

    def line_of(self, name: str) -> int:
        return next(
            (field.line for field in reversed(self.fields) if field.name == name), self.line
        )

    def _checked(self, name: str, fits: Callable[[Any], bool], expected: str) -> list[Any]:
        fields = self.all(name)
        for field in fields:
            if not fits(field.value):
                what = f"{name} is {shown(field.value)}; expected {expected}"
                raise self.error(what, field.line)
        return [field.value for field in fields]

    def messages(self, name: str) -> list[Message]:
        """Return all messages of that name. All readers raise CaffeError for another kind."""
        return self._checked(name, lambda value: isinstance(value, Message), f"{name} {{ … }}")

    def message(self, name: str) -> Message:
        """Return the message of that name, or an empty one. Several are merged, as in protobuf."""
        parts = self.messages(name)
        if len(parts) == 1:
            return parts[0]
        line = parts[0].line if parts else self.line
        merged = Message([field for part in parts for field in part.fields], line, self.where)
        for part in parts:
            part._asked = merged.asked
        return merged

    def integers(self, name: str) -> list[int]:
        return [int(value) for value in self._checked(name, _is_whole, "a whole number")]

    def integer(self, name: str, default: int = 0) -> int:
        """Return the last value: protobuf's rule for a field that occurs twice."""
        return (self.integers(name) or [default])[-1]

    def numbers(self, name: str) -> list[float]:
        return [float(value) for value in self._checked(name, _is_finite, "a finite number")]

    def number(self, name: str, default: float = 0.0) -> float:
        return (self.numbers(name) or [default])[-1]

    def texts(self, name: str) -> list[str]:
        return self._checked(name, _is_quoted, '"…"')

    def text(self, name: str, default: str = "") -> str:
        return (self.texts(name) or [default])[-1]

    def flag(self, name: str, default: bool = False) -> bool:
        return (self.flags(name) or [default])[-1]

    def flags(self, name: str) -> list[bool]:
        return [FLAGS[value] for value in self._checked(name, _is_flag, "true or false")]

    def choice(self, name: str, members: Sequence[str], default: str) -> str:
        """Return an enum member, given by name or by its index in `members` ("" is none)."""
        return (self.choices(name, members) or [default])[-1]

    def choices(self, name: str, members: Sequence[str]) -> list[str]:
        known: dict[Any, str] = {member: member for member in members} | dict(enumerate(members))

        def is_member(value: Any) -> bool:
            return isinstance(value, int | Word) and bool(known.get(value))

        expected = f"one of {', '.join(filter(None, members))}"
        return [known[value] for value in self._checked(name, is_member, expected)]

    def ignore(self, *names: str) -> None:
        """Mark fields without effect as read, with all fields of their messages."""
        self.asked.update(names)
        for field in self.fields:
            if field.name in names and isinstance(field.value, Message):
                field.value.ignore(*(inner.name for inner in field.value.fields))

    def unread(self, path: str = "") -> Iterator[tuple[str, int]]:
        """Yield path and line of each unread field, here and in inner messages."""
        for field in self.fields:
            name = f"{path}.{field.name}" if path else field.name
            if field.name not in self.asked:
                yield name, field.line
            elif isinstance(field.value, Message):
                yield from field.value.unread(name)


def _is_whole(value: Any) -> bool:
    """Whether `value` is a whole number of at most 64 bits, such as 1.0."""
    return isinstance(value, int | float) and value == value // 1 and -INT64 <= value < INT64


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _is_quoted(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, Word)


def _is_flag(value: Any) -> bool:
    return value in FLAGS and not _is_quoted(value)


def shown(value: object) -> str:
    if isinstance(value, Message):
        return "{ … }"
    if _is_quoted(value):
        return f'"{value:.60}"'
    return f"{value!s:.60}"


def printable(text: str) -> str:
    """Escape the characters that cannot be printed in a line."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
