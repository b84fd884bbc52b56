"""Pictures: names as they are, units, smoothing, and what their lines are called."""

import sys
from pathlib import Path

import pytest

from firecaffe.api.answer import load_figure, write_picture
from firecaffe.api.compare_groups import (
    BYTE_UNITS,
    MAX_MARKED_POINTS,
    SAMPLE_UNITS,
    TIME_UNITS,
    line_names,
    smoothed,
    unit_for,
)
from tests.typed import refused


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
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(f"firecaffe.api.{work}", lambda *_: pytest.fail("the work has begun"))
    if argv[0] == "compress":
        (tmp_path / "run.toml").write_text('[model]\nname = "lenet"\nweights = "w"\n')
        argv = ["compress", "run.toml", *argv[2:]]
    (line,) = refused(2, *argv).splitlines()
    assert f"{argv[-2]} needs matplotlib" in line


@pytest.mark.parametrize(
    ("largest", "units", "expected"),
    [
        (0.4, TIME_UNITS, "s"),
        (119, TIME_UNITS, "s"),
        (121, TIME_UNITS, "min"),
        (8000, TIME_UNITS, "h"),
        (1500, SAMPLE_UNITS, ""),
        (60_000, SAMPLE_UNITS, "thousands"),
        (3e6, SAMPLE_UNITS, "millions"),
        (5e5, BYTE_UNITS, "kB"),
        (5e8, BYTE_UNITS, "MB"),
        (5e9, BYTE_UNITS, "GB"),
    ],
)
def test_units_that_people_read(largest: float, units: dict[str, float], expected: str) -> None:
    name, size = unit_for(largest, units)
    assert (name, size) == (expected, units[expected])


def test_smoothing_takes_the_noise_and_leaves_the_course() -> None:
    line = [float(x) for x in range(150)]
    assert smoothed(line) == pytest.approx(line)  # a straight course stays, also at its ends
    noisy = [x + (-1) ** place * 10 for place, x in enumerate(line)]
    left = [abs(a - b) for a, b in zip(smoothed(noisy), line, strict=True)]
    assert max(left[5:-5]) < 2
    assert smoothed([1.0, 5.0] * (MAX_MARKED_POINTS // 2)) == [1.0, 5.0] * (MAX_MARKED_POINTS // 2)
    assert smoothed([]) == []


def test_lines_are_named_by_what_differs() -> None:
    words = {"solver.base_lr": ["0.1", "0.5"], "train.global_batch_size": ["64", "512"]}
    assert line_names(["A", "B"], words) == [
        "A: base_lr 0.1, global_batch_size 64",
        "B: base_lr 0.5, global_batch_size 512",
    ]
    assert line_names(["A"], {}) == ["A"]
    many = {f"x.w{number}": ["1", "2"] for number in range(9)}
    assert line_names(["A", "B"], many)[1] == "B: w0 2, w1 2, w2 2, …"
