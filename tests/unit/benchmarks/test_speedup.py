"""The README's picture and its paragraph: drawn from the committed record, with its figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.speedup import EXCHANGES, HOSTS, RECORD
from benchmarks.training.speedup_picture import caption, draw
from benchmarks.training.speedup_words import words

ONE, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def test_the_record_is_whole(record: dict[str, Any]) -> None:
    there = {(row["hosts"], row["exchange"]) for row in record["rows"]}
    several = {(hosts, exchange) for hosts in HOSTS[1:] for exchange in EXCHANGES}
    assert several < there
    assert there - several == {(1, EXCHANGES[0])}
    assert {len(row["runs_s"]) for row in record["rows"]} == {record["runs"]}


def test_the_same_record_gives_the_same_bytes(record: dict[str, Any], tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw(record, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_weights_that_differ_are_told(record: dict[str, Any]) -> None:
    digests = [[ONE, ONE], [ONE, OTHER]]
    rows = [{**row, "weights_sha256": of} for row, of in zip(record["rows"], digests, strict=False)]
    assert "4 trainings ended in 2 different weights" in caption({**record, "rows": rows})
    assert f"the same weights, sha256 {ONE[:12]}" in caption({**record, "rows": rows[:1]})


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


def test_figures_that_are_known() -> None:
    rows = [
        row(1, "parameter_server", 8.8, 9.0, 8.0, 7.0),
        row(2, "parameter_server", 5.0, 5.0, 1.0, 5.0),
        row(2, "halving_doubling", 3.0, 4.0, 4.0, 9.0),
    ]
    rows[0]["weights_sha256"][0] = "b" * 64
    about = {"model": "m", "runs": 3, "rate_bits_per_s": 2e8, "processors_of_a_host": 0.225}
    found = " ".join(words({**about, "rows": rows}).split())
    assert "| exchange | 2 hosts | |---|---| | `parameter_server` | 1.60 | " in found
    assert "| `halving_doubling` | 2.00 |" in found
    # 8.8 for 8, 5 for 5, and 3 for 4.
    assert "by at most 25.0 %, in the median by 10.0 %. 2 of 3" in found
    assert "8 of 9 trainings ended" in found
