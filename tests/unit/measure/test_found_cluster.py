"""What stands out in the measurements of a cluster, and what is written of it."""

from dataclasses import replace

import pytest

from firecaffe.measure.device import within_peak
from firecaffe.measure.found_cluster import MeasuredCluster, findings
from firecaffe.measure.ranks_and_links import PairLink
from firecaffe.plan.cluster import load_cluster


@pytest.mark.parametrize(("busy", "says"), [(0, False), (30, True)])
def test_round_trips_that_waited_for_the_processors_do_not_make_the_latency(
    busy: int, says: bool
) -> None:
    trips = (1400e-6,) * busy + (41e-6,) * (50 - busy)
    link = PairLink(0, 1, trips, (1e8,), in_host=False)
    assert link.latency_s == 41e-6
    said = findings(MeasuredCluster([], [link], 1, [], {}, 0.0))
    assert [line.startswith("latency varied: link 0 - 1 has 41 µs") for line in said] == [
        True
    ] * says


def test_an_efficiency_is_a_share_of_the_peak_and_the_rates_stay() -> None:
    device = load_cluster("cpu-host").device
    found = within_peak(replace(device, efficiency=1.25))
    assert found.efficiency == 1
    assert found.peak_flops["float32"] == 1.25 * device.peak_flops["float32"]
    assert found.memory_bytes_per_s == 1.25 * device.memory_bytes_per_s
    assert within_peak(device) == device
