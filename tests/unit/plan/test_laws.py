"""Calibration, goodput, epochs and advice."""

import dataclasses
import math

import pytest

from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES, find_schedule
from firecaffe.models.config import ModelConfig
from firecaffe.plan.advice import changes, paragraph
from firecaffe.plan.calibrate import fit, line
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.codec_cost import PRICED, sent_share
from firecaffe.plan.forecast import (
    LAWS,
    best_interval_s,
    check_plan,
    exchanges_on,
    fastest,
    forecast,
    forecasts,
    goodput,
    is_own,
    most_useful,
    time_between_failures_s,
)
from firecaffe.plan.network import Network
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.price import Prices
from firecaffe.plan.simulate import simulate_s
from firecaffe.plan.workload import images_of, layers_of

WORK = workload_of_model(ModelConfig("googlenet"), None, 1024, 8)
SLOW, FAST = load_cluster("ethernet-1g"), load_cluster("infiniband-ndr")


def test_a_fit_finds_what_made_the_data() -> None:
    rows = [(n, 1e-4 + n / 1e8) for n in (1e3, 1e4, 1e5, 1e6, 1e7)]
    latency_s, rate = line(rows)
    assert latency_s == pytest.approx(1e-4, rel=1e-3)
    assert rate == pytest.approx(1e8, rel=1e-3)
    found = fit(lambda v, n: v["a"] + n / v["b"], {"a": 1e-3, "b": 1e7}, rows)
    assert found.held_out_error < 1e-3
    assert max(found.errors.values()) < 1e-3


def test_noise_shows_in_the_errors_of_a_fit() -> None:
    noisy = [(n, (1 + 0.1 * (-1) ** i) * n / 1e8) for i, n in enumerate((1e4, 1e5, 1e6, 1e7))]
    found = fit(lambda v, n: n / v["rate"], {"rate": 1e7}, noisy)
    assert found.values["rate"] == pytest.approx(1e8, rel=0.1)
    assert 0.02 < found.errors["rate"] < 0.2
    assert 0.05 < found.held_out_error < 0.2


def test_never_more_parameters_than_the_data_bear() -> None:
    with pytest.raises(ValueError, match="1 measurements do not bear 2 parameters"):
        fit(lambda v, n: v["a"] + n * v["b"], {"a": 1.0, "b": 1.0}, [(1, 1.0)])
    with pytest.raises(ValueError, match="above 0"):
        fit(lambda v, n: v["a"], {"a": 1.0}, [(1, 0.0)])


def test_goodput_is_dalys() -> None:
    between_s = time_between_failures_s(1e-4, 1000)
    assert between_s == pytest.approx(36_000)
    best_s = best_interval_s(20.0, between_s)
    assert best_s == pytest.approx(1200)  # sqrt(2 · 20 · 36,000)
    kept = goodput(20.0, 60.0, best_s, between_s)
    assert kept > goodput(20.0, 60.0, best_s / 3, between_s)
    assert kept > goodput(20.0, 60.0, best_s * 3, between_s)
    assert goodput(0.0, 0.0, 3600.0, math.inf) == 1.0
    assert goodput(1.0, 60.0, 1e9, 10.0) == 0.0


def test_epochs_are_published_ones_and_nothing_is_said_beyond_them() -> None:
    law = LAWS["resnet50"]
    assert law.epochs_at(32768) == pytest.approx(56.0)
    assert 42.0 < (law.epochs_at(10_000) or 0) < 45.4
    assert law.epochs_at(128) is None
    assert law.epochs_at(200_000) is None


def test_compressors_send_what_they_say() -> None:
    shares = {name: sent_share(name, WORK) for name in PRICED}
    assert shares["float16"] == shares["bfloat16"] == 0.5
    assert 0.25 < shares["int8"] < 0.27
    assert shares["one_bit"] == 1 / 32
    assert shares["top_k"] == pytest.approx(1 / 32)
    assert shares["power_sgd"] < 0.5


def test_a_slow_network_limits_and_the_advice_names_it() -> None:
    rows = forecasts(WORK, SLOW, [1, 2, 4, 8, 16, 32])
    said = paragraph(WORK, SLOW, rows)
    assert "waiting for the exchange" in said
    first = changes(WORK, SLOW, fastest(rows)[-1])[0]
    assert first.gain > 0.5
    assert first.what in said
    assert most_useful(rows) < 32
    assert f"largest useful number planned is {most_useful(rows)} (" in said


def test_what_is_not_chosen_is_told_beside_the_fastest() -> None:
    work = dataclasses.replace(WORK, exchange="hierarchical(tree,ring)")
    rows = forecasts(work, load_cluster("dgx-a100"), [1, 16])
    assert [row.exchange for row in rows if row.workers == 1] == ["tree"]
    [own] = [row for row in rows if is_own(row, work, load_cluster("dgx-a100"))]
    said = paragraph(work, load_cluster("dgx-a100"), rows)
    assert f"The recipe's own, exchange {own.exchange}, gives {own.speedup:.3g} times." in said
    best = fastest(rows)[-1]
    quicker = dataclasses.replace(best, exchange="native", step_s=best.step_s / 2, speedup=7.5)
    said = paragraph(work, load_cluster("dgx-a100"), [*rows, quicker])
    assert f"the fastest is exchange {best.exchange}" in said
    assert "native, the backend's own, would be faster (7.5 times)" in said


def test_a_fast_network_does_not() -> None:
    rows = forecasts(WORK, FAST, [1, 2, 4, 8])
    assert "is computing" in paragraph(WORK, FAST, rows)
    assert most_useful(rows) == 8


def test_every_exchange_has_a_row_and_a_nested_one_where_there_are_nodes() -> None:
    assert exchanges_on(SLOW, 8) == list(EXCHANGES)
    assert len(exchanges_on(load_cluster("dgx-a100"), 16)) == len(EXCHANGES) + 1
    for name in exchanges_on(load_cluster("dgx-a100"), 16):
        assert forecast(WORK, load_cluster("dgx-a100"), 16, name).step_s > 0


def test_impossible_plans_are_refused_in_one_line() -> None:
    with pytest.raises(RecipeError, match="256 workers but only 128 micro-batches"):
        check_plan(WORK, SLOW, 256)
    with pytest.raises(RecipeError, match="must be at least 1"):
        check_plan(WORK, SLOW, 0)
    few = dataclasses.replace(SLOW, most_devices=4)
    with pytest.raises(RecipeError, match="8 workers, but ethernet-1g has 4 devices"):
        check_plan(WORK, few, 8)


def test_the_most_useful_number_looks_past_uneven_shares() -> None:
    """32 micro-batches: 5 workers are no better than 4, but 8 are twice as good."""
    work = workload_of_model(ModelConfig("googlenet"), None, 256, 8)
    rows = forecasts(work, FAST, [1, 2, 3, 4, 5, 6, 7, 8], ["ring"])
    assert most_useful(rows) == 8
    assert most_useful(forecasts(work, SLOW, [16, 32], ["ring"])) < 16
    said = paragraph(work, FAST, forecasts(work, FAST, [1, 32], ["ring"]))
    assert "No more than 32 workers can share this batch" in said


def test_only_what_can_be_is_advised() -> None:
    three = workload_of_model(ModelConfig("lenet"), None, 24, 8)
    assert not [
        each
        for each in changes(three, FAST, forecast(three, FAST, 1, "tree"))
        if "micro-batches twice" in each.what
    ]


def test_native_alone_and_a_compressor_alone() -> None:
    rows = forecasts(WORK, SLOW, [1, 4], ["native"])
    assert [row.exchange for row in fastest(rows)] == ["tree", "native"]
    rows = forecasts(WORK, SLOW, [1, 4], compressors=["int8"])
    assert [row.compressor for row in rows] == ["none", "int8"]
    assert paragraph(WORK, SLOW, rows)


def test_batch_normalization_at_one_pixel_is_planned() -> None:
    layers = layers_of(ModelConfig("resnet18"), images_of((3, 32, 32)), 10).works
    assert sum(sum(layer.parameters_bytes) for layer in layers) > 4e7


def test_pieces_save_beyond_what_is_simulated_too() -> None:
    network = Network(SLOW.links, 32)
    exact_s = simulate_s(find_schedule("tree"), network, 2**20)
    assert Prices("tree", network).seconds([2**20])[0] == pytest.approx(exact_s, rel=0.1)


def test_what_does_not_fit_is_said() -> None:
    device = dataclasses.replace(SLOW.device, memory_bytes=1e8)
    rows = forecasts(WORK, dataclasses.replace(SLOW, device=device), [1, 2])
    assert not rows[0].fits
    assert "It does not fit" in paragraph(WORK, dataclasses.replace(SLOW, device=device), rows)


def test_money_energy_and_time_to_accuracy_where_they_are_known() -> None:
    work = workload_of_model(ModelConfig("resnet50"), None, 4096, 64)
    row = forecast(work, load_cluster("ec2-p4d"), 16, "ring")
    assert row.epochs_to_accuracy == pytest.approx(40.0)
    assert row.hours_to_accuracy is not None
    assert row.usd == pytest.approx(2 * 32.77 * row.hours_to_accuracy)
    assert forecast(WORK, SLOW, 2, "ring").usd is None
    paid = forecast(
        workload_of_model(ModelConfig("resnet50"), None, 4096, 64),
        load_cluster("dgx-a100"),
        16,
        "ring",
    )
    assert paid.kwh == pytest.approx(2 * 6.5 * (paid.hours_to_accuracy or 0))
    assert paid.usd == pytest.approx(0.0806 * (paid.kwh or 0))
