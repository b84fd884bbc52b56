"""What is printed if the terminal, or a pipe, takes fewer characters than Unicode has."""

import codecs
import io
import sys

PLAIN_SIGNS = {
    **dict.fromkeys("─━", "-"),
    **dict.fromkeys("═", "="),
    **dict.fromkeys("│┃", "|"),
    **dict.fromkeys("╪╞╡┼├┤", "+"),
    **dict.fromkeys("►→", ">"),
    **dict.fromkeys("◄←", "<"),
    "…": "...",
    "±": "+-",
    "×": "x",
    "µ": "u",
    "·": "*",
}
"""Signs of one column stay signs of one column, so that pictures stay pictures."""

ENCODING_ERRORS = "firecaffe-plain"


def print_plainly() -> None:
    """Makes the process's output show a plain sign for what its encoding does not have. Of a file's
    name that is no UTF-8 it has the bytes.
    """
    codecs.register_error(ENCODING_ERRORS, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ENCODING_ERRORS)


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    sign = error.object[error.start]
    is_byte = "\udc80" <= sign <= "\udcff"  # as Python has those of a file's name
    return bytes([ord(sign) - 0xDC00]) if is_byte else PLAIN_SIGNS.get(sign, "?"), error.start + 1
