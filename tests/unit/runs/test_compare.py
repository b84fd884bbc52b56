"""Finished runs side by side: rows, differing words, unlike work, and the command; of other code of
a user, or from other first weights, they are other experiments.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from firecaffe.api.comparison import MIN_WIDTH_OF_RUNS, render
from firecaffe.cli import main
from firecaffe.errors import RunError
from firecaffe.runs.checklist import checklist
from firecaffe.runs.run_table import (
    TableRun,
    differing_words,
    names,
    other_work,
    read_run,
    rows,
    weights_identical,
)
from firecaffe.runs.seed_groups import group_rows, group_runs
from tests.kit.compared_runs import DIGESTS, plant, planted, printed


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
    pooled = group_runs([first, second])
    assert len(pooled) == groups
    items = {item.what: item for item in checklist(pooled, group_rows(pooled))}
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
