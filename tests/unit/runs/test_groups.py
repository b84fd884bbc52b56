"""Groups of runs on planted cases, whose right verdict is known."""

import io
import json
from math import inf, isinf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

import firecaffe.cli
from firecaffe.cli.compare_groups import render_groups
from firecaffe.errors import RunError
from firecaffe.runs.checklist import Item, checklist
from firecaffe.runs.compare import Run
from firecaffe.runs.curves import time_to
from firecaffe.runs.groups import GroupRow, group_rows, group_runs
from firecaffe.runs.statistics import differences, mean_of
from tests.unit.runs.test_compare import plant, planted

SAME = "5f59c6bf0087" + 52 * "a"


def over_seeds(folder: Path, accuracies: list[float], **changes: Any) -> list[Run]:
    """A run for each accuracy, of another seed and with other weights."""
    return [
        planted(
            folder / str(seed),
            **{
                "recipe__train__seed": seed,
                "result__top1": top1,
                "result__weights_sha256": f"{abs(hash((str(folder), seed))):064x}",
                **changes,
            },
        )
        for seed, top1 in enumerate(accuracies)
    ]


def rows_of(
    runs: list[Run], target: float | None = None, allow_unequal: bool = False
) -> tuple[list[GroupRow], list[Item]]:
    groups = group_runs(runs)
    rows = group_rows(groups, target, allow_unequal)
    return rows, checklist(groups, rows)


def shown(runs: list[Run], target: float | None = None, allow_unequal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=300)
    for part in render_groups(*rows_of(runs, target, allow_unequal), target):
        console.print(part)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


# --- statistics -----------------------------------------------------------------------------------


def test_a_mean_has_students_interval() -> None:
    found = mean_of([0.90, 0.92, 0.91])
    assert found.value == pytest.approx(0.91)
    assert found.half == pytest.approx(4.302652730 * 0.01 / sqrt(3))  # t at 97.5 %, 2 degrees
    assert mean_of([0.5]).half == inf
    with pytest.raises(ValueError, match="no value"):
        mean_of([])


def test_a_difference_is_welchs() -> None:
    """The unequal-variance example of scipy's reference, and Hedges' g from its definition."""
    first = [20.4, 24.2, 15.4, 21.4, 20.2, 18.5, 21.5]
    second = [20.2, 16.9, 18.5, 17.3, 20.5]
    (found,) = differences(first, [second])
    expected = stats.ttest_ind(second, first, equal_var=False)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.low < found.value < found.high
    pooled = sqrt((6 * np.var(first, ddof=1) + 4 * np.var(second, ddof=1)) / 10)
    correction = 1 - 3 / (4 * 10 - 1)  # the usual approximation
    assert found.effect == pytest.approx(correction * found.value / pooled, rel=2e-3)


def test_noise_alone_is_called_different_as_seldom_as_it_should_be() -> None:
    generator = np.random.default_rng(0)
    wrong = sum(
        differences(generator.normal(size=4).tolist(), [generator.normal(size=4).tolist()])[
            0
        ].verdict
        == "different"
        for _ in range(1000)
    )
    assert wrong < 70  # 5 % of 1000, and its own spread


def test_many_tests_share_the_error() -> None:
    first, second = [0.90, 0.91, 0.92], [0.93, 0.945, 0.95]
    assert differences(first, [second])[0].verdict == "different"
    found = differences(first, [second, *([first] * 49)])
    assert {each.verdict for each in found} == {"no difference shown"}


def test_values_without_any_spread() -> None:
    same, worse = differences([0.9] * 3, [[0.9] * 3, [0.8] * 3])
    assert (same.verdict, worse.verdict) == ("no difference shown", "different")
    assert worse.effect == -inf


def test_one_side_without_any_spread() -> None:
    """Student's test of one sample against a number: Welch's where one variance is 0."""
    (found,) = differences([0.90, 0.91, 0.93], [[0.1] * 3])
    expected = stats.ttest_1samp([0.90, 0.91, 0.93], 0.1)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.verdict == "different"


# --- planted cases --------------------------------------------------------------------------------


def test_equal_runs(tmp_path: Path) -> None:
    """The same seeds on 1 and 4 workers, to the same bits: as good, and four times as fast."""
    accuracies = [0.90, 0.91, 0.92]
    one = over_seeds(tmp_path / "one", accuracies)
    four = [
        planted(
            tmp_path / f"four-{run.folder.name}",
            recipe__train__seed=run.words["train.seed"],
            result__top1=run.result["top1"],
            result__weights_sha256=run.result["weights_sha256"],
            result__world_size=4,
            result__images_per_s=4000.0,
        )
        for run in one
    ]
    rows, items = rows_of([*one, *four])
    assert [row.seeds for row in rows] == [3, 3]
    assert rows[1].speedup == pytest.approx(4)
    assert rows[1].against is not None
    assert rows[1].against.value == 0
    assert rows[1].against.verdict == "no difference shown"
    met = {item.what: item.is_met for item in items}
    assert met.pop("a tuned baseline") is False
    assert all(met.values())


def test_a_true_difference(tmp_path: Path) -> None:
    good = over_seeds(tmp_path / "a", [0.900, 0.902, 0.901, 0.899])
    bad = over_seeds(tmp_path / "b", [0.880, 0.882, 0.879, 0.881], recipe__solver__base_lr=0.5)
    text = shown([*good, *bad])
    assert "B: top-1 -2.00 points from A (-2.2" in text
    assert ": different; its speedup is to a lower accuracy" in text
    assert "[ ] the same accuracy: B -2.00 points: different" in text
    better = shown([*bad, *good])
    assert "B: top-1 +2.00 points from A" in better
    assert "lower accuracy" not in better
    assert "[x] the same accuracy" in better


def test_noise_only(tmp_path: Path) -> None:
    first = over_seeds(tmp_path / "a", [0.900, 0.910, 0.890])
    second = over_seeds(tmp_path / "b", [0.905, 0.893, 0.911], recipe__solver__base_lr=0.5)
    text = shown([*first, *second])
    assert ": no difference shown" in text
    assert "[x] the same accuracy: no group is shown to be below the first" in text


def test_unequal_work(tmp_path: Path) -> None:
    long = over_seeds(tmp_path / "a", [0.90, 0.91, 0.92])
    short = over_seeds(tmp_path / "b", [0.80, 0.81, 0.82], result__steps=100)
    cropped = over_seeds(tmp_path / "c", [0.80, 0.81, 0.83], recipe__data__crop=24)
    rows = group_rows(group_runs([*long, *short, *cropped]))
    assert [row.speedup for row in rows] == [1.0, None, None]
    text = shown([*long, *short, *cropped])
    assert "B: no speedup over A: not the same work (samples seen)" in text
    assert "C: no speedup over A: not the same work (augmentation)" in text
    assert "[ ] a baseline of the same work: B: samples seen; C: augmentation" in text
    assert "[ ] equal epochs: 0.4267, 0.1067" in text
    allowed = shown([*long, *short, *cropped], allow_unequal=True)
    assert "B: * not the same work as A (samples seen)" in allowed
    assert "4.00x*" in allowed


def test_whole_steps_are_the_same_work(tmp_path: Path) -> None:
    """A training is whole steps, and an epoch's last one may be short: see SampleOrder."""
    small = planted(tmp_path / "a", result__samples_seen=60_000)
    large = {"recipe__train__global_batch_size": 512, "result__steps": 118}
    same = planted(tmp_path / "b", result__samples_seen=60_400, **large)
    more = planted(
        tmp_path / "c", result__samples_seen=60_600, **large, recipe__solver__base_lr=1.0
    )
    rows = group_rows(group_runs([small, same, more]))
    assert [row.unequal for row in rows] == [[], [], ["samples seen"]]


def test_nearly_equal_epochs_are_not_equal(tmp_path: Path) -> None:
    """Hundredths of an epoch, one twice the other."""
    few = planted(tmp_path / "a", result__steps=12)
    more = planted(tmp_path / "b", result__steps=24)
    items = {item.what: item for item in rows_of([few, more])[1]}
    assert not items["equal epochs"].is_met
    assert items["equal epochs"].why == "0.0128, 0.0256"


@pytest.mark.parametrize(
    ("commit", "why"),
    [("", "the code of a run has no commit"), ("c0ffee+", "code changed since its commit")],
)
def test_code_without_a_commit_is_missing(tmp_path: Path, commit: str, why: str) -> None:
    runs = [planted(tmp_path / "a"), planted(tmp_path / "b", environment__commit=commit)]
    items = {item.what: item for item in rows_of(runs)[1]}
    code = items["all hyperparameters, and the code"]
    assert (code.is_met, code.why) == (False, why)


def test_one_group_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    items = {item.what: item for item in rows_of(over_seeds(tmp_path, [0.9, 0.91, 0.92]))[1]}
    for what in ("the same accuracy", "a baseline of the same work"):
        assert not items[what].is_met
        assert items[what].why.startswith("one group alone")


def test_a_tuned_baseline_is_told_from_another(tmp_path: Path) -> None:
    for number, words in enumerate(({}, {"result__tuned": "best of 9 candidates"})):
        _, items = rows_of([planted(tmp_path / str(number), **words)])
        item = items[-1]
        assert (item.what, item.is_met) == ("a tuned baseline", bool(words))
        assert item.why.startswith("best of 9" if words else "its rate was not searched for")


def test_one_seed(tmp_path: Path) -> None:
    runs = [planted(tmp_path / "a"), planted(tmp_path / "b", recipe__solver__base_lr=0.5)]
    text = shown(runs)
    assert "not enough runs to say (1 and 1 runs, of 3 at least)" in text
    assert "±" not in text
    assert "[ ] the same accuracy: B +0.00 points: not enough runs to say" in text
    assert "[ ] repeats with other seeds: 1 of at least 3 seeds in the smallest group" in text


def test_a_repetition_on_other_workers_is_no_new_seed(tmp_path: Path) -> None:
    """Three runs of one seed ended in the same weights: one result, three times."""
    runs = [planted(tmp_path / str(number), result__weights_sha256=SAME) for number in range(3)]
    (row,) = group_rows(group_runs(runs))
    assert (row.seeds, row.time_s.n) == (1, 3)
    assert isinf(row.top1.half)


def test_seeds_that_fail_alike_are_several_results(tmp_path: Path) -> None:
    """A dead network may have the same weights, whatever it began with."""
    runs = over_seeds(tmp_path, [0.1, 0.1, 0.1], result__weights_sha256=SAME)
    (row,) = group_rows(group_runs(runs))
    assert (row.seeds, row.top1.n) == (3, 3)


# --- time to accuracy -----------------------------------------------------------------------------


def with_tests(folder: Path, top1s: list[float], rate: float = 640.0) -> Run:
    """Ten steps of 64 samples between tests."""
    run = planted(folder)
    rows: list[dict[str, Any]] = []
    for number, top1 in enumerate(top1s, 1):
        rows += [
            {"kind": "train", "step": 1, "samples": 64, "images_per_s": rate, "loss": 1.0}
            for _ in range(10)
        ]
        rows.append({"kind": "test", "step": 10 * number, "top1": top1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_time_to_a_stated_accuracy(tmp_path: Path) -> None:
    run = with_tests(tmp_path / "a", [0.5, 0.7, 0.8])
    assert time_to(run, 0.6) == pytest.approx(2.0)
    assert time_to(run, 0.9) is None
    fast = with_tests(tmp_path / "b", [0.5, 0.65, 0.8], rate=1280.0)
    groups = group_runs([run, planted(tmp_path / "c", result__world_size=2)])
    assert len(groups) == 2
    rows = group_rows(group_runs([run, fast]), target=0.6)
    assert rows[0].time_s.value == pytest.approx(1.5)
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be read"):
        time_to(planted(tmp_path / "d"), 0.5)


def test_a_target_that_was_not_reached_has_no_speedup(tmp_path: Path) -> None:
    good = with_tests(tmp_path / "a", [0.9])
    plant(tmp_path / "b", recipe__solver__base_lr=0.5)
    bad = with_tests(tmp_path / "x", [0.2])
    bad = Run(bad.folder, bad.result, {**bad.words, "solver.base_lr": 0.5})
    rows = group_rows(group_runs([good, bad]), target=0.6)
    assert rows[1].speedup is None
    assert rows[1].why_no_speedup == "x did not reach 60.00%"
    assert rows[1].unequal == []


# --- the command ----------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = over_seeds(tmp_path / "a", [0.90, 0.91, 0.92])
    runs += over_seeds(tmp_path / "b", [0.90, 0.91], recipe__solver__base_lr=0.5)
    folders = [str(run.folder) for run in runs]
    assert firecaffe.cli.main(["compare", "--by", "recipe", *folders]) == 0
    first = capsys.readouterr().out
    assert "91.00 ± 2.48 %" in first
    assert all(folder in first for folder in folders)  # each figure can be traced
    assert firecaffe.cli.main(["compare", "--by", "recipe", *folders]) == 0
    assert capsys.readouterr().out == first
    assert firecaffe.cli.main(["compare", "--by", "recipe", "--json", *folders]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [group["seeds"] for group in found["groups"]] == [3, 2]
    assert found["groups"][1]["against"]["low"] is None
    assert firecaffe.cli.main(["compare", "--target", "0.5", *folders]) == 2
    assert "goes with --by recipe" in capsys.readouterr().err
