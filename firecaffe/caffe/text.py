"""Reads and writes protobuf's text format without a schema: the format of .prototxt files.

Source: "Text Format Language Specification", protobuf.dev/reference/protobuf/textformat-spec. If it
leaves a choice, this parser follows protobuf's C++ parser, which Caffe uses. The bytes of a file,
its values and their nesting are bounded.
"""

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from firecaffe.caffe.message import CaffeError, Field, Message, Word, printable

MAX_BYTES = 16 << 20
MAX_VALUES = 40_000
MAX_DEPTH = 50
MAX_DIGITS = 400
MAX_STRING_BYTES = 20_000
MAX_WIDE_BYTES = 250_000
"""The maximum bytes of strings that are not ASCII, which may take four times as much memory."""

TOKEN = re.compile(
    rb"""(?P<string>"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+" | '[^'\\\n]*+(?:\\[^\n][^'\\\n]*+)*+')
    | (?P<number>(?:0[xX][0-9a-fA-F]++
        | (?:[0-9]++(?:\.[0-9]*+)?+ | \.[0-9]++)(?:[eE][+-]?[0-9]++)?+[fF]?+)(?![\w.]))
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*+)
    | (?P<sign>[][{}<>:,;-])""",
    re.VERBOSE,
)
SPACE = re.compile(rb"(?:[ \t\r\f\v\n]++|#[^\n]*+)*+")
CLOSING = {b"{": b"}", b"<": b">"}
SPECIAL = {"inf": math.inf, "infinity": math.inf, "nan": math.nan}
UINT64 = 2**64
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
ESCAPES = {
    **dict(zip("nrtabfv", "\n\r\t\a\b\f\v", strict=True)),
    **{sign: sign for sign in "\\'\"?"},
}
LATIN_1 = {0xDC00 + byte: byte for byte in range(128, 256)}
"""Map from the characters by which "surrogateescape" replaces bytes to Latin-1."""


class Token(NamedTuple):
    kind: str
    text: bytes
    line: int

    def __str__(self) -> str:
        return printable(decoded(self.text[:40])) if self.text else "the end of the file"


def decoded(content: bytes) -> str:
    """Decode UTF-8. Other bytes, such as comments in GBK, are read as Latin-1."""
    return content.decode(errors="surrogateescape").translate(LATIN_1)


def read(path: Path) -> Message:
    """Read a prototxt. Raises CaffeError (one line) if it cannot be read or parsed."""
    try:
        if not path.is_file():
            raise CaffeError(f"{path}: is no file; expected a prototxt")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CaffeError(
                f"{path}: {size:,} bytes; expected a prototxt, of text and at most {MAX_BYTES:,}"
            )
        content = path.read_bytes()
    except OSError as error:
        raise CaffeError(f"{path}: cannot be read, {error.strerror}") from error
    if b"\0" in content:
        raise CaffeError(
            f"{path}: byte {content.index(0):,} is no text; expected a prototxt (a .caffemodel "
            "goes to --weights)"
        )
    return parse(content, str(path))


def parse(text: str | bytes, where: str = "prototxt") -> Message:
    """Parse a text; errors call it `where`. Raises CaffeError with the line of the fault."""
    content = text.encode(errors="replace") if isinstance(text, str) else text
    return _Parser(content.removeprefix(BYTE_ORDER_MARK), where).message(1, b"", 0)


class _Parser:
    def __init__(self, content: bytes, where: str) -> None:
        self.content, self.where = content, where
        self.place, self.line, self.num_values, self.num_wide = 0, 1, 0, 0
        self.next = Token("end", b"", 1)
        self.take()

    def error(self, what: str, line: int) -> CaffeError:
        return CaffeError(f"{self.where}:{line}: {what}")

    def take(self) -> Token:
        taken = self.next
        space = SPACE.match(self.content, self.place)
        place = space.end() if space else self.place
        self.line += self.content.count(b"\n", self.place, place)
        match = TOKEN.match(self.content, place)
        if match is not None:
            self.place = match.end()
            self.next = Token(match.lastgroup or "", match[0], self.line)
        elif place == len(self.content):
            self.place, self.next = place, Token("end", b"", self.line)
        else:
            rest = self.content[place : place + 20].split(b"\n")[0]
            what = "a string that does not end: " if rest[:1] in (b'"', b"'") else ""
            shown = printable(decoded(rest))
            raise self.error(f"found {what}{shown}; expected name: value", self.line)
        return taken

    def takes(self, signs: bytes) -> bool:
        if self.next.kind != "sign" or self.next.text not in signs:
            return False
        self.take()
        return True

    def message(self, line: int, closing: bytes, depth: int) -> Message:
        if depth > MAX_DEPTH:
            raise self.error(f"messages are nested more than {MAX_DEPTH} deep", line)
        fields: list[Field] = []
        while True:
            token = self.take()
            if token.text == closing:
                return Message(fields, line, self.where)
            if token.kind != "word":
                close = f" or {closing.decode()}, which closes line {line}" if closing else ""
                raise self.error(f"found {token}; expected a name{close}", token.line)
            self.field(sys.intern(token.text.decode()), token.line, fields, depth)
            self.takes(b",;")

    def field(self, name: str, line: int, fields: list[Field], depth: int) -> None:
        has_colon = self.takes(b":")
        if not self.takes(b"["):
            fields.append(Field(name, self.value(name, depth, has_colon), line))
            return
        if self.takes(b"]"):
            return
        while True:
            fields.append(Field(name, self.value(name, depth, has_colon), line))
            if self.takes(b"]"):
                return
            if not self.takes(b","):
                raise self.error(f"found {self.next}; expected , or ]", self.next.line)

    def value(self, name: str, depth: int, has_colon: bool) -> int | float | str | Message:
        self.num_values += 1
        token = self.take()
        if self.num_values > MAX_VALUES:
            raise self.error(f"more than {MAX_VALUES:,} values", token.line)
        if token.text in CLOSING:
            return self.message(token.line, CLOSING[token.text], depth + 1)
        if not has_colon:
            raise self.error(f"found {token} after {name}; expected : or {{", token.line)
        if token.kind == "string":
            return self.string(token)
        sign = 1
        if token.text == b"-":
            sign, token = -1, self.take()
        if token.kind == "number":
            return sign * self.number(token)
        if token.kind == "word":
            word = token.text.decode()
            if word.lower() in SPECIAL:
                return sign * SPECIAL[word.lower()]
            if sign > 0:
                return Word(word)
        raise self.error(f"found {token} after {name}:; expected a value", token.line)

    def number(self, token: Token) -> int | float:
        text = token.text.lower()
        if len(text) > MAX_DIGITS:
            raise self.error(f"a number of more than {MAX_DIGITS} signs", token.line)
        if text.isdigit() and not re.match(rb"0[0-9]", text):
            return int(text) if int(text) < UINT64 else float(text)
        try:
            if text.startswith(b"0x"):
                value = int(text, 16)
            elif text.startswith(b"0") and text[1:2].isdigit():
                value = int(text, 8)
            else:
                return float(text.rstrip(b"f"))
        except ValueError:
            if not text.startswith(b"0"):  # possessive patterns of Python 3.11.2 let some through
                raise self.error(f"found {token}; expected a number", token.line) from None
            raise self.error(f"{token} begins with 0 and is not octal", token.line) from None
        if value >= UINT64:
            raise self.error(f"{token} has more than 64 bits", token.line)
        return value

    def string(self, token: Token) -> str:
        parts, size = [], 0
        while True:
            size += len(token.text)
            if size > MAX_STRING_BYTES:
                raise self.error(f"a string of more than {MAX_STRING_BYTES:,} bytes", token.line)
            parts.append(self.unquoted(token))
            if self.next.kind != "string":
                break
            token = self.take()
        content = b"".join(parts)
        if not content.isascii():
            self.num_wide += len(content)
            if self.num_wide > MAX_WIDE_BYTES:
                what = f"more than {MAX_WIDE_BYTES:,} bytes of strings that are not ASCII"
                raise self.error(what, token.line)
        return decoded(content)

    def unquoted(self, token: Token) -> bytes:
        def one(match: "re.Match[bytes]") -> bytes:
            octal, hexadecimal, short, long, sign = match.groups()
            try:
                if sign is not None:
                    return ESCAPES[sign.decode()].encode()
                if octal or hexadecimal:
                    return bytes([int(octal, 8) if octal else int(hexadecimal, 16)])
                return chr(int(short or long, 16)).encode()
            except (KeyError, ValueError, OverflowError):  # also a surrogate, or beyond Unicode
                shown = printable(decoded(match[0]))
                what = f"{shown} in a string is no character; a \\ is written \\\\"
                raise self.error(what, token.line) from None

        return ESCAPE.sub(one, token.text[1:-1])


ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def as_text(message: Message) -> str:
    return "".join(f"{line}\n" for line in _lines(message, ""))


def _lines(message: Message, indent: str) -> Iterator[str]:
    for field in message.fields:
        if isinstance(field.value, Message):
            yield f"{indent}{field.name} {{"
            yield from _lines(field.value, indent + "  ")
            yield f"{indent}}}"
        elif isinstance(field.value, str) and not isinstance(field.value, Word):
            yield f'{indent}{field.name}: "{field.value.translate(ESCAPED)}"'
        else:
            yield f"{indent}{field.name}: {field.value}"
