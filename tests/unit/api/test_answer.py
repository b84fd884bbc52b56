"""An answer shows itself in text, and in a notebook as HTML."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import rich.console
from rich.console import RenderableType
from rich.table import Table

from firecaffe.api.answer import Answer


@dataclass(frozen=True, repr=False)
class Shown(Answer):
    """A table with a color, and a line that is longer than a table may be."""

    notes = ("a warning",)

    def to_dict(self) -> dict[str, Any]:
        return {}

    def _parts(self) -> Iterator[RenderableType]:
        table = Table("head")
        table.add_row("[red]cell[/]")
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
