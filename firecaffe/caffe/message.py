"""What a file of Caffe's says: named values in their order, each with its line.

There is no schema. Whoever asks for a value says of which kind it must be; what nobody has asked
for in the end is what was not understood, so nothing is left out in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeGuard

from firecaffe.errors import RecipeError

INT64 = 2**63
FLAGS = {"true": True, "t": True, "True": True, "false": False, "f": False, "False": False}
"""protobuf's words for a bool."""


class CaffeError(RecipeError):
    """A file of Caffe's is damaged, or says what cannot be; it names the file and the line."""


class Word(str):
    """A value without quotes that is no number: a member of an enum, true or false."""

    __slots__ = ()


class Field(NamedTuple):
    """One value of a message."""

    name: str
    value: int | float | str | Word | Message
    """A number; a str, which was in quotes; a Word; or a message."""
    line: int
    """From 1; 0 in a binary file, and of what was made here."""


class Message:
    """Fields in the file's order, and which of their names have been asked for."""

    __slots__ = ("_asked", "fields", "line", "where")

    def __init__(self, fields: Sequence[Field] = (), line: int = 0, where: str = "") -> None:
        """where: the file, for errors."""
        self.fields = list(fields)
        self.line, self.where = line, where
        self._asked: set[str] | None = None

    @property
    def asked(self) -> set[str]:
        """The names; made when they are needed, for most messages are small and many."""
        if self._asked is None:
            self._asked = set()
        return self._asked

    def error(self, what: str, line: int | None = None) -> CaffeError:
        """An error about this message, or about one line; to be raised."""
        place = self.line if line is None else line
        return CaffeError(f"{self.where}{f':{place}' if place else ''}: {printable(what)}")

    def all(self, name: str) -> list[Field]:
        """Each field of that name."""
        self.asked.add(name)
        return [each for each in self.fields if each.name == name]

    def has(self, name: str) -> bool:
        return bool(self.all(name))

    def line_of(self, name: str) -> int:
        """The line of the last field of that name; the message's own if there is none."""
        return next((each.line for each in reversed(self.fields) if each.name == name), self.line)

    def messages(self, name: str) -> list[Message]:
        """Raises: CaffeError if one is no message; and so the others below."""
        found = []
        for each in self.all(name):
            if not isinstance(each.value, Message):
                raise self._wrong(each, f"{name} {{ … }}")
            found.append(each.value)
        return found

    def message(self, name: str) -> Message:
        """The one of that name; an empty one if there is none. Several are merged, as in
        protobuf.
        """
        found = self.messages(name)
        if len(found) == 1:
            return found[0]
        line = found[0].line if found else self.line
        merged = Message([each for part in found for each in part.fields], line, self.where)
        for part in found:
            part._asked = merged.asked
        return merged

    def integers(self, name: str) -> list[int]:
        found = []
        for each in self.all(name):
            value = each.value
            if not _is_whole(value):
                raise self._wrong(each, "a whole number")
            found.append(int(value))
        return found

    def integer(self, name: str, default: int = 0) -> int:
        """The last one: protobuf's rule for all that is given twice."""
        return (self.integers(name) or [default])[-1]

    def numbers(self, name: str) -> list[float]:
        found = []
        for each in self.all(name):
            if not isinstance(each.value, int | float):
                raise self._wrong(each, "a number")
            found.append(float(each.value))
        return found

    def number(self, name: str, default: float = 0.0) -> float:
        return (self.numbers(name) or [default])[-1]

    def texts(self, name: str) -> list[str]:
        found = []
        for each in self.all(name):
            if not isinstance(each.value, str) or isinstance(each.value, Word):
                raise self._wrong(each, '"…"')
            found.append(each.value)
        return found

    def text(self, name: str, default: str = "") -> str:
        return (self.texts(name) or [default])[-1]

    def flag(self, name: str, default: bool = False) -> bool:
        return (self.flags(name) or [default])[-1]

    def flags(self, name: str) -> list[bool]:
        found = []
        for each in self.all(name):
            value = each.value
            if isinstance(value, Word) and value in FLAGS:
                found.append(FLAGS[value])
            elif value in (0, 1):
                found.append(value == 1)
            else:
                raise self._wrong(each, "true or false")
        return found

    def choice(self, name: str, members: Sequence[str], default: str) -> str:
        """A member of an enum: by its name, or by its number, which is its place in `members`;
        places that have no member are "".
        """
        return (self.choices(name, members) or [default])[-1]

    def choices(self, name: str, members: Sequence[str]) -> list[str]:
        found = []
        for each in self.all(name):
            value = each.value
            if isinstance(value, int) and 0 <= value < len(members):
                value = Word(members[value])
            if not isinstance(value, Word) or value == "" or value not in members:
                raise self._wrong(each, f"one of {', '.join(filter(None, members))}")
            found.append(str(value))
        return found

    def ignore(self, *names: str) -> None:
        """Takes note that these change nothing here, as which library computes a layer; of a
        message, all that it says.
        """
        self.asked.update(names)
        for each in self.fields:
            if each.name in names and isinstance(each.value, Message):
                each.value.ignore(*(inner.name for inner in each.value.fields))

    def unread(self, path: str = "") -> Iterator[tuple[str, int]]:
        """Path and line of each field that nobody has asked for, here and in the messages below."""
        for each in self.fields:
            name = f"{path}.{each.name}" if path else each.name
            if each.name not in self.asked:
                yield name, each.line
            elif isinstance(each.value, Message):
                yield from each.value.unread(name)

    def _wrong(self, field: Field, expected: str) -> CaffeError:
        return self.error(f"{field.name} is {shown(field.value)}; expected {expected}", field.line)


def _is_whole(value: object) -> TypeGuard[int | float]:
    """Of at most 64 bits; "1.0" too."""
    return isinstance(value, int | float) and value == value // 1 and -INT64 <= value < INT64


def shown(value: object) -> str:
    """A value in a line about it."""
    if isinstance(value, Message):
        return "{ … }"
    if isinstance(value, str) and not isinstance(value, Word):
        return f'"{value:.60}"'
    return f"{value!s:.60}"


def printable(text: str) -> str:
    """A text as it can stand in a line."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
