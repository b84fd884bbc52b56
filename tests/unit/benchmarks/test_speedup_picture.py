"""The README's picture: drawn from the committed record, and it says what the record says."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speedup import EXCHANGES, HOSTS, RECORD
from benchmarks.speedup_picture import caption, draw

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
