"""The answer of a function: on a console, in a notebook, in pictures and in files."""

import codecs
import dataclasses
import io
import sys
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from firecaffe.api.argument_checks import check_target
from firecaffe.errors import RecipeError
from firecaffe.files import atomic_replace, write_atomically
from firecaffe.output import harmless
from firecaffe.value_checks import digits_of

if TYPE_CHECKING:
    from firecaffe.planner.cluster import Cluster

UNCUT_WIDTH = 170


class LiteralConsole(Console):
    """A console that shows texts literally, because they may come from a stranger.

    Brackets are no markup, and control characters have no effect.
    """

    def __init__(self, **words: Any) -> None:
        super().__init__(markup=False, highlight=False, **words)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def make_console(stderr: bool = False) -> Console:
    console = LiteralConsole(stderr=stderr)
    if console.is_terminal:
        return console
    return LiteralConsole(stderr=stderr, width=UNCUT_WIDTH)


def progress(title: str, is_shown: bool) -> Callable[[str], None]:
    """Return a function that shows a line on a terminal's stderr, in place of the one before."""
    # No spinner: its thread would take processor time from the measurement.
    console = make_console(stderr=True)

    def say(what: str) -> None:
        if is_shown and console.is_terminal:
            console.print(f"{title}: {what:30}", end="\r")

    return say


PLAIN: dict[str, Any] = {"show_edge": False, "padding": (0, 1, 0, 0)}
"""The style of a table that is aligned with the lines around it."""


def numbers_table(
    *headers: str, texts: Sequence[str] = (), no_wrap: bool = True, **words: Any
) -> Table:
    """Return an empty table whose columns hold numbers, except those of `texts`."""
    table = Table(box=SIMPLE_HEAD, **words)
    for header in headers:
        table.add_column(header, justify="left" if header in texts else "right", no_wrap=no_wrap)
    return table


def time_text(seconds: float) -> str:
    return f"{digits_of(seconds)} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


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


def replace_unencodable() -> None:
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


def write_cluster(write: str | Path, cluster: "Cluster") -> str:
    """Write a file for `firecaffe plan`; the cluster gets its name. Return a line that says so."""
    path = Path(write)
    named = dataclasses.replace(cluster, name=path.stem)
    write_atomically(path, tomli_w.dumps(as_table(named)))
    return f"wrote {write}"


def as_table(cluster: "Cluster") -> dict[str, Any]:
    """Return the content of a cluster file, without values at their defaults."""
    return {name: value for name, value in _table(cluster).items() if value not in (None, {}, [])}


def _table(value: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if dataclasses.is_dataclass(part):
            table[field.name] = _table(part)
        elif isinstance(part, tuple) and part and dataclasses.is_dataclass(part[0]):
            table[field.name] = [_table(row) for row in part]
        elif part != field.default and part is not None:
            table[field.name] = list(part) if isinstance(part, tuple) else part
    return table


PAGE = '<pre tabindex="0" style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


class Answer(ABC):
    """The result of a function of firecaffe. Its `repr` is what the command prints.

    A notebook shows it with the command's colors.
    """

    notes: Sequence[str] = ()
    """Warnings, which the command prints to stderr."""

    width = UNCUT_WIDTH
    """The width of printed text, in columns, without a terminal."""
    least_width = 0
    """The least width on a terminal; a narrower one breaks the lines."""

    @abstractmethod
    def to_dict(self) -> Any:
        """Return dicts, lists, strings and numbers: what `--json` prints, if the command has it."""

    @abstractmethod
    def _parts(self) -> Iterable[RenderableType]:
        """Yield tables, and lines as strings."""

    def print_to(self, console: Console) -> None:
        """Print what the command prints."""
        for part in self._parts():
            console.print(part, soft_wrap=isinstance(part, str))

    def _print_all(self, is_plain: bool) -> Console:
        # In a notebook, rich would print into the cell and not into the file.
        console = LiteralConsole(
            file=io.StringIO(),
            width=self.width,
            color_system=None if is_plain else "truecolor",
            force_jupyter=False,
            record=True,
        )
        for note in self.notes:
            console.print(f"warning: {note}", soft_wrap=True)
        self.print_to(console)
        return console

    def __repr__(self) -> str:
        text = self._print_all(is_plain=True).export_text()
        return "\n".join(line.rstrip() for line in text.rstrip("\n").splitlines())

    def _repr_html_(self) -> str:
        console = self._print_all(is_plain=False)
        return console.export_html(inline_styles=True, code_format=PAGE)


SUFFIXES = (".png", ".html")
PICTURE_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{0}</title>
<style>body {{ margin: 0 auto; max-width: 80rem; font: 16px/1.4 system-ui, sans-serif; }}
h1 {{ font-size: 1.3rem; margin: .5rem; }} img {{ max-width: 100%; }}</style>
<main><h1>{0}</h1><img alt="{1}" src="data:image/png;base64,{2}"></main></html>"""


def check_picture(word: str, name: str, overwrite: bool, suffixes: tuple[str, ...]) -> None:
    """Check a picture's path like `check_target`. Raises RecipeError if matplotlib is missing."""
    check_target(word, name, overwrite, suffixes)
    if name:
        load_figure(word)


def load_figure(word: str = "--plot") -> Any:
    """Load matplotlib's Figure for option `word`. Raises RecipeError without matplotlib.

    A figure without pyplot needs no screen, and changes no setting of a notebook.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RecipeError(f"{word} needs matplotlib: pip install 'firecaffe[plot]'") from None
    return Figure


def disable_math_text(figure: Any) -> None:
    """Show titles and names literally: a `$` in them begins no formula."""
    for axes in figure.axes:
        legend = axes.get_legend()
        names = legend.get_texts() if legend is not None else ()
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *names):
            text.set_parse_math(False)


def write_picture(path: Path, figure: Any, title: str, alternative: str) -> None:
    """Write a figure whole or not at all. `alternative` is the text for those who cannot see it."""
    disable_math_text(figure)
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    content = picture.getvalue()
    if path.suffix == ".html":
        content = PICTURE_PAGE.format(title, alternative, b64encode(content).decode()).encode()
    with atomic_replace(path) as aside:
        aside.write_bytes(content)
