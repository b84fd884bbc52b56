"""The pictures of the pages: each is drawn from what is committed, and pages show no other. And the
paragraph beside that of the README.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.themed_svg import THEME
from benchmarks.pictures import FOLDER, PICTURES, main
from benchmarks.training.speedup import EXCHANGES, HOSTS, RECORD
from benchmarks.training.speedup_picture import caption, draw
from benchmarks.training.speedup_words import words as speedup_words

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
def test_it_is_of_its_record_and_says_what_it_shows(name: str, drawn: Path) -> None:
    """Its numbers and labels; lines may lie a hair off with another matplotlib."""
    again, text = ((folder / f"{name}.svg").read_text("utf-8") for folder in (drawn, FOLDER))
    words = [re.findall(r"<text[^>]*>([^<]*)</text>", svg) for svg in (again, text)]
    assert words[0] == words[1] != []
    assert "prefers-color-scheme: dark" in text
    assert f"<title>{PICTURES[name][1]}</title>" in text
    assert not re.search("#000000|#ffffff", text.replace(THEME, ""))


ONE, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def record() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return kept


def test_the_record_of_the_speedup_is_whole_and_gives_the_same_bytes(
    record: dict[str, Any], tmp_path: Path
) -> None:
    there = {(row["hosts"], row["exchange"]) for row in record["rows"]}
    several = {(hosts, exchange) for hosts in HOSTS[1:] for exchange in EXCHANGES}
    assert there - several == {(1, EXCHANGES[0])}
    assert several < there
    assert {len(row["runs_s"]) for row in record["rows"]} == {record["runs"]}
    for name in ("one.svg", "two.svg"):
        draw(record, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_weights_that_differ_are_told(record: dict[str, Any]) -> None:
    digests = [[ONE, ONE], [ONE, OTHER]]
    rows = [{**row, "weights_sha256": of} for row, of in zip(record["rows"], digests, strict=False)]
    assert "4 trainings ended in 2 different weights" in caption({**record, "rows": rows})
    assert f"the same weights, sha256 {ONE[:12]}" in caption({**record, "rows": rows[:1]})


def row(hosts: int, exchange: str, forecast_s: float, *runs_s: float) -> dict[str, Any]:
    band = {"low_s": forecast_s * 0.9, "high_s": forecast_s * 1.1}
    runs = {"runs_s": runs_s, "weights_sha256": [ONE for _ in runs_s]}
    return {"hosts": hosts, "exchange": exchange, "forecast_s": forecast_s, **band, **runs}


def test_figures_that_are_known() -> None:
    rows = [
        row(1, "parameter_server", 8.8, 9.0, 8.0, 7.0),
        row(2, "parameter_server", 5.0, 5.0, 1.0, 5.0),
        row(2, "halving_doubling", 3.0, 4.0, 4.0, 9.0),
    ]
    rows[0]["weights_sha256"][0] = "b" * 64
    about = {"model": "m", "runs": 3, "rate_bits_per_s": 2e8, "processors_of_a_host": 0.225}
    found = " ".join(speedup_words({**about, "rows": rows}).split())
    assert "| exchange | 2 hosts | |---|---| | `parameter_server` | 1.60 | " in found
    assert "| `halving_doubling` | 2.00 |" in found
    # 8.8 for 8, 5 for 5, and 3 for 4.
    assert "by at most 25.0 %, in the median by 10.0 %. 2 of 3" in found
    assert "8 of 9 trainings ended" in found
