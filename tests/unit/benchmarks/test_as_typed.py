"""The page of `benchmarks.as_typed`: medians of the pairs' ratios, rows in order, others stay."""

from typing import Any

from benchmarks.as_typed import ROWS, page


def row(ranks: int, rate: str, ours_s: list[float]) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "rate": rate,
        "timed": 6,
        "ours_s": ours_s,
        "ddp_s": [1.0, 2.0, 4.0],
        "reason": "halving_doubling (50 µs)",
        "on": "a processor",
        "commit": f"c{ranks}",
    }


def test_a_page_has_the_rows_that_were_measured_in_order() -> None:
    record = {
        "2, one host": row(2, "", [0.5, 1.0, 2.0]),
        "8, 100mbit": row(8, "100mbit", [0.9, 2.2, 3.2]),
    }
    lines = page(record).splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert rows == [
        "| 8 | 100mbit | 3 x 6 | 2.000 | 2.200 | 0.90 | 0.80 to 1.10 | `halving_doubling` |",
        "| 1, 2 ranks | - | 3 x 6 | 2.000 | 1.000 | 0.50 | 0.50 to 0.50 | `halving_doubling` |",
    ]
    assert "- 8, 100mbit: halving_doubling (50 µs)" in lines
    assert lines[-1] == "a processor, commit c8; a processor, commit c2."


def test_every_row_that_was_promised_is_one() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) == 10
