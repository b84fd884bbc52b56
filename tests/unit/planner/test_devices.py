"""Devices by their data sheets: those of shipped clusters, and what a link is sure to gain."""

from dataclasses import replace

import pytest

from firecaffe.models.config import ModelConfig
from firecaffe.planner.advice import gain_of
from firecaffe.planner.cluster import Cluster, Device, load_cluster, shipped
from firecaffe.planner.forecast import Forecast, forecast
from firecaffe.planner.of_recipe import workload_of_model
from firecaffe.planner.offers import device_of, offers, sheet_of, sheets
from firecaffe.planner.usual import usual_device, usual_link

OF_CLUSTERS = {
    load_cluster(name).device.name: load_cluster(name).device
    for name in shipped()
    if name != "titan"  # its file scales the K20X as a family, with the library of the paper
}


@pytest.mark.parametrize("key", [k for k, sheet in sheets().items() if sheet.name in OF_CLUSTERS])
def test_a_sheet_is_the_device_of_a_shipped_cluster(key: str) -> None:
    def figures(device: Device) -> Device:
        peaks = {dtype: float(f"{flops:.2g}") for dtype, flops in device.peak_flops.items()}
        return replace(device, peak_flops=peaks)

    assert figures(device_of(sheet_of(key))) == figures(OF_CLUSTERS[sheet_of(key).name])


@pytest.mark.parametrize("name", sorted({*shipped()} - {"cpu-host"}))
def test_a_shipped_cluster_of_gpus_has_what_is_usual_in_trainings(name: str) -> None:
    cluster = load_cluster(name)
    assert usual_device(cluster.device) == cluster.device
    assert [usual_link(link) for link in cluster.links] == [*cluster.links]


@pytest.mark.parametrize("rate", [1, 10, 25, 100])
def test_an_ethernet_is_that_of_the_shipped_file(rate: int) -> None:
    file = load_cluster(f"ethernet-{rate}g")
    (offer,) = offers("a100", [rate])
    assert replace(offer, name=file.name, about=file.about, sources=file.sources) == file


def test_devices_of_a_node_are_joined_by_the_link_of_their_sheet() -> None:
    (offer,) = offers("h100", [100], per_node=8)
    inside = load_cluster("dgx-h100").links[0]
    assert offer.links[0] == inside
    assert offer.devices_per_node == 8
    assert offer.links[1].ports == 1


def test_what_computes_alone_is_equally_fast_at_every_link() -> None:
    """A gain is of the exchange: computing is off by the same factor in both forecasts."""
    work = workload_of_model(ModelConfig("lenet"), None, 64, 8)
    slow, fast = offers("a100", [1, 100])

    def on(cluster: Cluster, workers: int) -> tuple[Cluster, Forecast]:
        return cluster, forecast(work, cluster, workers, "tree")

    alone = gain_of(work, on(fast, 1), on(slow, 1))
    assert (alone.low, alone.middle, alone.high) == pytest.approx((0, 0, 0))
    both = gain_of(work, on(fast, 8), on(slow, 8))
    assert both.low < both.middle < both.high
    middle = on(slow, 8)[1].step_s / on(fast, 8)[1].step_s - 1
    assert both.middle == pytest.approx(middle)
    same = gain_of(work, on(slow, 8), on(slow, 8))
    assert (same.low, same.high) == pytest.approx((0, 0))
