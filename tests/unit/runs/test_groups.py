"""Groups of runs on planted cases, whose right verdict is known."""

import json
from math import isinf
from pathlib import Path
from typing import Any

import pytest

import firecaffe.cli
from firecaffe.api.compare_groups import render_groups
from firecaffe.errors import RunError
from firecaffe.runs.checklist import Item, checklist
from firecaffe.runs.curves import time_to
from firecaffe.runs.run_table import TableRun
from firecaffe.runs.seed_groups import GroupRow, differing, group_rows, group_runs
from firecaffe.runs.statistics import UNDECIDED
from tests.unit.runs.test_compare import planted, printed
from tests.unit.runs.test_curves import train, with_metrics

SAME = "5f59c6bf0087" + 52 * "a"


def over_seeds(
    folder: Path, values: list[float], metric: str = "top1", **changes: Any
) -> list[TableRun]:
    """A run for each value of the metric, of another seed and with other weights."""
    runs = []
    for seed, value in enumerate(values):
        words: Any = {"recipe__train__seed": seed, f"result__{metric}": value}
        words["result__weights_sha256"] = f"{abs(hash((str(folder), seed))):064x}"
        runs.append(planted(folder / str(seed), **{**words, **changes}))
    return runs


def rows_of(
    runs: list[TableRun], target: float | None = None, allow_unequal: bool = False
) -> tuple[list[GroupRow], list[Item]]:
    groups = group_runs(runs)
    rows = group_rows(groups, target, allow_unequal)
    return rows, checklist(groups, rows)


def shown(runs: list[TableRun], target: float | None = None, allow_unequal: bool = False) -> str:
    words = differing(group_runs(runs))
    return printed(render_groups(*rows_of(runs, target, allow_unequal), words, target))


def unmet(items: list[Item]) -> list[str]:
    return [item.what for item in items if not item.is_met]


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
    assert rows[1].speedup is not None
    assert rows[1].speedup.value == pytest.approx(4)
    assert rows[1].against is not None
    assert rows[1].against.value == 0
    assert rows[1].against.verdict == UNDECIDED  # a point of spread does not show it
    assert unmet(items) == ["the same accuracy", "a tuned baseline"]
    # A record may say anything, also of a seed.
    runs = over_seeds(tmp_path / "odd", [0.9, 0.91], recipe__train__seed=[3])
    assert rows_of(runs)[0][0].seeds == 2


def test_a_true_difference(tmp_path: Path) -> None:
    good = over_seeds(tmp_path / "a", [0.900, 0.902, 0.901, 0.899])
    bad = over_seeds(tmp_path / "b", [0.880, 0.882, 0.879, 0.881], recipe__solver__base_lr=0.5)
    text = shown([*good, *bad])
    assert "B: top-1 -2.00 (-2.2" in text
    assert "solver.base_lr: A 0.01, B 0.5" in text
    assert ": different; its speedup is to a worse top-1" in text
    assert "[ ] the same accuracy: B -2.00 points: different" in text
    better = shown([*bad, *good])
    assert "B: top-1 +2.00 (" in better
    assert "worse" not in better
    assert "[x] the same accuracy" in better


def test_noise_only(tmp_path: Path) -> None:
    first = over_seeds(tmp_path / "a", [0.900, 0.910, 0.890])
    second = over_seeds(tmp_path / "b", [0.905, 0.893, 0.911], recipe__solver__base_lr=0.5)
    text = shown([*first, *second])
    assert UNDECIDED in text
    assert "[ ] the same accuracy: B +0.30 points" in text
    steady = over_seeds(tmp_path / "c", [0.9000, 0.9002, 0.9001])
    as_good = over_seeds(tmp_path / "d", [0.9001, 0.8999, 0.9002], recipe__solver__base_lr=0.5)
    text = shown([*steady, *as_good])
    assert ": equivalent" in text
    assert "[x] the same accuracy" in text


def test_a_loss_of_twenty_points_is_not_the_same_accuracy(tmp_path: Path) -> None:
    """Few and noisy runs: the test alone shows no difference (p = 0.097)."""
    good = over_seeds(tmp_path / "a", [0.86, 0.86, 0.86])
    lost = over_seeds(tmp_path / "b", [0.78, 0.66, 0.55], recipe__solver__base_lr=0.5)
    rows, items = rows_of([*good, *lost])
    against = rows[1].against
    assert against is not None
    assert against.p_value == pytest.approx(0.097, abs=0.001)
    assert against.verdict == UNDECIDED
    assert "the same accuracy" in unmet(items)


def test_what_failed_is_neither_as_good_nor_faster(tmp_path: Path) -> None:
    """Both sides always name the largest class: as equal as can be, and nothing learned."""
    words: Any = {"result__largest_class_share": 0.1398, "result__test_samples": 1001}
    accuracies = [140 / 1001] * 3
    one = over_seeds(tmp_path / "a", accuracies, **words)
    two = over_seeds(tmp_path / "b", accuracies, **words, result__images_per_s=2e3)
    two = [TableRun(run.folder, run.result, {**run.words, "solver.base_lr": 0.5}) for run in two]
    rows, items = rows_of([*one, *two])
    assert [row.speedup for row in rows] == [None, None]
    assert [row.against for row in rows] == [None, None]
    assert {"every run has learned", "the same accuracy"} <= {*unmet(items)}
    assert "B: failed: 3 of 3 runs did not learn (top-1 not above 13.98%" in shown([*one, *two])


def test_a_seed_that_failed_is_not_averaged_away(tmp_path: Path) -> None:
    good = over_seeds(tmp_path / "a", [0.87, 0.88, 0.875])
    words: Any = {"recipe__solver__base_lr": 0.5}
    some = over_seeds(tmp_path / "b", [0.8771, 0.10, 0.8779], **words)
    wild = over_seeds(tmp_path / "c", [0.99, 0.35, 0.60], recipe__solver__base_lr=0.7)
    text = shown([*good, *some, *wild])
    assert "median 87.71 % (10.00, 87.71, 87.79)" in text
    assert "median 60.00 % (35.00, 60.00, 99.00)" in text  # 64.67 ± 80.3 is no accuracy
    assert "B: failed: 1 of 3 runs did not learn" in text
    assert "B: no speedup over A: B has failed" in text
    assert "C: top-1 " in text


def test_a_record_that_does_not_say_what_guessing_comes_to(tmp_path: Path) -> None:
    runs = over_seeds(tmp_path, [0.1, 0.1, 0.1], result__largest_class_share=None)
    rows, items = rows_of(runs)
    assert rows[0].failure == ""
    (learned,) = (item for item in items if item.what == "every run has learned")
    assert (learned.is_met, "A" in learned.why) == (False, True)


@pytest.mark.parametrize(
    ("word", "value"), [("source", "b" * 64), ("torch", "2.14.0"), ("cpu", "B"), ("gpus", ["H100"])]
)
def test_other_code_and_hardware_are_other_groups(tmp_path: Path, word: str, value: Any) -> None:
    one = over_seeds(tmp_path / "a", [0.90, 0.91, 0.92])
    two = over_seeds(tmp_path / "b", [0.90, 0.91, 0.92], **{f"environment__{word}": value})
    groups = group_runs([*one, *two])
    assert [len(group.runs) for group in groups] == [3, 3]
    name = f"environment.{word}"
    assert f"{name}: A " in shown([*one, *two])
    missing = {"environment.source": "the same code", "environment.torch": "the same code"}
    items = rows_of([*one, *two])[1]
    assert missing.get(name, "the same kind of hardware") in unmet(items)


def test_older_records_are_told_apart_by_their_commit(tmp_path: Path) -> None:
    old = {"environment__source": None}
    runs = [
        planted(tmp_path / commit, environment__commit=commit, **old, recipe__train__seed=seed)
        for seed, commit in enumerate(("c0ffee", "dec0de", "facade"))
    ]
    assert len(group_runs(runs)) == 3
    same = [
        planted(tmp_path / f"same-{commit}", environment__commit=commit)
        for commit in ("c0ffee", "dec0de")  # another page of the docs
    ]
    assert len(group_runs(same)) == 1


def test_a_speedup_has_an_interval(tmp_path: Path) -> None:
    """Times of 16.3 and 11.3 s that scatter by as much: 1.4 times as fast is not shown."""

    def at_rates(name: str, rates: list[float], **words: Any) -> list[TableRun]:
        return [
            planted(
                tmp_path / f"{name}{seed}",
                recipe__train__seed=seed,
                result__images_per_s=rate,
                result__weights_sha256=f"{name}{seed}" * 32,
                **words,
            )
            for seed, rate in enumerate(rates)
        ]

    slow = at_rates("a", [1000, 1900, 3000])
    fast = at_rates("b", [2200, 2300, 2250], recipe__solver__base_lr=0.5)
    faster = at_rates("c", [9000, 9900, 9500], recipe__solver__base_lr=0.7)
    rows, _ = rows_of([*slow, *fast])
    assert rows[1].speedup is not None
    assert rows[1].speedup.low < 1 < rows[1].speedup.high
    assert "B: neither faster nor slower is shown" in shown([*slow, *fast])
    text = shown([*fast, *faster])
    assert "is shown" not in text
    assert "4.20x (3.8" in text
    assert "B: its speedup is of too few runs for an interval" in shown([fast[0], faster[0]])


def test_unequal_work(tmp_path: Path) -> None:
    long = over_seeds(tmp_path / "a", [0.90, 0.91, 0.92])
    short = over_seeds(tmp_path / "b", [0.80, 0.81, 0.82], result__steps=100)
    cropped = over_seeds(tmp_path / "c", [0.80, 0.81, 0.83], recipe__data__crop=24)
    rows = group_rows(group_runs([*long, *short, *cropped]))
    assert [row.speedup is not None for row in rows] == [True, False, False]
    text = shown([*long, *short, *cropped])
    assert "B: no speedup over A: not the same work (samples seen)" in text
    assert "C: no speedup over A: not the same work (augmentation)" in text
    assert "[ ] a baseline of the same work: B: samples seen; C: augmentation" in text
    assert "[ ] equal epochs: 0.4267, 0.1067" in text
    allowed = shown([*long, *short, *cropped], allow_unequal=True)
    assert "B: * not the same work as A (samples seen)" in allowed
    assert "4.00x*" in allowed  # without any spread there is no interval to show


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
    ("words", "is_met", "why"),
    [
        ({"environment__commit": "", "environment__source": None}, False, "neither a commit nor"),
        ({"environment__commit": "c0ffee+"}, False, "code changed since its commit"),
        ({"environment__commit": ""}, True, "firecaffe 0.1.0, source aaaaaaaaaaaa"),
    ],
)
def test_the_code_has_a_commit_or_is_an_installed_package(
    tmp_path: Path, words: dict[str, Any], is_met: bool, why: str
) -> None:
    runs = [planted(tmp_path / "a"), planted(tmp_path / "b", **words)]
    items = {item.what: item for item in rows_of(runs)[1]}
    code = items["all hyperparameters, and the code"]
    assert code.is_met is is_met
    assert why in code.why


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
    assert "not enough runs to say (about 2 more of each would do)" in text
    assert "±" not in text
    assert "[ ] the same accuracy: B +0.00 points: not enough runs to say" in text
    assert "[ ] repeats with other seeds: 1 of at least 3 seeds in the smallest group" in text


def test_a_repetition_on_other_workers_is_no_new_seed(tmp_path: Path) -> None:
    """Three runs of one seed ended in the same weights: one result, three times."""
    runs = [planted(tmp_path / str(number), result__weights_sha256=SAME) for number in range(3)]
    (row,) = group_rows(group_runs(runs))
    assert (row.seeds, row.time_s.n) == (1, 3)
    assert isinf(row.value.half)


def test_seeds_that_fail_alike_are_several_results(tmp_path: Path) -> None:
    """A dead network may have the same weights, whatever it began with."""
    runs = over_seeds(tmp_path, [0.1, 0.1, 0.1], result__weights_sha256=SAME)
    (row,) = group_rows(group_runs(runs))
    assert (row.seeds, row.value.n) == (3, 3)


def with_tests(folder: Path, top1s: list[float], rate: float = 640.0) -> TableRun:
    """Ten steps of 64 samples between tests."""
    rows: list[dict[str, Any]] = []
    for number, top1 in enumerate(top1s, 1):
        rows += [train(1) | {"images_per_s": rate}] * 10
        rows.append({"kind": "test", "step": 10 * number, "top1": top1})
    return with_metrics(folder, rows)


def test_time_to_a_stated_accuracy(tmp_path: Path) -> None:
    run = with_tests(tmp_path / "a", [0.5, 0.7, 0.8])
    assert time_to(run, 0.6) == pytest.approx(2.0)
    assert time_to(run, 0.9) is None
    fast = with_tests(tmp_path / "b", [0.5, 0.65, 0.8], rate=1280.0)
    assert len(group_runs([run, planted(tmp_path / "c", result__world_size=2)])) == 2
    rows = group_rows(group_runs([run, fast]), target=0.6)
    assert rows[0].time_s.value == pytest.approx(1.5)
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be read"):
        time_to(planted(tmp_path / "d"), 0.5)


def test_a_target_that_was_not_reached_has_no_speedup(tmp_path: Path) -> None:
    good, bad = with_tests(tmp_path / "a", [0.9]), with_tests(tmp_path / "x", [0.2])
    bad = TableRun(bad.folder, bad.result, {**bad.words, "solver.base_lr": 0.5})
    rows = group_rows(group_runs([good, bad]), target=0.6)
    assert rows[1].speedup is None
    assert rows[1].why_no_speedup == "x did not reach 60.00%"
    assert rows[1].unequal == []


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
    assert found["groups"][0]["value"]["values"] == [0.90, 0.91, 0.92]
    banded = ["compare", "--by", "recipe", "--json", *folders[:3]]
    steady = over_seeds(tmp_path / "c", [0.90, 0.91, 0.92], recipe__solver__base_lr=0.5)
    banded += [str(run.folder) for run in steady]
    for band, verdict in (("0.3", UNDECIDED), ("5", "equivalent")):
        assert firecaffe.cli.main([*banded, "--band", band]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["groups"][1]["against"]["verdict"] == verdict
    assert firecaffe.cli.main(["compare", "--band", "1", *folders]) == 2
    assert "--band" in capsys.readouterr().err
    assert firecaffe.cli.main(["compare", "--target", "0.5", *folders]) == 2
    assert "goes with --by recipe" in capsys.readouterr().err


def test_stages_that_idle(tmp_path: Path) -> None:
    """The mean of all runs, beside what stages of equal work would come to."""
    stages = {"result__parallel": {"stages": ["b"], "idle_if_equal": 0.25}}
    plain = over_seeds(tmp_path / "plain", [0.7, 0.7])
    idle = [
        planted(folder, **{"recipe__train__seed": seed, "result__idle_by_stage": each, **stages})
        for seed, (folder, each) in enumerate(
            [(tmp_path / "0", [0.2, 0.4]), (tmp_path / "1", [0.4, 0.6])], 5
        )
    ]
    assert "stages idle" not in shown(plain)
    assert "stages idle for 30%, 50%; equal ones for 25%" in shown(idle)
