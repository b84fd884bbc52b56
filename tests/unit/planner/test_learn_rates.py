"""Rates that correct a cluster: files of them, and what is learned."""

from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import forecast
from firecaffe.planner.learn_rates import (
    Figures,
    RatedTraining,
    RateRow,
    learn_rates,
    load_rates,
    priced_rows,
)
from firecaffe.planner.offers import USUAL

DGX = load_cluster("dgx1-p100")
ROWS = tuple(RateRow(devices, 1.0, fit=True) for devices in (1, 2, 4, 8, 16, 32, 64))
NETS = tuple(
    RatedTraining(ROWS, 64, name, parameters=parameters, layers=20)
    for name, parameters in (("small", 5e6), ("large", 100e6))
)

FILE = """
name = "mine"
source = "our cluster"
cluster = "dgx1-p100"
[[trainings]]
model = "resnet50"
batch = 64
rows = [{ devices = 1, per_s = 219.0, fit = true }, { devices = 8, per_s = 1734.0 }]
"""


def test_two_trainings_of_one_step_are_merged_whatever_their_order() -> None:
    """Rates of 110 and 220: the geometric mean, and a band that reaches to both."""
    slow, fast = (
        RatedTraining((RateRow(1, rate, fit=True),), 64, "resnet50") for rate in (110.0, 220.0)
    )
    for pair in ((slow, fast), (fast, slow)):
        learned = learn_rates(DGX, pair)
        (step,) = learned.whole().device.measured
        apart = learned.figures.compute[0] / learned.figures.compute[1]
        assert max(apart, 1 / apart) == pytest.approx(2, rel=0.05)
        singles = [learned.cluster_of(number).device.measured[0] for number in (0, 1)]
        assert step.compute_s**2 == pytest.approx(singles[0].compute_s * singles[1].compute_s)
        ends = [(1 + sign * step.error) * step.compute_s for sign in (-1, 1)]
        assert all(ends[0] < one.compute_s < 1.001 * ends[1] for one in singles)
    alone = learn_rates(DGX, (slow, replace(fast, batch=32)))
    assert len(alone.whole().device.measured) == 2


@pytest.mark.parametrize("value", ["inf", "2026-01-01"])
def test_arguments_of_a_network_may_be_any_value_of_toml(tmp_path: Path, value: str) -> None:
    """It is the network that does not take them."""
    path = tmp_path / "rates.toml"
    path.write_text(f"{FILE}args = {{ a = {value} }}\n")
    rates, cluster = load_rates(path)
    with pytest.raises(RecipeError, match=r"called with .*a="):
        priced_rows(cluster, rates.trainings)


def figures(exchange: float, jitter_factor: float, jitter: float, *compute: float) -> Figures:
    return Figures(compute or (1.0, 1.0), (1.0,) * 2, (1.0,) * 3, exchange, jitter_factor, jitter)


def with_rates(true: Figures, known: int) -> list[RatedTraining]:
    """Make the trainings' rows those of these figures; the first `known` ones are known."""
    rates = {
        (row.training, row.row.devices): row.row.devices * 64 / row.step_s(true)
        for row in priced_rows(DGX, NETS)
    }

    def rated(number: int, place: int, row: RateRow) -> RateRow:
        return replace(row, per_s=rates[number, row.devices], fit=place < known)

    return [
        replace(net, rows=tuple(rated(number, place, row) for place, row in enumerate(net.rows)))
        for number, net in enumerate(NETS)
    ]


def test_figures_that_rows_tell_of_are_found() -> None:
    true = figures(1.6, 1.5, 0.06, 1.3, 0.8)
    trainings = with_rates(true, known=7)
    learned = learn_rates(DGX, trainings)
    assert learned.figures.compute == pytest.approx(true.compute, rel=0.03)
    for number, training in enumerate(trainings):
        cluster = learned.cluster_of(number)
        for row in training.rows:
            said = forecast(training.workload(row), cluster, row.devices, training.exchange)
            assert said.images_per_s == pytest.approx(row.per_s, rel=0.03)


def test_rows_draw_a_figure_from_its_usual_value_and_narrow_its_band() -> None:
    true = figures(1.4, 1.7, 0.2)
    learned = [learn_rates(DGX, with_rates(true, known)) for known in (1, 2, 4)]
    errors = [rates.cluster_of(0).device.jitter_error for rates in learned]
    misses = [abs(log(rates.figures.jitter / 0.2)) for rates in learned]
    assert errors == sorted(errors, reverse=True)
    assert misses == sorted(misses, reverse=True)
    assert learned[0].figures.jitter == pytest.approx(USUAL.jitter, rel=0.01)


def test_a_band_is_never_without_width(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    rates, cluster = load_rates(path)
    learned = learn_rates(cluster, rates.trainings)
    (training,) = rates.trainings
    for row in training.rows:
        said = forecast(training.workload(row), learned.whole(), row.devices, "native")
        assert said.step_low_s < said.step_s < said.step_high_s
        assert said.step_high_s / said.step_low_s > 1.02


def test_every_exchange_over_a_link_is_scaled_and_not_the_one_alone_that_rates_know() -> None:
    learned = learn_rates(DGX, with_rates(figures(1.4, 1.7, 0.04), 1))
    whole, large = learned.whole(), NETS[1]
    work = large.workload(large.rows[-1])
    for exchange in ("native", "tree", "ring"):
        before, after = (forecast(work, on, 64, exchange).exchange_s for on in (DGX, whole))
        usual = DGX.links[2].exchange_scale
        assert after == pytest.approx(before / usual * learned.figures.exchange(2))


def test_gradients_of_two_bytes_travel_in_half_the_time() -> None:
    large = NETS[1]
    row = large.rows[-1]
    slow = replace(DGX.links[-1], bandwidth_bytes_per_s=1e8, latency_s=0.0)
    cluster = replace(DGX, links=(*DGX.links[:-1], slow))
    whole, half = (
        forecast(replace(large, gradient_bytes=size).workload(row), cluster, 64, "native")
        for size in (4, 2)
    )
    assert half.exchange_s == pytest.approx(whole.exchange_s / 2, rel=0.01)


def test_accumulated_gradients_hide_an_exchange_behind_the_last_backward_alone() -> None:
    """Four backwards of 16: what is exposed is that of a step of 16, and not that of one of 64."""
    slow = replace(DGX.links[-1], bandwidth_bytes_per_s=1e9)
    cluster = replace(DGX, links=(*DGX.links[:-1], slow))
    whole, once = (replace(NETS[1], batch=batch) for batch in (64, 16))
    exposed = [
        forecast(training.workload(NETS[1].rows[-1]), cluster, 64, "native").exposed_communication_s
        for training in (replace(whole, micro_batch=16), once, whole)
    ]
    assert exposed[0] == pytest.approx(exposed[1])
    assert exposed[2] < 0.9 * exposed[1]


def test_a_link_that_its_file_calls_uncertain_keeps_its_band_until_a_row_crosses_it() -> None:
    unsure = replace(DGX.links[-1], error=0.5)
    cluster = replace(DGX, links=(*DGX.links[:-1], unsure))
    none, all_of_them = (with_rates(figures(1.4, 1.7, 0.04), known) for known in (1, 7))
    error, narrowed, usual = (
        learn_rates(on, rates).whole().links[-1].error
        for on, rates in ((cluster, none), (cluster, all_of_them), (DGX, none))
    )
    assert error == pytest.approx(0.5, rel=0.1)
    assert usual < 0.25
    assert narrowed < 0.9 * error


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("fit = true", "fit = false", "fit"),
        ('model = "resnet50"', "", "model"),
        ('model = "resnet50"', 'model = "x"\nparameters = 1e6', "layers"),
        ("batch = 64", "batch = 0", "batch"),
        ("batch = 64", 'batch = 64\nprecision = "fp8"', "precision"),
        ("batch = 64", "batch = 64\nbach = 2", "bach"),
        ("batch = 64", "batch = 64\nmicro_batch = 48", "batch of 64 .* micro_batch = 48"),
        ("batch = 64", 'batch = 64\nprecision = "tf32"', "has no tf32"),
        ("batch = 64", 'batch = 64\nexchange = "rign"', "rign"),
        ('model = "resnet50"', 'model = "x"\nparameters = -1.0\nlayers = 2', "parameters"),
        ('cluster = "dgx1-p100"', 'cluster = "none.toml"', "none.toml"),
        ("per_s = 219.0", "per_s = -1.0", "per_s"),
        ("devices = 8", "devices = 10000000", "devices"),
        ('model = "resnet50"', 'model = "x"\nparameters = 1e6\nlayers = 10000000', "layers"),
        ("[[trainings]]", "[[trainings", "TOML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, word: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(RecipeError, match=word) as refused:
        load_rates(path)
    assert "\n" not in str(refused.value)
