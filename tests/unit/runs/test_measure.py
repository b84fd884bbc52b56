"""Runs that are judged by another metric than top-1: said in its words, better in its direction."""

from pathlib import Path
from typing import Any

import pytest

import firecaffe
from firecaffe.api.compare_groups import lines_of, render_groups
from firecaffe.api.comparison import render
from firecaffe.cli import compare
from firecaffe.errors import RecipeError, RunError
from firecaffe.runs.checklist import checklist
from firecaffe.runs.curves import curves_of, time_to
from firecaffe.runs.measure import Measure, failure, has_learned, measure_of
from firecaffe.runs.run_table import TableRun, other_work, read_run
from firecaffe.runs.seed_groups import band_of, group_rows, group_runs
from firecaffe.runs.statistics import UNDECIDED
from tests.kit.compared_runs import over_seeds, plant, planted, printed, train, with_metrics

NUMBERS = {
    "result__metric": "mae",
    "result__higher_is_better": False,
    "result__shares": [],
    "result__metrics": ["mae", "r2"],
    "result__r2": 0.75,
    "result__largest_class_share": None,
    "recipe__task__name": "regression",
}


def of_error(folder: Path, errors: list[float], **changes: Any) -> list[TableRun]:
    """Runs of a regression over seeds."""
    return over_seeds(folder, errors, "mae", **{**NUMBERS, **changes})


def test_another_metric_is_shown_in_its_words_and_not_compared(tmp_path: Path) -> None:
    (run,) = of_error(tmp_path, [2.34567])
    older = planted(tmp_path / "older")
    assert measure_of(older.result) == Measure("top1", True, True)
    text = printed(render([run, older]))
    for part in ("MAE", "2.346", "older is judged by top-1, 0 by MAE"):
        assert part in text
    assert "90.00%" not in text
    assert "task" in other_work(run, older)
    rows = group_rows(group_runs([run, older]))
    assert rows[1].against is None
    assert "top-1" not in printed(render_groups(rows, [], {}, None))


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("errors", [(2.0, None), (None, 2.0), (None, None)])
def test_what_is_no_number_is_not_as_good(tmp_path: Path, errors: Any, seeds: int) -> None:
    """A result has null for NaN."""
    first, second = ([error and error + 0.01 * seed for seed in range(seeds)] for error in errors)
    runs = [
        *of_error(tmp_path / "a", first),
        *of_error(tmp_path / "b", second, recipe__solver__base_lr=0.5),
    ]
    groups = group_runs(runs)
    rows = group_rows(groups)
    assert rows[1].against is not None
    assert (rows[1].against.verdict, rows[1].against.more) == (UNDECIDED, None)
    items = {item.what: item for item in checklist(groups, rows)}
    assert not items["the same accuracy"].is_met


@pytest.mark.parametrize(
    ("error", "verdict", "is_met"),
    [(2.0, "equivalent", True), (3.0, "different", False), (1.0, "different", True)],
)
def test_a_lower_error_is_better(tmp_path: Path, error: float, verdict: str, is_met: bool) -> None:
    runs = [
        *of_error(tmp_path / "a", [2.0, 2.01, 2.02]),
        *of_error(tmp_path / "b", [error, error + 0.01, error + 0.02], recipe__solver__base_lr=0.5),
    ]
    groups = group_runs(runs)
    rows = group_rows(groups, band=0.05)
    against = rows[1].against
    assert against is not None
    assert against.verdict == verdict
    assert rows[1].is_worse == (error > 2.5)
    items = {item.what: item for item in checklist(groups, rows, band=0.05)}
    assert items["the same accuracy"].is_met == is_met
    text = printed(render_groups(rows, [*items.values()], {}, None))
    assert f"B: MAE {error - 2:+.4g}" in text
    assert "R²" in text
    assert "points" not in text
    assert ("worse MAE" in text) == (error > 2.5)


def test_the_band_is_a_share_of_the_first_groups_mean(tmp_path: Path) -> None:
    groups = group_runs(of_error(tmp_path, [2.0, 4.0]))
    assert band_of(groups, None) == pytest.approx(0.03)
    assert band_of(groups, 0.5) == 0.5


def test_time_to_an_error(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for step, error in ((1, 4.0), (2, 2.0), (3, 1.0)):
        rows += [train(step), {"kind": "validation", "step": step, "mae": error}]
    run = with_metrics(tmp_path / "a", rows, **NUMBERS, result__mae=1.0)
    assert [point.value for point in curves_of(run).metric] == [4.0, 2.0, 1.0]
    assert time_to(run, 2.5) == pytest.approx(4.0)  # two steps of 64 samples at 32 a second
    assert time_to(run, 0.5) is None
    assert lines_of(run.measure)["metric"][0] == "MAE of evaluations"
    assert lines_of(Measure())["metric"][0] == "top-1 of evaluations, %"


def test_what_is_typed_is_in_the_metrics_unit(tmp_path: Path) -> None:
    folders = [str(run.folder) for run in of_error(tmp_path, [2.0, 3.0])]
    older = [str(planted(tmp_path / f"older-{n}").folder) for n in range(2)]
    for words, part in (
        ([*older, "--target", "0.5", "--by", "recipe"], "top-1 in per cent"),
        ([*older, "--band", "101", "--by", "recipe"], "points of top-1"),
        ([*folders, "--band", "-1", "--by", "recipe"], "of MAE, 0 or more"),
        ([*folders, "--target", "60"], "target goes with by"),
    ):
        with pytest.raises(RecipeError, match=part):
            compare.main(words)
    assert compare.main([*folders, "--band", "300", "--by", "recipe"]) == 0
    in_python: list[dict[str, Any]] = [{"target": "60"}, {"band": "1"}, {"target": float("inf")}]
    for given in in_python:
        with pytest.raises(RecipeError, match="must be a number"):
            firecaffe.compare(folders, by="recipe", **given)


def test_a_regression_that_has_learned_nothing_says_the_mean(tmp_path: Path) -> None:
    (run,) = of_error(tmp_path, [2.0], result__r2=-0.01)
    assert has_learned(run.result) is False
    assert "R²" in failure([run.result])
    assert has_learned({"r2": 0.1}) is True
    assert has_learned({"mean_iou": 0.1}) is None


def test_a_record_without_its_metric_is_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no mae"):
        read_run(plant(tmp_path / "a", **NUMBERS))
