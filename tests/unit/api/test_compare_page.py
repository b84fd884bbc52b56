"""What the report's curves are drawn of: their units, their smoothing, their names."""

import pytest

from firecaffe.api.compare_groups import (
    BYTE_UNITS,
    MAX_MARKED_POINTS,
    SAMPLE_UNITS,
    TIME_UNITS,
    line_names,
    smoothed,
    unit_for,
)


@pytest.mark.parametrize(
    ("largest", "units", "expected"),
    [
        (0.4, TIME_UNITS, "s"),
        (119, TIME_UNITS, "s"),
        (121, TIME_UNITS, "min"),
        (8000, TIME_UNITS, "h"),
        (1500, SAMPLE_UNITS, ""),
        (60_000, SAMPLE_UNITS, "thousands"),
        (3e6, SAMPLE_UNITS, "millions"),
        (5e5, BYTE_UNITS, "kB"),
        (5e8, BYTE_UNITS, "MB"),
        (5e9, BYTE_UNITS, "GB"),
    ],
)
def test_units_that_people_read(largest: float, units: dict[str, float], expected: str) -> None:
    name, size = unit_for(largest, units)
    assert (name, size) == (expected, units[expected])


def test_smoothing_takes_the_noise_and_leaves_the_course() -> None:
    line = [float(x) for x in range(150)]
    assert smoothed(line) == pytest.approx(line)  # a straight course stays, also at its ends
    noisy = [x + (-1) ** place * 10 for place, x in enumerate(line)]
    left = [abs(a - b) for a, b in zip(smoothed(noisy), line, strict=True)]
    assert max(left[5:-5]) < 2
    assert smoothed([1.0, 5.0] * (MAX_MARKED_POINTS // 2)) == [1.0, 5.0] * (MAX_MARKED_POINTS // 2)
    assert smoothed([]) == []


def test_lines_are_named_by_what_differs() -> None:
    words = {"solver.base_lr": ["0.1", "0.5"], "train.global_batch_size": ["64", "512"]}
    assert line_names(["A", "B"], words) == [
        "A: base_lr 0.1, global_batch_size 64",
        "B: base_lr 0.5, global_batch_size 512",
    ]
    assert line_names(["A"], {}) == ["A"]
    many = {f"x.w{number}": ["1", "2"] for number in range(9)}
    assert line_names(["A", "B"], many)[1] == "B: w0 2, w1 2, w2 2, …"
