"""What a measurement that is begun again finds."""

from math import inf
from pathlib import Path

from benchmarks import raw_lines


def test_conditions_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "raw.jsonl"
    assert raw_lines.read(path, "conditions") == []
    raw_lines.begin(path)
    raw_lines.append(path, {"kind": "final", "error": 1.5})
    raw_lines.begin(path)
    (found,) = raw_lines.read(path, "conditions")
    assert found.keys() == {"kind", "cpu", "commit", "torch"}
    assert raw_lines.read(path, "final") == [{"kind": "final", "error": 1.5}]


def test_lines_by_their_values(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    rows = [{"kind": "final", "row": row, "seed": seed} for row in "ab" for seed in (1, 2)]
    for each in rows:
        raw_lines.append(path, each)
    raw_lines.append(path, {"kind": "search", "row": "a", "seed": 2})
    assert raw_lines.read(path, "final", seed=2) == [rows[1], rows[3]]
    assert raw_lines.read(path, "final", row="a", seed=2) == [rows[1]]
    assert not raw_lines.read(path, "final", rate=0.1)


def test_the_best_rate_is_the_row_s_own(tmp_path: Path) -> None:
    """A loss that diverged is infinite; of two that are equal, the lower rate is taken."""
    path = tmp_path / "raw.jsonl"
    losses = {"a": {0.1: 0.7, 0.3: inf, 0.2: 0.5, 0.05: 0.5}, "b": {0.4: 0.1}}
    for row, found in losses.items():
        for rate, loss in found.items():
            raw_lines.append(path, {"kind": "search", "row": row, "rate": rate, "loss": loss})
    raw_lines.append(path, {"kind": "final", "row": "a", "rate": 0.6, "loss": 0.0})
    assert raw_lines.best_rate(path, "a") == 0.05
    assert raw_lines.best_rate(path, "b") == 0.4
