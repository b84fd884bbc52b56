"""The planner against published figures: FireCaffe's runs, throughputs, all_reduce times."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from benchmarks.planner import (
    epochs_by_noise,
    one_weird_trick,
    validate_emulated,
    validate_firecaffe,
    validate_planner,
)
from benchmarks.planner.published_allreduce import predict as predict_allreduce
from benchmarks.planner.published_allreduce import read_allreduce
from benchmarks.planner.published_scaling import UNSEEN, families, judge, judged
from benchmarks.planner.shipped_devices import read_alone
from benchmarks.training.noise_scale import read_kept
from firecaffe.cli import plan
from firecaffe.planner.learn_rates import load_rates

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "benchmarks" / "published" / "scaling.toml"


emulated_page = cache(validate_emulated.page)


def test_pages_are_what_the_programs_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_emulated, "page", emulated_page)
    page = ROOT / "docs" / "explanation" / "planner.md"
    assert page.read_text() == validate_planner.make_page(PUBLISHED)
    page = ROOT / "benchmarks" / "results" / "epochs_by_noise.md"
    assert page.read_text() == epochs_by_noise.make_page(read_kept(epochs_by_noise.KEPT))


def check_errors(errors: Iterable[float], least: int, median_error: float, most: float) -> None:
    """So many are no larger than the page says of them: their median, and the largest."""
    sizes = [abs(error) for error in errors]
    assert len(sizes) >= least
    assert median(sizes) <= median_error
    assert max(sizes) <= most


def test_forecasts_are_as_near_as_the_page_says() -> None:
    """FireCaffe's own runs by one bandwidth; in hours, from the rates of one worker, nearer than
    the linear model, though no row is in the fit; all_reduce times; emulated exchanges.
    """
    runs = validate_firecaffe.read_runs(PUBLISHED)
    bandwidth = validate_firecaffe.fitted_bandwidth(runs)
    assert bandwidth == pytest.approx(3.01e9, rel=0.01)
    assert [run.fitted for run in runs].count(True) == 1
    hours = [validate_firecaffe.predicted_hours(run, bandwidth) / run.hours - 1 for run in runs]
    check_errors(hours, 3, 0.06, 0.06)
    _, errors, linear = validate_firecaffe.page(PUBLISHED)
    assert all(abs(ours) < abs(null) for ours, null in zip(errors, linear, strict=True))
    check_errors(errors, 5, 0.15, 0.15)
    rows = [row for family in read_allreduce(PUBLISHED) for row in predict_allreduce(family)[0]]
    check_errors((row.error for row in rows if row.predicted_s is not None), 10, 0.05, 0.15)
    emulated = (each for each in emulated_page()[1] if each.cell.megabits_per_s == 200)
    check_errors((each.error for each in emulated), 60, 0.05, 0.1)


def test_forecasts_of_published_throughputs_beat_both_null_models() -> None:
    """From two rows of each training; on these rows the model was fitted, as the page says."""
    rows = [row for row in judged(2) if row.log_error is not None]
    assert len(rows) >= 80
    for null in ([row.linear_error for row in rows], [row.log_error or 0.0 for row in rows]):
        for quantile in (0.5, 0.9):
            sizes = [[abs(error) for error in errors] for errors in ([r.error for r in rows], null)]
            ours, theirs = np.quantile(sizes, quantile, axis=1)
            assert ours < theirs
    for known in (1, 2):  # bands hold most of them and not all
        held = sum(row.in_band for row in judged(known)) / len(judged(known))
        assert 0.7 <= held <= 0.9
    # By hand: ResNet-50 on P100s has 219 and 422 images/s on 1 and 2, and 852 on 4.
    by_hand = ("tf-2017-dgx1-p100", "resnet50", 4)
    (row,) = [r for r in judged(2) if (r.family, r.training, r.devices) == by_hand]
    assert row.linear_error == pytest.approx(4 * 219 / 852 - 1)
    step_s = 2 * (2 * 64 / 422) - 64 / 219  # t(4) = a + 2 b, where a + b = t(2)
    assert row.log_per_s == pytest.approx(4 * 64 / step_s)


def test_families_that_no_fit_has_seen_are_forecast_as_well() -> None:
    """Their bands hold most of them, and both quantiles are nearer than the linear model's."""
    names, unseen = ({rates.name for rates, _ in families(*at)} for at in ((), (UNSEEN,)))
    assert not names & unseen
    rows = judged(1, UNSEEN)
    assert len(rows) >= 300
    for quantile in (0.5, 0.9):
        ours, linear = (
            np.quantile([abs(error) for error in errors], quantile)
            for errors in ([row.error for row in rows], [row.linear_error for row in rows])
        )
        assert ours < linear
    assert 0.7 <= sum(row.in_band for row in rows) / len(rows) <= 0.9


def test_a_family_is_judged_by_what_plan_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`plan --runs FILE` on a file of one training says what the record says."""
    family = next(each for each in families() if each[0].name == "mxnet-k80")
    (training,) = family[0].trainings
    text = f"""
name = "one"
source = "nowhere"
cluster = "ec2-p2"
[[trainings]]
model = "resnet50"
batch = 16
bucket_bytes = 4_000_000
exchange = "{training.exchange}"
rows = [{{ devices = 1, per_s = 50, fit = true }}, {{ devices = 8, per_s = 380 }}]
"""
    path = tmp_path / "one.toml"
    path.write_text(text)
    (row,) = judge(load_rates(path), 1)
    words = ["--model", "resnet50", "--runs", str(path), "--exchanges", training.exchange]
    words += ["--micro-batch-size", "16", "--global-batch-size", "128", "--workers", "8"]
    plan.main([*words, "--json"])
    (said,) = json.loads(capsys.readouterr().out)[0]["rows"]
    assert said["images_per_s"] == pytest.approx(row.forecast_per_s, rel=1e-3)


def test_shipped_devices_are_forecast_by_the_function_of_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = {(row.source, row.net): row for row in read_alone()}
    row = alone["firecaffe-titan", "googlenet, float32"]
    assert row.published_per_s == pytest.approx(64 * 1_281_167 / (21 * 24 * 3600), rel=1e-3)
    words = ["--model", "googlenet", "--cluster", "titan", "--workers", "1", "--json"]
    plan.main([*words, "--global-batch-size", "32", "--micro-batch-size", "32"])
    (said,) = json.loads(capsys.readouterr().out)[0]["rows"]
    assert row.forecast_per_s == pytest.approx(said["images_per_s"])


def test_one_weird_trick_is_forecast_by_the_function_of_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From the hours of one device alone. 6 % were aimed at, and are missed by a little."""
    (record,) = one_weird_trick.read_records(PUBLISHED)
    assert record.alone_per_s == pytest.approx(90 * 1_281_167 / (98.05 * 3600))
    text = (PUBLISHED.parent / "k20.toml").read_text()
    cluster = tmp_path / "k20.toml"
    cluster.write_text(text.replace("efficiency = 1.0", f"efficiency = {record.efficiency!r}"))
    words = ["--model", "alexnet_owt", "--cluster", str(cluster), "--micro-batch-size", "128"]
    plan.main([*words, "--global-batch-size", "128", "--workers", "1", "--json"])
    (alone,) = json.loads(capsys.readouterr().out)[0]["rows"]
    assert alone["images_per_s"] == pytest.approx(record.alone_per_s)
    for row in record.rows:
        words += ["--global-batch-size", str(128 * row.workers), "--workers", str(row.workers)]
        plan.main([*words, "--ways", "one_weird_trick", "--json"])
        (said,) = json.loads(capsys.readouterr().out)[0]["parallel"]["plans"]
        assert row.predicted == pytest.approx(said["images_per_s"] / record.alone_per_s)
    two, four, eight = record.rows
    assert max(abs(row.error or 1) for row in (two, four)) <= one_weird_trick.AIM + 0.005
    assert eight.published is None
    assert two.linear_error == pytest.approx(2 / 1.95 - 1)
