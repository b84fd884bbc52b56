"""The page of measured shares says what the rows say."""

from pathlib import Path

from benchmarks import raw_lines
from benchmarks.measured_shares_page import make_page

CONDITIONS = {
    "kind": "conditions",
    "cores": 2,
    "cpu": "a processor",
    "torch": "2.13.0",
    "commit": "abc",
    "processors": "[0.4, 0.2]",
    "rate_bits_per_s": 200_000_000,
}


def test_rates_are_paired_by_round_and_waits_are_told_of_the_first(tmp_path: Path) -> None:
    speed, exchange = tmp_path / "speed", tmp_path / "exchange"
    for path in (speed, exchange):
        raw_lines.append(path, CONDITIONS)
    order = [("equal", 100.0), ("measured", 160.0), ("measured", 180.0), ("equal", 120.0)]
    for shares, rate in order:
        run = {"shares": shares, "images_per_s": rate, "num_leaves": 8}
        run |= {"micro_batches_by_rank": [5, 3], "state_sha256": "0123456789abcdef"}
        raw_lines.append(speed, {"kind": "run", **run})
    for variant, exposed_s, sent in (("equal, tree", 0.4, 2e6), ("odd, fold", 0.44, 3e6)):
        step = {"variant": variant, "exposed_s": exposed_s, "sent_bytes": sent}
        raw_lines.append(exchange, {"kind": "step", **step})
    page = make_page(speed, exchange)
    assert "| equal | 2 | 110.0 | 100.0 - 120.0 |" in page
    assert "| measured / equal | 2 | 1.55 | 1.50 - 1.60 |" in page
    assert "came to 5, 3 micro-batches" in page
    assert "| odd, fold | 1 | 440 | 440 - 440 | 1.10 | 3.0 |" in page
    assert "All 4 runs" in page
