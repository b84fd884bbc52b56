"""Groups of runs on planted cases, whose right verdict is known."""

import json
from math import isinf
from pathlib import Path
from typing import Any

import pytest

from firecaffe.api.compare_groups import render_groups
from firecaffe.cli import main
from firecaffe.runs.checklist import Item
from firecaffe.runs.curves import time_to
from firecaffe.runs.run_table import TableRun
from firecaffe.runs.seed_groups import differing, group_rows, group_runs
from firecaffe.runs.statistics import UNDECIDED
from tests.kit.compared_runs import (
    DIGESTS,
    over_seeds,
    planted,
    printed,
    rows_of,
    train,
    with_metrics,
)


def shown(runs: list[TableRun], target: float | None = None, allow_unequal: bool = False) -> str:
    rows, items = rows_of(runs, target, allow_unequal)
    return printed(render_groups(rows, [*items.values()], differing(group_runs(runs)), target))


def unmet(items: dict[str, Item]) -> list[str]:
    return [what for what, item in items.items() if not item.is_met]


def test_equal_runs(tmp_path: Path) -> None:
    """The same seeds on 1 and 4 workers, to the same bits: as good, and four times as fast."""
    runs = []
    for workers in (1, 4):
        for seed, top1 in enumerate((0.90, 0.91, 0.92)):
            words: dict[str, Any] = {"recipe__train__seed": seed, "result__top1": top1}
            words |= {"result__world_size": workers, "result__images_per_s": 1000.0 * workers}
            words |= {"result__weights_sha256": 64 * str(seed)}
            runs.append(planted(tmp_path / f"{workers}-{seed}", **words))
    rows, items = rows_of(runs)
    assert [row.seeds for row in rows] == [3, 3]
    assert rows[1].speedup is not None
    assert rows[1].speedup.value == pytest.approx(4)
    assert rows[1].against is not None
    assert (rows[1].against.value, rows[1].against.verdict) == (0, UNDECIDED)
    assert unmet(items) == ["the same accuracy", "a tuned baseline"]  # a point of spread
    # A record may say anything, also of a seed.
    odd = over_seeds(tmp_path / "odd", [0.9, 0.91], recipe__train__seed=[3])
    assert rows_of(odd)[0][0].seeds == 2


GOOD, BAD = [0.900, 0.902, 0.901, 0.899], [0.880, 0.882, 0.879, 0.881]
WORSE = "different; its speedup is to a worse top-1"


@pytest.mark.parametrize(
    ("first", "second", "words", "is_as_good"),
    [
        (GOOD, BAD, ["B: top-1 -2.00 (-2.2", f": {WORSE}", "B -2.00 points: different"], False),
        (BAD, GOOD, ["B: top-1 +2.00 ("], True),
        ([0.9000, 0.9002, 0.9001], [0.9001, 0.8999, 0.9002], [": equivalent"], True),
        ([0.900, 0.910, 0.890], [0.905, 0.893, 0.911], [UNDECIDED, "B +0.30 points"], False),
        # Few and noisy runs: the test alone shows no difference.
        ([0.86, 0.86, 0.86], [0.78, 0.66, 0.55], [UNDECIDED], False),
        ([0.9], [0.9], ["not enough runs to say (about 2 more of each would do)"], False),
    ],
    ids=["worse", "better", "equal", "noise", "lost", "one seed"],
)
def test_verdicts(
    tmp_path: Path, first: list[float], second: list[float], words: list[str], is_as_good: bool
) -> None:
    runs = [
        *over_seeds(tmp_path / "a", first),
        *over_seeds(tmp_path / "b", second, recipe__solver__base_lr=0.5),
    ]
    text = shown(runs)
    assert "solver.base_lr: A 0.01, B 0.5" in text
    for word in words:
        assert word in text
    assert f"[{'x' if is_as_good else ' '}] the same accuracy" in text
    assert ("worse" in text) == (WORSE in " ".join(words))
    if len(first) == 1:
        assert "±" not in text
        assert "[ ] repeats with other seeds: 1 of at least 3 seeds in the smallest group" in text


def test_what_failed_is_neither_as_good_nor_faster(tmp_path: Path) -> None:
    """Both sides always name the largest class: as equal as can be, and nothing learned."""
    words: Any = {"result__largest_class_share": 0.1398, "result__test_samples": 1001}
    runs = over_seeds(tmp_path / "a", [140 / 1001] * 3, **words)
    words |= {"result__images_per_s": 2e3, "recipe__solver__base_lr": 0.5}
    runs += over_seeds(tmp_path / "b", [140 / 1001] * 3, **words)
    rows, items = rows_of(runs)
    assert [(row.speedup, row.against) for row in rows] == [(None, None)] * 2
    assert {"every run has learned", "the same accuracy"} <= {*unmet(items)}
    assert "B: failed: 3 of 3 runs did not learn (top-1 not above 13.98%" in shown(runs)


def test_a_seed_that_failed_is_not_averaged_away(tmp_path: Path) -> None:
    text = shown(
        [
            *over_seeds(tmp_path / "a", [0.87, 0.88, 0.875]),
            *over_seeds(tmp_path / "b", [0.8771, 0.10, 0.8779], recipe__solver__base_lr=0.5),
            *over_seeds(tmp_path / "c", [0.99, 0.35, 0.60], recipe__solver__base_lr=0.7),
        ]
    )
    assert "median 87.71 % (10.00, 87.71, 87.79)" in text
    assert "median 60.00 % (35.00, 60.00, 99.00)" in text  # 64.67 ± 80.3 is no accuracy
    assert "B: failed: 1 of 3 runs did not learn" in text
    assert "B: no speedup over A: B has failed" in text
    assert "C: top-1 " in text


def test_a_run_that_goes_on_from_another_has_no_time_of_its_own(tmp_path: Path) -> None:
    """Its rate is that of its last part, perhaps of other workers; a restart's is of the run."""
    whole = over_seeds(tmp_path / "a", [0.87, 0.88])
    resumed = {"result__resumed_from": "elsewhere/checkpoints/step-00000010"}
    parts = over_seeds(tmp_path / "b", [0.87, 0.88], recipe__solver__base_lr=0.5, **resumed)
    rows, _ = rows_of([*whole, *parts])
    assert [row.speedup is None for row in rows] == [False, True]
    assert "goes on from another run" in shown([*whole, *parts])
    for place, run in enumerate(parts):
        run.result["resumed_from"] = str(tmp_path / "b" / str(place))
    assert [row.speedup is None for row in rows_of([*whole, *parts])[0]] == [False, False]


def test_a_record_that_does_not_say_what_guessing_comes_to(tmp_path: Path) -> None:
    rows, items = rows_of(over_seeds(tmp_path, [0.1] * 3, result__largest_class_share=None))
    assert rows[0].failure == ""
    assert not items["every run has learned"].is_met
    assert "A" in items["every run has learned"].why


@pytest.mark.parametrize(
    ("word", "value", "missing"),
    [
        ("source", "b" * 64, "the same code"),
        ("torch", "2.14.0", "the same code"),
        ("cpu", "B", "the same kind of hardware"),
        ("gpus", ["H100"], "the same kind of hardware"),
    ],
)
def test_other_code_and_hardware_are_other_groups(
    tmp_path: Path, word: str, value: Any, missing: str
) -> None:
    runs = over_seeds(tmp_path / "a", [0.90, 0.91])
    runs += over_seeds(tmp_path / "b", [0.90, 0.91], **{f"environment__{word}": value})
    assert [len(group.runs) for group in group_runs(runs)] == [2, 2]
    assert f"environment.{word}: A " in shown(runs)
    assert missing in unmet(rows_of(runs)[1])


def test_older_records_are_told_apart_by_their_commit(tmp_path: Path) -> None:
    for words, groups in (({"environment__source": None}, 3), ({}, 1)):
        runs = [
            planted(tmp_path / f"{commit}-{groups}", environment__commit=commit, **words)
            for commit in ("c0ffee", "dec0de", "facade")
        ]
        assert len(group_runs(runs)) == groups


def test_a_speedup_has_an_interval(tmp_path: Path) -> None:
    """Times that scatter by as much as they differ: 1.4 times as fast is not shown."""
    slow, fast, faster = (
        over_seeds(tmp_path / str(lr), rates, "images_per_s", recipe__solver__base_lr=lr)
        for lr, rates in (
            (0.01, [1000, 1900, 3000]),
            (0.5, [2200, 2300, 2250]),
            (0.7, [9000, 9900, 9500]),
        )
    )
    rows, _ = rows_of([*slow, *fast])
    assert rows[1].speedup is not None
    assert rows[1].speedup.low < 1 < rows[1].speedup.high
    assert "B: neither faster nor slower is shown" in shown([*slow, *fast])
    text = shown([*fast, *faster])
    assert "is shown" not in text
    assert "4.20x (3.8" in text
    assert "B: its speedup is of too few runs for an interval" in shown([fast[0], faster[0]])


def test_unequal_work(tmp_path: Path) -> None:
    runs = [
        *over_seeds(tmp_path / "a", [0.90, 0.91, 0.92]),
        *over_seeds(tmp_path / "b", [0.80, 0.81, 0.82], result__steps=100),
        *over_seeds(tmp_path / "c", [0.80, 0.81, 0.83], recipe__data__crop=24),
    ]
    assert [row.speedup is not None for row in rows_of(runs)[0]] == [True, False, False]
    text = shown(runs)
    assert "B: no speedup over A: not the same work (samples seen)" in text
    assert "C: no speedup over A: not the same work (augmentation)" in text
    assert "[ ] a baseline of the same work: B: samples seen; C: augmentation" in text
    assert "[ ] equal epochs: 0.4267, 0.1067" in text
    allowed = shown(runs, allow_unequal=True)
    assert "B: * not the same work as A (samples seen)" in allowed
    assert "4.00x*" in allowed  # without any spread there is no interval to show


def test_whole_steps_are_the_same_work_and_hundredths_of_an_epoch_are_not(tmp_path: Path) -> None:
    """A training is whole steps, and an epoch's last one may be short: see SampleOrder."""
    large = {"recipe__train__global_batch_size": 512, "result__steps": 118}
    runs = [
        planted(tmp_path / "a", result__samples_seen=60_000),
        planted(tmp_path / "b", result__samples_seen=60_400, **large),
        planted(tmp_path / "c", result__samples_seen=60_600, **large, recipe__solver__base_lr=1.0),
    ]
    assert [row.unequal for row in rows_of(runs)[0]] == [[], [], ["samples seen"]]
    few = [planted(tmp_path / str(steps), result__steps=steps) for steps in (12, 24)]
    epochs = rows_of(few)[1]["equal epochs"]
    assert (epochs.is_met, epochs.why) == (False, "0.0128, 0.0256")


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
    code = rows_of(runs)[1]["all hyperparameters, and the code"]
    assert code.is_met is is_met
    assert why in code.why


def test_one_group_is_compared_with_nothing_and_may_be_tuned(tmp_path: Path) -> None:
    items = rows_of([planted(tmp_path / "a")])[1]
    for what in ("the same accuracy", "a baseline of the same work"):
        assert not items[what].is_met
        assert items[what].why.startswith("one group alone")
    assert "not searched for" in items["a tuned baseline"].why
    tuned = rows_of([planted(tmp_path / "b", result__tuned="best of 9")])[1]["a tuned baseline"]
    assert (tuned.is_met, tuned.why) == (True, "best of 9")


def test_equal_weights_are_one_result_of_one_seed_and_several_of_several(tmp_path: Path) -> None:
    """A repetition on other workers is no new seed; dead networks may all end in one state."""
    again = [planted(tmp_path / str(number)) for number in range(3)]
    (row,) = group_rows(group_runs(again))
    assert (row.seeds, row.time_s.n) == (1, 3)
    assert isinf(row.value.half)
    weights = {"result__weights_sha256": DIGESTS["a"]}
    (row,) = group_rows(group_runs(over_seeds(tmp_path / "dead", [0.1] * 3, **weights)))
    assert (row.seeds, row.value.n) == (3, 3)


def with_tests(folder: Path, top1s: list[float], rate: float = 640.0, **words: Any) -> TableRun:
    """Ten steps of 64 samples between tests."""
    rows: list[dict[str, Any]] = []
    for number, top1 in enumerate(top1s, 1):
        rows += [train(1) | {"images_per_s": rate}] * 10
        rows.append({"kind": "test", "step": 10 * number, "top1": top1})
    return with_metrics(folder, rows, **words)


def test_time_to_a_stated_accuracy(tmp_path: Path) -> None:
    run = with_tests(tmp_path / "a", [0.5, 0.7, 0.8])
    assert time_to(run, 0.6) == pytest.approx(2.0)
    assert time_to(run, 0.9) is None
    fast = with_tests(tmp_path / "b", [0.5, 0.65, 0.8], rate=1280.0)
    words = {"recipe__solver__base_lr": 0.5, "result__steps": 100}  # samples are the question
    lost = with_tests(tmp_path / "x", [0.2], **words)
    first, second = rows_of([run, fast, lost], target=0.6)[0]
    assert first.time_s.value == pytest.approx(1.5)
    assert (second.speedup, second.unequal) == (None, [])
    assert second.why_no_speedup == "x did not reach 60.00%"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def compare(*words: str) -> str:
        assert main(["compare", "--by", "recipe", *words]) == 0
        return capsys.readouterr().out

    first, second, steady = (
        [
            str(run.folder)
            for run in over_seeds(tmp_path / name, values, recipe__solver__base_lr=base_lr)
        ]
        for name, values, base_lr in (
            ("a", [0.90, 0.91, 0.92], 0.01),
            ("b", [0.90, 0.91], 0.5),
            ("c", [0.90, 0.91, 0.92], 0.5),
        )
    )
    out = compare(*first, *second)
    assert "91.00 ± 2.48 %" in out
    assert all(folder in out for folder in first + second)  # each figure can be traced
    groups = json.loads(compare("--json", *first, *second))["groups"]
    assert [group["seeds"] for group in groups] == [3, 2]
    assert groups[1]["against"]["low"] is None
    assert groups[0]["value"]["values"] == [0.90, 0.91, 0.92]
    for band, verdict in (("0.3", UNDECIDED), ("5", "equivalent")):
        groups = json.loads(compare("--json", *first, *steady, "--band", band))["groups"]
        assert groups[1]["against"]["verdict"] == verdict


def test_stages_that_idle(tmp_path: Path) -> None:
    """The mean of all runs, beside what stages of equal work would come to."""
    stages = {"result__parallel": {"stages": ["b"], "idle_if_equal": 0.25}}
    idle = [
        planted(tmp_path / str(place), result__idle_by_stage=shares, **stages)
        for place, shares in enumerate(([0.2, 0.4], [0.4, 0.6]))
    ]
    assert "stages idle" not in shown([planted(tmp_path / "plain")])
    assert "stages idle for 30%, 50%; equal ones for 25%" in shown(idle)
