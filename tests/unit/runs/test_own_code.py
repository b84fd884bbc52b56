"""Runs of other code of a user, or from other first weights, are other experiments."""

from pathlib import Path
from typing import Any

import pytest

from firecaffe.runs.checklist import checklist
from firecaffe.runs.run_table import other_work
from firecaffe.runs.seed_groups import group_rows, group_runs
from tests.unit.runs.test_compare import planted

ONE, OTHER = 64 * "a", 64 * "b"


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"environment__own_code": {"model": ONE}}, 1),
        ({"environment__own_code": {"model": OTHER}}, 2),
        ({"environment__own_code": {"model": ONE, "task": OTHER}}, 2),
    ],
)
def test_runs_of_other_code_are_not_pooled(
    tmp_path: Path, changes: dict[str, Any], groups: int
) -> None:
    first = planted(tmp_path / "one", environment__own_code={"model": ONE})
    runs = [first, planted(tmp_path / "two", **{"recipe__train__seed": 1, **changes})]
    found = group_runs(runs)
    assert len(found) == groups
    items = {item.what: item for item in checklist(found, group_rows(found))}
    assert items["the same code"].is_met == (groups == 1)
    assert f"model {ONE[:12]}" in items["the same code"].why


@pytest.mark.parametrize(
    ("changes", "is_other"),
    [
        ({"recipe__model__weights": "moved.pt", "result__first_weights": {"sha256": ONE}}, False),
        ({"recipe__model__weights": "w.pt", "result__first_weights": {"sha256": OTHER}}, True),
        ({}, True),
    ],
)
def test_first_weights_are_the_same_by_what_is_in_the_file(
    tmp_path: Path, changes: dict[str, Any], is_other: bool
) -> None:
    words = {"recipe__model__weights": "w.pt", "result__first_weights": {"sha256": ONE}}
    first, second = planted(tmp_path / "one", **words), planted(tmp_path / "two", **changes)
    assert other_work(first, second) == (["model"] if is_other else [])
    assert len(group_runs([first, second])) == 1 + is_other


def test_arguments_and_frozen_layers_are_other_work(tmp_path: Path) -> None:
    first = planted(tmp_path / "one", recipe__model__args={}, recipe__model__freeze=[])
    older = planted(tmp_path / "older")
    assert not other_work(first, older)
    for word, value in (("args", {"width": 3}), ("freeze", ["a*"])):
        other = planted(tmp_path / word, **{f"recipe__model__{word}": value})
        assert other_work(first, other) == ["model"]
