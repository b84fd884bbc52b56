"""protobuf's text format, without a schema: what a .prototxt file is written in.

Source: "Text Format Language Specification", protobuf.dev/reference/protobuf/textformat-spec.
Bounded: a file's bytes, the fields in it and how deep they are nested.
"""

import math
import re
from pathlib import Path

from firecaffe.caffe.message import CaffeError, Field, Message, Word

MOST_BYTES = 16 << 20
MOST_FIELDS = 50_000
MOST_DEPTH = 50

TOKEN = re.compile(
    r"""[ \t\r\f\v]+ | \#[^\n]*
    | (?P<newline>\n)
    | (?P<string>"(?:[^"\\\n]|\\[^\n])*" | '(?:[^'\\\n]|\\[^\n])*')
    | (?P<number>-?\s*(?:0[xX][0-9a-fA-F]+
        | (?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?))(?![\w.])
    | (?P<word>-?[A-Za-z_][A-Za-z0-9_]*)
    | (?P<sign>[][{}<>:,;])""",
    re.VERBOSE,
)
CLOSING = {"{": "}", "<": ">"}
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))")
END = ("end", "", 0)

Token = tuple[str, str, int]
"""Kind, text and line."""


def read(path: Path) -> Message:
    """Raises: CaffeError, one line, if the file cannot be read or is no text of this format."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CaffeError(f"{path}: cannot be read, {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise CaffeError(
            f"{path}: more than {MOST_BYTES:,} bytes; a prototxt is text, with no weights"
        )
    try:
        return parse(content.decode(), str(path))
    except UnicodeDecodeError as error:
        raise CaffeError(
            f"{path}: byte {error.start} is no text; expected a prototxt (a .caffemodel goes to "
            "--weights)"
        ) from error


def parse(text: str, where: str = "prototxt") -> Message:
    """The message that a text says. where: what errors call it.

    Raises: CaffeError with the line of the fault.
    """
    return _Parser(text, where).message(1, "", 0)


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        self.place, self.line, self.count = 0, 1, 0
        self.token = END
        self.advance()

    def error(self, what: str, line: int | None = None) -> CaffeError:
        return CaffeError(f"{self.where}:{self.line if line is None else line}: {what}")

    def advance(self) -> Token:
        """The token; the next one then stands there."""
        before = self.token
        while self.place < len(self.text):
            found = TOKEN.match(self.text, self.place)
            if found is None:
                sign = self.text[self.place]
                what = "a string that does not end" if sign in "\"'" else f"{sign!r}"
                raise self.error(f"found {what}; expected name: value")
            self.place = found.end()
            kind = found.lastgroup
            if kind == "newline":
                self.line += 1
            elif kind is not None:
                self.token = (kind, found[0], self.line)
                return before
        self.token = ("end", "the end of the file", self.line)
        return before

    def message(self, line: int, closing: str, depth: int) -> Message:
        if depth > MOST_DEPTH:
            raise self.error(f"messages are nested more than {MOST_DEPTH} deep")
        fields: list[Field] = []
        while True:
            kind, text, at = self.advance()
            if closing and text == closing and kind == "sign":
                return Message(fields, line, self.where)
            if kind == "end" and not closing:
                return Message(fields, line, self.where)
            if kind == "sign" and text in ",;" and fields:
                continue
            if kind != "word":
                missing = f" or {closing!r}, which closes line {line}" if closing else ""
                raise self.error(f"found {text:.40}; expected a name{missing}", at)
            self.values(text, at, fields, depth)

    def values(self, name: str, line: int, fields: list[Field], depth: int) -> None:
        """The value or the list of values after a name."""
        has_colon = self.token[1] == ":" and self.token[0] == "sign"
        if has_colon:
            self.advance()
        if self.token[:2] == ("sign", "[") and has_colon:
            self.advance()
            while self.token[:2] != ("sign", "]"):
                self.value(name, line, fields, depth, has_colon)
                if self.token[:2] == ("sign", ","):
                    self.advance()
                elif self.token[:2] != ("sign", "]"):
                    raise self.error(
                        f"found {self.token[1]:.40}; expected ',' or ']'", self.token[2]
                    )
            self.advance()
            return
        self.value(name, line, fields, depth, has_colon)

    def value(self, name: str, line: int, fields: list[Field], depth: int, has_colon: bool) -> None:
        self.count += 1
        if self.count > MOST_FIELDS:
            raise self.error(f"more than {MOST_FIELDS:,} values")
        kind, text, at = self.advance()
        if kind == "sign" and text in CLOSING:
            fields.append(Field(name, self.message(at, CLOSING[text], depth + 1), line))
        elif not has_colon:
            raise self.error(f"found {text:.40} after {name}; expected ':' or '{{'", at)
        elif kind == "string":
            parts = [text]
            while self.token[0] == "string":  # neighbours are one string
                parts.append(self.advance()[1])
            fields.append(Field(name, "".join(map(unquoted, parts)), line))
        elif kind == "number":
            fields.append(Field(name, self.number(text, at), line))
        elif kind == "word":
            special = {"inf": math.inf, "infinity": math.inf, "nan": math.nan}
            plain = text.lstrip("-").lower()
            if plain in special:
                fields.append(
                    Field(name, -special[plain] if text[0] == "-" else special[plain], line)
                )
            elif text[0] == "-":
                raise self.error(f"{name} is {text:.40}; expected a value", at)
            else:
                fields.append(Field(name, Word(text), line))
        else:
            raise self.error(f"found {text:.40} after {name}:; expected a value", at)

    def number(self, text: str, line: int) -> int | float:
        digits = re.sub(r"\s", "", text)
        if len(digits) > 400:
            raise self.error("a number of more than 400 signs", line)
        if "x" in digits.lower():
            return int(digits, 16)
        if re.fullmatch(r"-?0[0-7]+", digits):
            return int(digits, 8)
        if re.fullmatch(r"-?[0-9]+", digits):
            return int(digits)
        return float(digits.rstrip("fF"))


def unquoted(text: str) -> str:
    """The string that stands in quotes, with its escapes."""

    def one(found: "re.Match[str]") -> str:
        octal, hexadecimal, sign = found.groups()
        if octal:
            return chr(int(octal, 8) & 255)
        if hexadecimal:
            return chr(int(hexadecimal, 16))
        return ESCAPES.get(sign, sign)

    return ESCAPE.sub(one, text[1:-1])
