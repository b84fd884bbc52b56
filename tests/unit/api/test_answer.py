"""An answer shows itself in text, and in a notebook as HTML."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import rich.console
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

import firecaffe
from firecaffe.api.answer import Answer, LiteralConsole
from firecaffe.cli.arguments import show


@dataclass(frozen=True, repr=False)
class Shown(Answer):
    """A table with a color, and a line that is longer than a table may be."""

    notes = ("a warning",)

    def to_dict(self) -> dict[str, Any]:
        return {}

    def _parts(self) -> Iterator[RenderableType]:
        table = Table("head")
        table.add_row(Text("cell", style="red"))
        yield table
        yield f"[line] {'y' * 200}"


@pytest.mark.parametrize("in_notebook", [False, True])
def test_an_answer_prints_nothing_and_returns_all(
    in_notebook: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: in_notebook)
    lines = repr(Shown()).splitlines()
    assert lines[0] == "warning: a warning"
    assert lines[-1] == f"[line] {'y' * 200}"
    assert any("cell" in line for line in lines)
    html = Shown()._repr_html_()
    assert "color: #800000" in html
    assert "[line]" in html
    assert capsys.readouterr().out == ""


def test_a_narrow_terminal_cuts_no_figure_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    narrow = Console(file=out, width=60, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr("firecaffe.cli.arguments.make_console", lambda: narrow)
    show(firecaffe.plan(model="lenet", workers=[1, 2], cluster="ethernet-1g"))
    assert "samples/s" in out.getvalue()
    assert "…" not in out.getvalue()


ORDER = "\x1b]0;title\x07\x1b[2J"


@dataclass(frozen=True, repr=False)
class Named(Answer):
    """An answer with a name that a stranger chose."""

    name: str

    def to_dict(self) -> dict[str, Any]:
        return {}

    def _parts(self) -> Iterator[RenderableType]:
        table = Table(self.name, title=self.name)
        table.add_row(self.name)
        yield table
        yield self.name


@pytest.mark.parametrize("name", ["[/b]", "[sxm]", "[link=file:///]here[/link]"])
def test_a_name_in_brackets_is_no_style(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert repr(Named(name)).count(name) == 4
    show(Named(name))
    assert capsys.readouterr().out.count(name) == 4


def test_a_name_gives_a_terminal_no_orders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "\x1b" not in repr(Named(ORDER))
    show(Named(ORDER))
    assert "\x1b" not in capsys.readouterr().out
    out = io.StringIO()
    monkeypatch.setattr(
        "firecaffe.cli.arguments.make_console",
        lambda: LiteralConsole(file=out, force_terminal=True, color_system=None),
    )
    show(Named(ORDER))
    assert "title" in out.getvalue()
    assert ORDER[:4] not in out.getvalue()
    assert ORDER[-4:] not in out.getvalue()
