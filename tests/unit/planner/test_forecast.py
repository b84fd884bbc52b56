"""Goodput, epochs and advice; the exchange that is the recipe's own."""

import math
from dataclasses import replace

import pytest

from firecaffe.exchange import AUTO, EXCHANGES, find_schedule
from firecaffe.exchange.route import adds_in_tree_order, choose
from firecaffe.models import ModelConfig
from firecaffe.planner.advice import changes, paragraph
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import (
    best_interval_s,
    by_workers,
    exchanges_on,
    fastest,
    forecast,
    forecasts,
    goodput,
    is_own,
    most_useful,
    time_between_failures_s,
)
from firecaffe.planner.memory import remedy
from firecaffe.planner.price import PRICED, Prices, sent_share
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.simulate import Network, simulate_s
from firecaffe.planner.step_cost import recipe_exchange
from firecaffe.planner.workload import images_of, layers_of
from tests.kit.data_sheets import data_sheet

WORK = workload_of_model(ModelConfig("googlenet"), None, 1024, 8)
SLOW, FAST, NODES = map(data_sheet, ("ethernet-1g", "infiniband-ndr", "dgx-a100"))


def test_goodput_is_dalys() -> None:
    between_s = time_between_failures_s(1e-4, 1000)
    best_s = best_interval_s(20.0, between_s)
    assert (between_s, best_s) == pytest.approx((36_000, 1200))  # sqrt(2 · 20 · 36,000)
    kept = goodput(20.0, 60.0, best_s, between_s)
    for factor in (1 / 3, 3):
        assert kept > goodput(20.0, 60.0, best_s * factor, between_s)
    assert goodput(0.0, 0.0, 3600.0, math.inf) == 1.0
    assert goodput(1.0, 60.0, 1e9, 10.0) == 0.0
    assert goodput(1.0, 1e6, best_interval_s(1.0, 36.0), 36.0) == 0.0  # a long restart
    assert goodput(1.0, 60.0, best_interval_s(1.0, 1e33), 1e33) == pytest.approx(1.0)


def test_compressors_send_what_they_say() -> None:
    shares = {name: sent_share(name, WORK) for name in PRICED}
    assert shares["float16"] == shares["bfloat16"] == 0.5
    assert 0.25 < shares["int8"] < 0.27
    assert shares["one_bit"] == 1 / 32
    assert shares["top_k"] == pytest.approx(1 / 32)
    assert shares["power_sgd"] < 0.5


def test_a_slow_network_limits_and_the_advice_names_it() -> None:
    rows = forecasts(WORK, SLOW, [1, 2, 8, 32])
    said = paragraph(WORK, SLOW, rows)
    first = changes(WORK, SLOW, fastest(rows)[-1])[0]
    assert first.gain > 0.5
    for part in ("waiting for the exchange", first.what):
        assert part in said
    quick = replace(SLOW.links[-1], efficiency={"native": 10.0})  # which keeps no order
    on = replace(SLOW, links=(*SLOW.links[:-1], quick), storage=None)
    advised = [change.what for change in changes(WORK, on, forecast(WORK, on, 8, "tree"))]
    assert not any("native" in what for what in advised)
    assert most_useful(rows) == 1
    assert said.startswith("Use one worker.")
    rows = forecasts(WORK, FAST, [1, 8])
    said = paragraph(WORK, FAST, rows)
    assert "of a step computing" in said
    assert most_useful(rows) == 8
    assert said.startswith("Use 8 workers: ")


def test_what_is_not_chosen_is_told_beside_the_fastest() -> None:
    work = replace(WORK, exchange="hierarchical(tree,ring)")
    rows = forecasts(work, NODES, [1, 16])
    assert [row.exchange for row in rows if row.workers == 1] == ["tree"]
    [chosen] = [row for row in rows if is_own(row, work, NODES)]
    best = fastest(rows)[-1]
    said = paragraph(work, NODES, rows)
    assert f"exchange {chosen.exchange}, is as fast." in said  # by three digits
    slower = [replace(row, speedup=1.5) if row is chosen else row for row in rows]
    assert f"exchange {chosen.exchange}, gives 1.5 times." in paragraph(work, NODES, slower)
    quicker = replace(best, exchange="native", keeps_bits=False, step_s=best.step_s / 2)
    said = paragraph(work, NODES, [*rows, replace(quicker, speedup=7.5)])
    for part in (f"by the fastest exchange {best.exchange} ", "native", "(7.5 times)"):
        assert part in said


def test_an_exchange_that_changes_bits_is_not_advised() -> None:
    """A ring of 24 is the faster one, and its order of additions is no tree's."""
    rows = forecasts(WORK, SLOW, [24], ["ring", "tree"])
    assert [row.exchange for row in dict(by_workers(rows))[24]] == ["ring", "tree"]
    assert fastest(rows)[0].exchange == "tree"
    assert "ring would be faster" in paragraph(WORK, SLOW, rows)
    advised = changes(WORK, SLOW, forecast(WORK, SLOW, 24, "parameter_server"))
    assert not [change for change in advised if change.what == "exchange ring"]
    assert fastest(forecasts(WORK, SLOW, [24], ["ring"]))[0].exchange == "ring"


def test_every_exchange_has_a_row_and_a_nested_one_where_there_are_nodes() -> None:
    assert exchanges_on(SLOW, 8) == list(EXCHANGES)
    names = exchanges_on(NODES, 16)
    assert len(names) == len(EXCHANGES) + 1
    assert all(forecast(WORK, NODES, 16, name).step_s > 0 for name in names)
    rows = forecasts(WORK, SLOW, [1, 4], ["native"])
    assert [row.exchange for row in fastest(rows)] == ["tree", "native"]
    rows = forecasts(WORK, SLOW, [1, 4], compressors=["int8"])
    assert [row.compressor for row in rows] == ["none", "int8"]
    assert paragraph(WORK, SLOW, rows)


def test_the_most_useful_number_looks_past_uneven_shares() -> None:
    """32 micro-batches: 5 workers are no better than 4, but 8 are twice as good."""
    work = workload_of_model(ModelConfig("googlenet"), None, 256, 8)
    rows = forecasts(work, FAST, [1, 4, 5, 6, 7, 8], ["ring"])
    assert most_useful(rows) == 8
    assert "With 5 workers" in paragraph(
        work, FAST, forecasts(work, FAST, [1, 5], ["tree"])
    )  # fold
    assert most_useful(forecasts(work, SLOW, [16, 32], ["ring"])) < 16
    said = paragraph(work, FAST, forecasts(work, FAST, [1, 32], ["ring"]))
    assert "No more than 32 workers can share this batch" in said
    three = workload_of_model(ModelConfig("lenet"), None, 24, 8)  # no even number
    advised = changes(three, FAST, forecast(three, FAST, 1, "tree"))
    assert not [change for change in advised if "micro-batches twice" in change.what]


def test_batch_normalization_at_one_pixel_is_planned() -> None:
    layers = layers_of(ModelConfig("resnet18"), images_of((3, 32, 32)), 10).works
    assert sum(sum(layer.parameters_bytes) for layer in layers) > 4e7


def test_pieces_save_beyond_what_is_simulated_too() -> None:
    network = Network(SLOW.links, 32)
    exact_s = simulate_s(find_schedule("tree"), network, 2**20)
    assert Prices("tree", network).seconds([2**20])[0] == pytest.approx(exact_s, rel=0.1)


def test_what_does_not_fit_is_said_with_a_remedy_of_the_largest_part() -> None:
    small = replace(SLOW, device=replace(SLOW.device, memory_bytes=1e8))
    rows = forecasts(WORK, small, [1, 2], ["tree"])
    assert not rows[0].fits
    assert "It does not fit" in paragraph(WORK, small, rows)
    parts = {"activations": 1.0, "sums": 1.0, "optimizer": 1.0}
    for largest, said in (
        ("activations", "smaller micro-batches"),
        ("sums", "larger micro-batches"),
        ("optimizer", "shard"),
        ("parameters", "split"),
    ):
        assert said in remedy({**parts, largest: 2.0})


def test_money_energy_and_time_to_accuracy_where_they_are_known() -> None:
    work = workload_of_model(ModelConfig("resnet50"), None, 4096, 64)
    cloud = load_cluster("ec2-p4d")
    row = forecast(work, cloud, 16, "ring")
    assert row.epochs_to_accuracy is not None
    assert row.epochs_to_accuracy.epochs == pytest.approx(40.0, rel=0.05)
    assert row.hours_to_accuracy is not None
    assert row.usd == pytest.approx(2 * 32.77 * row.hours_to_accuracy)
    larger = forecast(replace(work, global_batch_size=2**18), cloud, 16, "ring")
    assert larger.epochs_to_accuracy is not None
    assert larger.epochs_to_accuracy.is_at_least
    assert larger.hours_to_accuracy is not None
    assert forecast(WORK, SLOW, 2, "ring").usd is None
    paid = forecast(work, NODES, 16, "ring")
    assert paid.kwh == pytest.approx(2 * 6.5 * (paid.hours_to_accuracy or 0))
    assert paid.usd == pytest.approx(0.0806 * (paid.kwh or 0))


AUTO_WORK = replace(workload_of_model(ModelConfig("lenet"), None, 128, 8), exchange=AUTO)


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_it_is_what_a_training_would_choose_by_the_cluster_s_link(workers: int) -> None:
    link = SLOW.links[-1]
    # LeNet's 1.7 MB: the first bucket is a quarter of 4 MB at least, the second all the rest.
    chosen = recipe_exchange(AUTO_WORK, SLOW, workers)
    assert adds_in_tree_order(chosen, workers)
    sizes = [AUTO_WORK.parameter_bytes]
    assert chosen == choose(workers, sizes, link.latency_s, link.bandwidth_bytes_per_s).algorithm
    rows = forecasts(AUTO_WORK, SLOW, [1, workers])
    [row] = [row for row in rows if is_own(row, AUTO_WORK, SLOW)]
    assert (row.workers, row.exchange) == (workers, chosen)


def test_where_there_is_nothing_to_choose_it_is_tree_or_the_word_itself() -> None:
    memory = replace(SLOW.links[0], memory_bytes_per_s=1e10, group=0)
    one_host = replace(SLOW, links=(memory,), devices_per_node=8)
    assert recipe_exchange(AUTO_WORK, one_host, 4) == "tree"
    assert recipe_exchange(AUTO_WORK, SLOW, 1) == "tree"
    assert recipe_exchange(AUTO_WORK, SLOW, 3) == "tree"  # fold stands in
    assert recipe_exchange(replace(AUTO_WORK, update_at="shards"), SLOW, 4) == "tree"
    for name in ("", "ring", "hierarchical(tree,ring)"):
        assert recipe_exchange(replace(AUTO_WORK, exchange=name), SLOW, 4) == name
