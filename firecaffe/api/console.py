"""Output that fits the width and the characters of a terminal, and checks of output paths."""

import codecs
import io
import sys
from pathlib import Path

from rich.console import Console

from firecaffe.errors import RecipeError, RunError
from firecaffe.resume_advice import option

UNCUT_WIDTH = 170


def make_console(stderr: bool = False) -> Console:
    console = Console(highlight=False, stderr=stderr)
    if console.is_terminal:
        return console
    return Console(highlight=False, stderr=stderr, width=UNCUT_WIDTH)


def time_words(seconds: float) -> str:
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
"""Plain replacements. Drawing characters stay one column wide, so drawings keep their shape."""

ENCODING_ERRORS = "firecaffe-plain"


def print_plainly() -> None:
    """Replace characters that stdout or stderr cannot encode. File names keep their bytes."""
    codecs.register_error(ENCODING_ERRORS, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ENCODING_ERRORS)


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    sign = error.object[error.start]
    is_byte = "\udc80" <= sign <= "\udcff"  # of a file name that is not UTF-8
    return bytes([ord(sign) - 0xDC00]) if is_byte else PLAIN_SIGNS.get(sign, "?"), error.start + 1


def check_target(word: str, name: str, overwrite: bool, suffixes: tuple[str, ...] = ()) -> None:
    """Check the output path `name`, typed after the option `word`, unless it is empty.

    Raises RecipeError if its ending is not one of `suffixes`; RunError if its folder does not
    exist, or if the file exists and `overwrite` is false.
    """
    if not name:
        return
    path = Path(name)
    if suffixes and path.suffix not in suffixes:
        raise RecipeError(f"{word} is {name}; it must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise RunError(f"{word} {name}: there is no folder {path.parent}")
    if path.exists() and not overwrite:
        raise RunError(f"{word} {name}: exists already; {option('overwrite')} writes over it")
