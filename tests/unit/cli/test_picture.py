"""Pictures show names as they are."""

import sys
from pathlib import Path

import pytest

from firecaffe.cli import main
from firecaffe.cli.picture import load_pyplot, write_picture


@pytest.mark.parametrize("place", ["label", "title", "xlabel"])
def test_a_name_is_no_formula(tmp_path: Path, place: str) -> None:
    figure, axes = load_pyplot().subplots()
    axes.plot([1, 10], [1, 10], label="a$b^$" if place == "label" else "x")
    axes.set(xscale="log", **({place: "a$b^$"} if place != "label" else {}))
    axes.legend()
    write_picture(tmp_path / "a.png", figure, "x", "x")
    assert (tmp_path / "a.png").stat().st_size
    load_pyplot().close(figure)


@pytest.mark.parametrize(
    ("argv", "work"),
    [
        (["compare", "run", "--html", "a.html"], "runs.run_table.read_run"),
        (["plan", "--model", "lenet", "--plot", "a.png"], "cli.plan.load_cluster"),
        (["compress", "run", "--plot", "a.png"], "shrink.compress_network.compress"),
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
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(f"firecaffe.{work}", lambda *_: pytest.fail("the work has begun"))
    if argv[0] == "compress":
        (tmp_path / "run.toml").write_text('[model]\nname = "lenet"\nweights = "w"\n')
        argv = ["compress", "run.toml", *argv[2:]]
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{argv[-2]} needs matplotlib" in line
