"""The page of larger batches says of its records what they bear, and no more."""

import json
from pathlib import Path

import pytest

from benchmarks.large_batch import top1_of
from benchmarks.large_batch_page import page, rule_lines, tuned_line, values
from firecaffe.runs.statistics import mean_of
from tests.unit.runs.test_compare import planted

RESULTS = Path("benchmarks/results")


def test_the_published_page_is_the_programs() -> None:
    records = json.loads((RESULTS / "large_batch.json").read_text())
    assert (RESULTS / "large_batch.md").read_text() == page(records)


def test_values_that_stand_for_a_mean_and_its_interval() -> None:
    found = mean_of(values({"mean": 0.8605, "half": 0.0069, "n": 3}))
    assert (found.value, found.half) == pytest.approx((0.8605, 0.0069))
    assert values({"values": [0.1, 0.9]}) == [0.1, 0.9]


def row(rule: str, top1s: list[float]) -> dict[str, object]:
    words = {"rate": 0.01, "batch": 512, "rule": rule, "initial_lr": 0.01, "steps": 236}
    failed = sum(top1 < 0.2 for top1 in top1s)
    return {**words, "failed": failed, "top1": {"values": top1s}}


def test_rows() -> None:
    rows = [
        row("as it is", [0.860, 0.861, 0.862]),
        row("linear", [0.100, 0.877, 0.878]),
        row("unscaled", [0.810, 0.812, 0.811]),
        row("square root", [0.855, 0.869, 0.862]),
        row("as good", [0.861, 0.8612, 0.8608]),
    ]
    _, failed, worse, noisy, good = rule_lines(rows)
    assert "median 87.70 % (10.00, 87.70, 87.80)" in failed
    assert failed.endswith("|  | failed: 1 of 3 seeds |")
    assert worse.endswith("different |")
    assert "not enough runs to say (about" in noisy
    assert "equivalent" not in "".join((failed, worse, noisy))
    alone = rule_lines([rows[0], rows[4]])[1]
    assert alone.endswith("equivalent |")
    assert "not enough" in good  # four rows together bear less than one


def test_a_search_is_kept_only_by_its_whole_interval() -> None:
    search = {
        "network": "lenet",
        "data": "Fashion-MNIST",
        "batch_before": 32,
        "batch": 256,
        "best": {"rule": "linear", "base_lr": 0.08, "warmup_share": 0.15},
        "searched": [{"steps": 940, "again": [0.9]}, {"steps": 470, "again": []}],
        "before": {"mean": 0.9042, "half": 0.0023, "n": 3},
        "after": {"mean": 0.9021, "half": 0.0014, "n": 3},
    }
    line = tuned_line(search)  # its mean is within the band of 0.3 points
    assert "**not enough seeds**" in line
    assert "| 2.5 |" in line
    kept = tuned_line({**search, "after": {"mean": 0.9050, "half": 0.0014, "n": 3}})
    assert "**kept** |" in kept


def test_runs_of_other_code_are_no_record(tmp_path: Path) -> None:
    runs = [planted(tmp_path / source, environment__source=source) for source in ("a", "b")]
    with pytest.raises(SystemExit, match="the code"):
        top1_of(runs)
    assert top1_of(runs[:1]) == {"values": [0.9]}
