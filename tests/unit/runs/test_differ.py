"""Where two runs first differ."""

import json
from pathlib import Path

import pytest

from firecaffe.errors import RunError
from firecaffe.runs.recorded import FirstDifference, first_difference

NAMES = ("parameter/conv1.weight", "parameter/a.bias", "losses")


def planted(folder: Path, steps: int, changed: dict[int, tuple[str, ...]] | None = None) -> Path:
    """A run of three tensors; `changed` names tensors with another digest, by step."""
    folder.mkdir()
    with (folder / "digests.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            other = (changed or {}).get(step, ())
            tensors = {name: f"{step}{name}{'!' * (name in other)}" for name in NAMES}
            file.write(json.dumps({"step": step, "tensors": tensors}) + "\n")
    return folder


def test_equal_runs(tmp_path: Path) -> None:
    assert first_difference(planted(tmp_path / "a", 3), planted(tmp_path / "b", 3)) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({3: ("losses",)}, FirstDifference(3, "losses")),
        (
            {2: ("losses",), 1: ("losses", "parameter/a.bias")},
            FirstDifference(1, "parameter/a.bias"),
        ),
        # In network order, which is not the alphabet's.
        ({2: NAMES}, FirstDifference(2, "parameter/conv1.weight")),
    ],
)
def test_first_step_then_first_tensor(
    tmp_path: Path, changed: dict[int, tuple[str, ...]], expected: FirstDifference
) -> None:
    run, other = planted(tmp_path / "a", 3), planted(tmp_path / "b", 3, changed)
    assert first_difference(run, other) == expected
    assert first_difference(other, run) == expected


def test_a_difference_comes_before_unequal_lengths(tmp_path: Path) -> None:
    run, other = planted(tmp_path / "a", 3), planted(tmp_path / "b", 2, {2: ("losses",)})
    assert first_difference(run, other) == FirstDifference(2, "losses")


def test_unequal_lengths(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has 3 steps, .* has 2"):
        first_difference(planted(tmp_path / "a", 3), planted(tmp_path / "b", 2))


@pytest.mark.parametrize(
    "row", [{"step": 2, "tensors": {}}, {"step": 1, "tensors": {"another": "x"}}]
)
def test_other_steps_or_tensors(tmp_path: Path, row: dict[str, object]) -> None:
    other = planted(tmp_path / "b", 0)
    (other / "digests.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RunError, match="did not train the same tensors at the same steps"):
        first_difference(planted(tmp_path / "a", 1), other)
