"""The paragraph on the README's picture: the record's figures, and docs/figures.md has it."""

import json
from pathlib import Path
from typing import Any

from benchmarks.speedup import RECORD
from benchmarks.speedup_words import words

FIGURES = Path(__file__).parents[3] / "docs" / "figures.md"


def row(hosts: int, exchange: str, forecast_s: float, *runs_s: float) -> dict[str, Any]:
    return {
        "hosts": hosts,
        "exchange": exchange,
        "forecast_s": forecast_s,
        "low_s": forecast_s * 0.9,
        "high_s": forecast_s * 1.1,
        "runs_s": runs_s,
        "weights_sha256": ["a" * 64 for _ in runs_s],
    }


def test_the_page_has_what_the_record_says() -> None:
    found = words(json.loads(RECORD.read_text(encoding="utf-8")))
    assert " ".join(found.split()) in " ".join(FIGURES.read_text(encoding="utf-8").split())


def test_figures_that_are_known() -> None:
    rows = [
        row(1, "parameter_server", 8.8, 9.0, 8.0, 7.0),
        row(2, "parameter_server", 5.0, 5.0, 1.0, 5.0),
        row(2, "halving_doubling", 3.0, 4.0, 4.0, 9.0),
    ]
    rows[0]["weights_sha256"][0] = "b" * 64
    about = {"model": "m", "runs": 3, "rate_bits_per_s": 2e8, "processors_of_a_host": 0.225}
    found = " ".join(words({**about, "rows": rows}).split())
    assert "on 2 hosts: parameter_server 1.60; halving_doubling 2.00 (n = 3" in found
    # 8.8 for 8, 5 for 5, and 3 for 4.
    assert "by 25.0 % at most, median 10.0 %; 2 of 3" in found
    assert "Of 9 trainings 8 ended" in found
