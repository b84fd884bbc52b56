"""Finished runs side by side: rows, differing words, unlike work, and the command; of other code of
a user, or from other first weights, they are other experiments.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

import firecaffe.cli
from firecaffe.api.compare import MIN_WIDTH_OF_RUNS, render
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

DIGESTS = {"a": "5f59c6bf0087" + 52 * "a", "b": "958065d44b59" + 52 * "b"}


def plant(folder: Path, **changes: Any) -> Path:
    """A finished run's folder. A change is written as file__key or recipe__section__word."""
    contents: dict[str, dict[str, Any]] = {
        "result": {
            "world_size": 1,
            "exchange": "tree",
            "route": "tree",
            "data": "mnist: 60000 training images",
            "steps": 400,
            "images_per_s": 1000.0,
            "exposed_communication": 0.0,
            "top1": 0.9,
            "largest_class_share": 0.1,
            "test_samples": 10_000,
            "weights_sha256": DIGESTS["a"],
        },
        "environment": {
            "host": "one",
            "cpu": "A",
            "gpus": [],
            "torch": "2.13.0",
            "firecaffe": "0.1.0",
            "commit": "c0ffee",
            "source": 64 * "a",
        },
        "recipe": {
            "model": {"name": "lenet"},
            "data": {"name": "mnist", "path": str(folder), "crop": 0},
            "train": {"global_batch_size": 64, "steps": 400, "epochs": 1},
            "solver": {"base_lr": 0.01, "stepvalue": []},
            "run": {"folder": str(folder)},
            "task": {},
        },
    }
    for name, value in changes.items():
        *path, word = name.split("__")
        target = contents
        for part in path:
            target = target[part]
        target[word] = value
    folder.mkdir(parents=True)
    for name in ("result", "environment"):
        (folder / f"{name}.json").write_text(json.dumps(contents[name]))
    (folder / "recipe.toml").write_text(tomli_w.dumps(contents["recipe"]))
    return folder


def planted(folder: Path, **changes: Any) -> TableRun:
    return read_run(plant(folder, **changes))


def printed(parts: Iterable[Any], width: int = 300) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def text(runs: list[TableRun], width: int = 200, allow_unequal: bool = False) -> str:
    return printed(render(runs, allow_unequal), width)


def cells(shown: str, name: str) -> list[str]:
    """The cells of a run's line in the table."""
    return next(line for line in shown.splitlines() if line.startswith(name)).split()


def test_equal_work(tmp_path: Path) -> None:
    one = planted(tmp_path / "one")
    four = planted(
        tmp_path / "four",
        result__world_size=4,
        result__route="fold",
        result__images_per_s=3210.0,
        result__exposed_communication=0.0625,
    )
    assert [
        (row.run, row.workers, row.exchange, row.speedup, row.other_work)
        for row in rows([one, four])
    ] == [("one", 1, "tree", 1.0, []), ("four", 4, "tree (fold)", 3.21, [])]
    assert weights_identical([one, four])
    assert differing_words([one, four]) == {}
    shown = text([one, four])
    line = "four tree (fold) 4 64 0.01 400 3,210 3.21 6.2% 90.00% 5f59c6bf0087"
    assert cells(shown, "four") == line.split()
    assert "no hyperparameter differs" in shown
    assert "weights identical in all 2 runs: 5f59c6bf0087" in shown
    assert "*" not in shown
    assert "single runs, without intervals" in shown
    assert rows([four, one])[1].speedup == pytest.approx(1 / 3.21)  # over the first one given
    alone = text([one])
    assert cells(alone, "one")[-1] == "5f59c6bf0087"
    for word in ("single runs", "differ", "identical"):
        assert word not in alone


def test_another_learning_rate_is_shown_and_fair(tmp_path: Path) -> None:
    one = planted(tmp_path / "one")
    two = planted(
        tmp_path / "two",
        recipe__solver__base_lr=0.02,
        recipe__solver__stepvalue=[200, 300],
        recipe__data__path="elsewhere",
        environment__gpus=["H200", "H200"],
        environment__command=["y"],
        result__weights_sha256=DIGESTS["b"],
    )
    assert differing_words([one, two, one]) == {
        "solver.base_lr": [0.01, 0.02, 0.01],
        "solver.stepvalue": [[], [200, 300], []],
        "environment.gpus": [[], ["H200", "H200"], []],
    }
    shown = text([one, two])
    assert cells(shown, "solver.base_lr") == ["solver.base_lr", "0.01", "0.02"]
    assert cells(shown, "solver.stepvalue") == ["solver.stepvalue", "none", "200,", "300"]
    assert cells(shown, "environment.gpus") == ["environment.gpus", "none", "H200,", "H200"]
    assert "no hyperparameter differs" not in shown
    assert "weights not identical: 2 different ones in 2 runs" in shown
    assert "*" not in shown


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"result__steps": 100, "recipe__train__steps": 100}, ["samples seen"]),
        ({"recipe__train__global_batch_size": 128}, ["samples seen"]),
        ({"recipe__model__name": "nin"}, ["model"]),
        ({"result__data": "mnist: 59999 training images"}, ["data"]),
        ({"recipe__data__crop": 24}, ["augmentation"]),
        ({"recipe__model__name": "nin", "result__steps": 1}, ["model", "samples seen"]),
    ],
)
def test_other_work_is_marked(tmp_path: Path, changes: dict[str, Any], what: list[str]) -> None:
    one, two = planted(tmp_path / "one"), planted(tmp_path / "two", **changes)
    assert other_work(one, two) == other_work(two, one) == what
    shown = text([one, two])
    assert "1.00" in cells(shown, "one")
    assert "1.00" not in cells(shown, "two")
    assert f"two in {', '.join(what)}." in shown
    shown = text([one, two], allow_unequal=True)
    assert "1.00*" in cells(shown, "two")
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


def test_a_word_that_only_one_run_has(tmp_path: Path) -> None:
    one = planted(tmp_path / "one")
    two = planted(tmp_path / "two", recipe__solver__new=False)
    assert differing_words([one, two]) == {"solver.new": [None, False]}
    assert cells(text([one, two]), "solver.new") == ["solver.new", "-", "false"]


def test_a_run_too_short_for_a_rate(tmp_path: Path) -> None:
    one, two = planted(tmp_path / "one", result__images_per_s=0.0), planted(tmp_path / "two")
    assert [row.speedup for row in rows([one, two])] == [None, None]
    assert [row.speedup for row in rows([two, one])] == [1.0, None]
    assert "-" in cells(text([two, one]), "one")


def test_a_run_that_learned_nothing_is_not_fast(tmp_path: Path) -> None:
    one = planted(tmp_path / "one")
    two = planted(tmp_path / "two", result__top1=0.104, result__images_per_s=4000.0)
    assert [row.speedup for row in rows([one, two])] == [1.0, None]
    assert "two has failed: 1 of 1 runs did not learn (top-1 not above 10.00%" in text([one, two])


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
def test_runs_that_are_none(
    tmp_path: Path, file: str, content: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path / "run")
    (tmp_path / "run" / file).unlink()
    if content is not None:
        (tmp_path / "run" / file).write_text(content)
    with pytest.raises(RunError, match=words):
        read_run(tmp_path / "run")
    assert firecaffe.cli.main(["compare", str(tmp_path / "run")]) == RunError.exit_code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"firecaffe: {tmp_path}")
    assert output.err.count("\n") == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(plant(tmp_path / name)) for name in ("one", "two")]
    assert firecaffe.cli.main(["compare", *folders]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert cells(output.out, "two")[-1] == "5f59c6bf0087"
    assert "weights identical in all 2 runs" in output.out
    long = "x" * 150  # a pipe folds nothing
    assert firecaffe.cli.main(["compare", str(plant(tmp_path / long))]) == 0
    assert cells(capsys.readouterr().out, long)[0] == long
    for wrong in ([], ["--json"], ["run", "--unknown"]):
        assert firecaffe.cli.main(["compare", *wrong]) == 2
        assert capsys.readouterr().err.startswith("firecaffe: ")


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = plant(tmp_path / "one")
    two = plant(tmp_path / "two", result__steps=4, result__weights_sha256=DIGESTS["b"])
    assert firecaffe.cli.main(["compare", str(one), str(two), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["rows", "differing", "identical", "doubts"]
    assert (found["identical"], found["differing"]) == (False, {})
    assert found["rows"][1] == {
        "run": "two",
        "workers": 1,
        "exchange": "tree",
        "global_batch_size": 64,
        "base_lr": 0.01,
        "steps": 4,
        "images_per_s": 1000.0,
        "speedup": None,
        "other_work": ["samples seen"],
        "exposed_communication": 0.0,
        "measure": {"name": "top1", "higher_is_better": True, "is_share": True},
        "value": 0.9,
        "failure": "",
        "weights_sha256": DIGESTS["b"],
    }


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
    (code,) = (e for e in checklist(found, group_rows(found)) if e.what == "the same code")
    assert code.is_met == (groups == 1)
    assert f"model {ONE[:12]}" in code.why


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
