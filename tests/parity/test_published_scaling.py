"""The planner against published figures: FireCaffe's runs, throughputs, all_reduce times."""

from pathlib import Path
from statistics import median

import pytest

from benchmarks import validate_emulated, validate_firecaffe, validate_planner
from benchmarks.published_allreduce import predict as predict_allreduce
from benchmarks.published_allreduce import read_allreduce
from benchmarks.published_families import predict, read_families

ROOT = Path(__file__).parents[2]
FAMILIES = ROOT / "benchmarks" / "published" / "scaling.toml"


def test_one_bandwidth_explains_firecaffe() -> None:
    assert validate_firecaffe.fitted_bandwidth() == pytest.approx(3.01e9, rel=0.01)
    bandwidth = validate_firecaffe.fitted_bandwidth()
    for run in validate_firecaffe.RUNS:
        assert validate_firecaffe.predicted_hours(run, bandwidth) == pytest.approx(
            run.hours, rel=0.06
        )


def test_published_throughputs_that_no_fit_has_seen() -> None:
    rows = [row for family in read_families(FAMILIES) for row in predict(family).rows]
    errors = [abs(row.error) for row in rows if row.predicted_per_s is not None]
    assert len(errors) >= 20
    assert median(errors) <= 0.05
    assert max(errors) <= 0.15


def test_published_allreduce_times_that_no_fit_has_seen() -> None:
    rows = [row for family in read_allreduce(FAMILIES) for row in predict_allreduce(family)[0]]
    errors = [abs(row.error) for row in rows if row.predicted_s is not None]
    assert len(errors) >= 10
    assert median(errors) <= 0.05
    assert max(errors) <= 0.15


def test_a_family_that_nobody_has_described_is_tried_too() -> None:
    rates = {"resnet50_b32": [50.0, 99.0, 190.0], "vgg16_b32": [20.0, 35.0, 60.0]}
    family = {"name": "new", "source": "nowhere", "devices": [1, 2, 8], "images_per_s": rates}
    outcome = predict(family)
    assert len([row for row in outcome.rows if row.predicted_per_s is not None]) == 3


def test_emulated_exchanges_at_200_mbit() -> None:
    _, errors = validate_emulated.page()
    slow = [abs(error) for cell, error in errors if cell.megabits_per_s == 200]
    assert len(slow) >= 60
    assert median(slow) <= 0.05
    assert max(slow) <= 0.1


def test_the_page_is_what_the_program_writes() -> None:
    assert (ROOT / "docs" / "planner.md").read_text() == validate_planner.make_page(FAMILIES)
