"""Pictures show names as they are."""

from pathlib import Path

import pytest

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
