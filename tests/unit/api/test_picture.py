"""Pictures show names as they are."""

import sys
from pathlib import Path

import pytest

from firecaffe.api.answer import load_figure, write_picture
from firecaffe.cli import main


@pytest.mark.parametrize("place", ["label", "title", "xlabel"])
def test_a_name_is_no_formula(tmp_path: Path, place: str) -> None:
    figure = load_figure()()
    axes = figure.subplots()
    axes.plot([1, 10], [1, 10], label="a$b^$" if place == "label" else "x")
    axes.set(xscale="log", **({place: "a$b^$"} if place != "label" else {}))
    axes.legend()
    write_picture(tmp_path / "a.png", figure, "x", "x")
    assert (tmp_path / "a.png").stat().st_size


@pytest.mark.parametrize(
    ("argv", "work"),
    [
        (["compare", "run", "--html", "a.html"], "comparison.read_run"),
        (["plan", "--model", "lenet", "--plot", "a.png"], "plan_answer.clusters_of"),
        (["compress", "run", "--plot", "a.png"], "compressed_network.make_small"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_what_draws_is_asked_for_before_the_work(
    argv: list[str],
    work: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(f"firecaffe.api.{work}", lambda *_: pytest.fail("the work has begun"))
    if argv[0] == "compress":
        (tmp_path / "run.toml").write_text('[model]\nname = "lenet"\nweights = "w"\n')
        argv = ["compress", "run.toml", *argv[2:]]
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{argv[-2]} needs matplotlib" in line
