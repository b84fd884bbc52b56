"""What a function of firecaffe comes to: shown as its command prints it, in a notebook, as JSON."""

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, RenderableType

from firecaffe.api.console import UNCUT_WIDTH

PAGE = '<pre tabindex="0" style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


class Answer(ABC):
    """What a function of firecaffe came to. Its `repr` is what the command prints.

    A notebook shows it with the command's colors.
    """

    notes: Sequence[str] = ()
    """Warnings, which the command prints to stderr."""

    width = UNCUT_WIDTH
    """Most columns of what is printed where no terminal says how wide it is."""
    least_width = 0
    """Columns on a narrower terminal, which breaks the lines."""

    @abstractmethod
    def to_dict(self) -> Any:
        """Return dicts, lists, strings and numbers: what `--json` prints, if the command has it."""

    @abstractmethod
    def _parts(self) -> Iterable[RenderableType]:
        """Yield tables, and lines as strings."""

    def print_to(self, console: Console) -> None:
        """Print what the command prints."""
        for part in self._parts():
            if isinstance(part, str):
                console.print(part, markup=False, highlight=False, soft_wrap=True)
            else:
                console.print(part)

    def _print_all(self, is_plain: bool) -> Console:
        # In a notebook, rich would print into the cell and not into the file.
        console = Console(
            file=io.StringIO(),
            width=self.width,
            highlight=False,
            color_system=None if is_plain else "truecolor",
            force_jupyter=False,
            record=True,
        )
        for note in self.notes:
            console.print(f"warning: {note}", markup=False, highlight=False, soft_wrap=True)
        self.print_to(console)
        return console

    def __repr__(self) -> str:
        text = self._print_all(is_plain=True).export_text()
        return "\n".join(line.rstrip() for line in text.rstrip("\n").splitlines())

    def _repr_html_(self) -> str:
        console = self._print_all(is_plain=False)
        return console.export_html(inline_styles=True, code_format=PAGE)
