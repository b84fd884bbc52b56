"""An answer shows itself in text, in a notebook as HTML, and in pictures with names as they are."""

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rich.console
from rich.console import Console, RenderableType
from rich.table import Table

import firecaffe
from firecaffe.api.answer import Answer, load_figure, write_picture
from firecaffe.cli import main
from firecaffe.cli.arguments import show


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


def test_a_narrow_terminal_cuts_no_figure_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    narrow = Console(file=out, width=60, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr("firecaffe.cli.arguments.make_console", lambda: narrow)
    show(firecaffe.plan(model="lenet", workers=[1, 2], cluster="ethernet-1g"))
    assert "samples/s" in out.getvalue()
    assert "…" not in out.getvalue()


def test_a_name_in_a_picture_is_no_formula(tmp_path: Path) -> None:
    for words in ({"title": "a$b^$"}, {"xlabel": "a$b^$"}, {}):
        figure = load_figure()()
        axes = figure.subplots()
        axes.plot([1, 10], [1, 10], label="x" if words else "a$b^$")
        axes.set(xscale="log", **words)
        axes.legend()
        write_picture(tmp_path / "a.png", figure, "x", "x")
        assert (tmp_path / "a.png").stat().st_size


@pytest.mark.parametrize(
    ("line", "work"),
    [
        ("compare run --html a.html", "compare.read_run"),
        ("plan --model lenet --plot a.png", "plan.clusters_of"),
        ("compress run.toml --plot a.png", "compress.make_small"),
    ],
)
def test_what_draws_is_asked_for_before_the_work(
    line: str,
    work: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(f"firecaffe.api.{work}", lambda *_: pytest.fail("the work has begun"))
    (tmp_path / "run.toml").write_text('[model]\nname = "lenet"\nweights = "w"\n')
    assert main(line.split()) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f"{line.split()[-2]} needs matplotlib" in error
