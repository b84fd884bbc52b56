"""Finished runs side by side: rows, differing words, unlike work, and the command; of other code of
a user, or from other first weights, they are other experiments; those that are judged by another
metric than top-1 are said in its words, better in its direction.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import firecaffe
from firecaffe.api.compare_groups import lines_of, render_groups
from firecaffe.api.comparison import MIN_WIDTH_OF_RUNS, render
from firecaffe.cli import compare, main
from firecaffe.errors import RecipeError, RunError
from firecaffe.runs.curves import curves_of, time_to
from firecaffe.runs.measure import Measure, failure, has_learned, measure_of
from firecaffe.runs.run_table import (
    TableRun,
    differing_words,
    names,
    other_work,
    read_run,
    rows,
    weights_identical,
)
from firecaffe.runs.seed_groups import band_of, group_runs
from firecaffe.runs.statistics import UNDECIDED
from tests.kit.compared_runs import (
    DIGESTS,
    over_seeds,
    plant,
    planted,
    printed,
    rows_of,
    train,
    with_metrics,
)


def text(runs: list[TableRun], width: int = 200, allow_unequal: bool = False) -> str:
    return printed(render(runs, allow_unequal), width)


def cells(shown: str, name: str) -> list[str]:
    """The cells of a run's line in the table."""
    return next(line for line in shown.splitlines() if line.startswith(name)).split()


def test_equal_work(tmp_path: Path) -> None:
    one = planted(tmp_path / "one")
    more: dict[str, Any] = {"result__world_size": 4, "result__route": "fold"}
    more |= {"result__images_per_s": 3210.0, "result__exposed_communication": 0.0625}
    four = planted(tmp_path / "four", **more)
    assert [
        (row.run, row.workers, row.exchange, row.speedup, row.other_work)
        for row in rows([one, four])
    ] == [("one", 1, "tree", 1.0, []), ("four", 4, "tree (fold)", 3.21, [])]
    assert weights_identical([one, four])
    assert differing_words([one, four]) == {}
    shown = text([one, four])
    line = "four tree (fold) 4 64 0.01 400 3,210 3.21 6.2% 90.00% 5f59c6bf0087"
    assert cells(shown, "four") == line.split()
    for part in ("no hyperparameter differs", "identical in all 2 runs: 5f59c6bf0087", "single"):
        assert part in shown
    assert "*" not in shown
    assert rows([four, one])[1].speedup == pytest.approx(1 / 3.21)  # over the first one given
    alone = text([one])
    assert cells(alone, "one")[-1] == "5f59c6bf0087"
    for word in ("single runs", "differ", "identical"):
        assert word not in alone


def test_words_that_differ_are_shown_and_fair(tmp_path: Path) -> None:
    one = planted(tmp_path / "one")
    two = planted(
        tmp_path / "two",
        recipe__solver__base_lr=0.02,
        recipe__solver__stepvalue=[200, 300],
        recipe__solver__new=False,  # of a later version
        recipe__data__path="elsewhere",
        environment__gpus=["H200", "H200"],
        environment__command=["y"],
        result__weights_sha256=DIGESTS["b"],
    )
    assert differing_words([one, two, one]) == {
        "solver.base_lr": [0.01, 0.02, 0.01],
        "solver.stepvalue": [[], [200, 300], []],
        "solver.new": [None, False, None],
        "environment.gpus": [[], ["H200", "H200"], []],
    }
    shown = text([one, two])
    for line in (
        "solver.base_lr 0.01 0.02",
        "solver.stepvalue none 200, 300",
        "solver.new - false",
        "environment.gpus none H200, H200",
    ):
        assert cells(shown, line.split()[0]) == line.split()
    assert "no hyperparameter differs" not in shown
    assert "weights not identical: 2 different ones in 2 runs" in shown
    assert "*" not in shown


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"result__steps": 100, "recipe__train__steps": 100}, ["samples seen"]),
        ({"recipe__train__global_batch_size": 128}, ["samples seen"]),
        ({"result__data": "mnist: 59999 training images"}, ["data"]),
        ({"recipe__data__crop": 24}, ["augmentation"]),
        ({"recipe__model__args": {"width": 3}}, ["model"]),
        ({"recipe__model__freeze": ["a*"]}, ["model"]),
        ({"recipe__model__name": "nin", "result__steps": 1}, ["model", "samples seen"]),
    ],
)
def test_other_work_is_marked(tmp_path: Path, changes: dict[str, Any], what: list[str]) -> None:
    one = planted(tmp_path / "one", recipe__model__args={}, recipe__model__freeze=[])
    assert not other_work(one, planted(tmp_path / "older"))  # which has neither of these words
    two = planted(tmp_path / "two", **changes)
    assert other_work(one, two) == other_work(two, one) == what
    for allow_unequal, speedup in ((False, "1.00"), (True, "1.00*")):
        shown = text([one, two], allow_unequal=allow_unequal)
        assert "1.00" in cells(shown, "one")
        assert (speedup in cells(shown, "two")) == allow_unequal
        assert f"two in {', '.join(what)}." in shown


def test_as_many_samples_are_the_same_work(tmp_path: Path) -> None:
    """In larger batches, or counted in epochs."""
    one = planted(tmp_path / "one")
    larger = {"recipe__train__global_batch_size": 128, "recipe__train__steps": 200}
    larger |= {"result__steps": 200, "recipe__data__decode_threads": 4}
    assert other_work(one, planted(tmp_path / "larger", **larger)) == []
    epochs = planted(tmp_path / "two", recipe__train__steps=0, recipe__train__epochs=6)
    assert other_work(one, epochs) == []
    assert list(differing_words([one, epochs])) == ["train.steps", "train.epochs"]


def test_no_speedup_without_a_rate_or_of_what_learned_nothing(tmp_path: Path) -> None:
    one, two = planted(tmp_path / "one", result__images_per_s=0.0), planted(tmp_path / "two")
    assert [row.speedup for row in rows([one, two])] == [None, None]
    assert [row.speedup for row in rows([two, one])] == [1.0, None]
    assert "-" in cells(text([two, one]), "one")
    lost = planted(tmp_path / "lost", result__top1=0.104, result__images_per_s=4000.0)
    assert [row.speedup for row in rows([two, lost])] == [1.0, None]
    assert "lost has failed: 1 of 1 runs did not learn (top-1 not above 10.00%" in text([two, lost])


def test_whose_workers_may_have_changed_is_in_the_remarks(tmp_path: Path) -> None:
    whole = planted(tmp_path / "whole", result__timed_samples=25_000)
    part = planted(tmp_path / "part", result__timed_samples=9_000, result__resumed_from="part")
    shown = text([whole, part])
    assert "workers of part are those of the last 9,000 of 25,600 samples" in shown
    assert "workers of whole" not in shown


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = planted(tmp_path / "x" / "run"), planted(tmp_path / "y" / "run")
    assert names([a, b]) == ["x/run", "y/run"]
    monkeypatch.chdir(tmp_path / "x" / "run")
    assert names([read_run(Path())]) == ["run"]


def test_the_narrowest_table_loses_nothing(tmp_path: Path) -> None:
    one = planted(tmp_path / "20260101-120000-googlenet_small_bn-16w")
    shown = text([one, planted(tmp_path / "b", result__steps=1)], MIN_WIDTH_OF_RUNS, True)
    assert "…" not in shown
    for cell in ("400", "1,000", "1.00*", "0.0%", "90.00%", "5f59c6bf0087"):
        assert cell in shown


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("result.json", None, "no result.json; the run did not finish"),
        ("result.json", '{"steps": 4', "result.json: cannot be read"),
        ("result.json", "{}", "result.json: .*missing required field world_size"),
        ("environment.json", None, "no environment.json"),
        ("environment.json", "[]", "expected object, got array"),
        ("recipe.toml", None, "no recipe.toml"),
        ("recipe.toml", "[train", "recipe.toml: cannot be read"),
        ("recipe.toml", "train = 1\n[model]\nname = 'nin'", "train: expected object, got int"),
    ],
)
def test_runs_that_are_none(tmp_path: Path, file: str, content: str | None, words: str) -> None:
    run = plant(tmp_path / "run")
    (run / file).unlink()
    if content is not None:
        (run / file).write_text(content)
    with pytest.raises(RunError, match=words):
        read_run(run)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(plant(tmp_path / name)) for name in ("one", "two")]
    assert main(["compare", *folders]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert cells(output.out, "two")[-1] == "5f59c6bf0087"
    assert "weights identical in all 2 runs" in output.out
    long = "x" * 150  # a pipe folds nothing
    assert main(["compare", str(plant(tmp_path / long))]) == 0
    assert cells(capsys.readouterr().out, long)[0] == long
    for wrong, code in (
        ([], 2),
        (["--json"], 2),
        (["run", "--unknown"], 2),
        ([str(tmp_path / "none")], RunError.exit_code),
    ):
        assert main(["compare", *wrong]) == code
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("firecaffe: ")
        assert output.err.count("\n") == 1


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = plant(tmp_path / "one")
    two = plant(tmp_path / "two", result__steps=4, result__weights_sha256=DIGESTS["b"])
    assert main(["compare", str(one), str(two), "--json"]) == 0
    printed_json = json.loads(capsys.readouterr().out)
    assert list(printed_json) == ["rows", "differing", "identical", "doubts"]
    assert (printed_json["identical"], printed_json["differing"]) == (False, {})
    row = printed_json["rows"][1]
    assert (row["run"], row["value"], row["speedup"], row["steps"]) == ("two", 0.9, None, 4)
    assert row["other_work"] == ["samples seen"]
    assert row["measure"] == {"name": "top1", "higher_is_better": True, "is_share": True}
    assert row["weights_sha256"] == DIGESTS["b"]


ONE, OTHER = 64 * "a", 64 * "b"


@pytest.mark.parametrize(
    ("code", "groups"),
    [({"model": ONE}, 1), ({"model": OTHER}, 2), ({"model": ONE, "task": OTHER}, 2)],
)
def test_runs_of_other_code_are_not_pooled(
    tmp_path: Path, code: dict[str, str], groups: int
) -> None:
    first = planted(tmp_path / "one", environment__own_code={"model": ONE})
    second = planted(tmp_path / "two", recipe__train__seed=1, environment__own_code=code)
    table, items = rows_of([first, second])
    assert len(table) == groups
    assert items["the same code"].is_met == (groups == 1)
    assert f"model {ONE[:12]}" in items["the same code"].why


@pytest.mark.parametrize(
    ("file", "digest", "is_other"),
    [("moved.pt", ONE, False), ("w.pt", OTHER, True), ("", "", True)],
)
def test_first_weights_are_the_same_by_what_is_in_the_file(
    tmp_path: Path, file: str, digest: str, is_other: bool
) -> None:
    def run(name: str, file: str, digest: str) -> TableRun:
        words = {"recipe__model__weights": file, "result__first_weights": {"sha256": digest}}
        return planted(tmp_path / name, **(words if file else {}))

    runs = run("one", "w.pt", ONE), run("two", file, digest)
    assert other_work(*runs) == (["model"] if is_other else [])
    assert len(group_runs(runs)) == 1 + is_other


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
    shown = text([run, older])
    for part in ("MAE", "2.346", "older is judged by top-1, 0 by MAE"):
        assert part in shown
    assert "90.00%" not in shown
    assert "task" in other_work(run, older)
    table, _ = rows_of([run, older])
    assert table[1].against is None
    assert "top-1" not in printed(render_groups(table, [], {}, None))


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("errors", [(2.0, None), (None, 2.0), (None, None)])
def test_what_is_no_number_is_not_as_good(tmp_path: Path, errors: Any, seeds: int) -> None:
    """A result has null for NaN."""
    first, second = ([error and error + 0.01 * seed for seed in range(seeds)] for error in errors)
    runs = [
        *of_error(tmp_path / "a", first),
        *of_error(tmp_path / "b", second, recipe__solver__base_lr=0.5),
    ]
    table, items = rows_of(runs)
    assert table[1].against is not None
    assert (table[1].against.verdict, table[1].against.more) == (UNDECIDED, None)
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
    table, items = rows_of(runs, band=0.05)
    against = table[1].against
    assert against is not None
    assert against.verdict == verdict
    assert table[1].is_worse == (error > 2.5)
    assert items["the same accuracy"].is_met == is_met
    shown = printed(render_groups(table, [*items.values()], {}, None))
    assert f"B: MAE {error - 2:+.4g}" in shown
    assert "R²" in shown
    assert "points" not in shown
    assert ("worse MAE" in shown) == (error > 2.5)


def test_the_band_is_a_share_of_the_first_groups_mean(tmp_path: Path) -> None:
    groups = group_runs(of_error(tmp_path, [2.0, 4.0]))
    assert band_of(groups, None) == pytest.approx(0.03)
    assert band_of(groups, 0.5) == 0.5


def test_time_to_an_error(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for step, error in ((1, 4.0), (2, 2.0), (3, 1.0)):
        lines += [train(step), {"kind": "validation", "step": step, "mae": error}]
    run = with_metrics(tmp_path / "a", lines, **NUMBERS, result__mae=1.0)
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
    compare.main([*folders, "--band", "300", "--by", "recipe"])
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
