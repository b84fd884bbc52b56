"""Where tables are printed: as wide as the terminal, and uncut if there is none.

What is printed if the terminal, or a pipe, takes fewer characters than Unicode has.

Files that a command writes where it is told to: checked before it begins.
"""

import codecs
import io
import sys
from pathlib import Path

from rich.console import Console

from firecaffe.errors import RecipeError, RunError

UNCUT_WIDTH = 170


def make_console(stderr: bool = False) -> Console:
    console = Console(highlight=False, stderr=stderr)
    if console.is_terminal:
        return console
    return Console(highlight=False, stderr=stderr, width=UNCUT_WIDTH)


def time_words(seconds: float) -> str:
    """Three digits, in seconds or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


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


def check_target(word: str, name: str, overwrite: bool, suffixes: tuple[str, ...] = ()) -> None:
    """name: the file's, after the option `word`; empty if there is none.

    Raises: RecipeError if its name does not end in one of `suffixes`; RunError if there is no
    folder for it, or it is there already and is not to be written over.
    """
    if not name:
        return
    path = Path(name)
    if suffixes and path.suffix not in suffixes:
        raise RecipeError(f"{word} is {name}; it must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise RunError(f"{word} {name}: there is no folder {path.parent}")
    if path.exists() and not overwrite:
        raise RunError(f"{word} {name}: exists already; --overwrite writes over it")
