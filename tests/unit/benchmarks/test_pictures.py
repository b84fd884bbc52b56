"""The pictures of the pages: each is drawn from what is committed, and pages show no other."""

import re
from pathlib import Path

import pytest

from benchmarks.kit.themed_svg import THEME
from benchmarks.pictures import FOLDER, PICTURES, main

ROOT = Path(__file__).parents[3]
SHOWN = {
    name
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    for name in re.findall(r"!\[[^\]]+\]\([\w./]*pictures/(\w+)\.svg\)", page.read_text("utf-8"))
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("pictures")
    main(folder)
    return folder


def test_each_is_there_and_shown() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES) == SHOWN


@pytest.mark.parametrize("name", PICTURES)
def test_it_is_of_its_record(name: str, drawn: Path) -> None:
    """Its numbers and labels; lines may lie a hair off with another matplotlib."""
    texts = [
        re.findall(r"<text[^>]*>([^<]*)</text>", (folder / f"{name}.svg").read_text("utf-8"))
        for folder in (drawn, FOLDER)
    ]
    assert texts[0] == texts[1] != []


@pytest.mark.parametrize("name", PICTURES)
def test_it_follows_the_theme_and_says_what_it_shows(name: str) -> None:
    text = (FOLDER / f"{name}.svg").read_text("utf-8")
    assert "prefers-color-scheme: dark" in text
    assert f"<title>{PICTURES[name][1]}</title>" in text
    assert not re.search("#000000|#ffffff", text.replace(THEME, ""))
