"""What modes of synchrony make of the rate: closed forms on a cluster whose links cost nothing."""

from dataclasses import replace
from typing import Any

import pytest

from firecaffe.models.config import ModelConfig
from firecaffe.plan.cluster import Cluster, Link, load_cluster
from firecaffe.plan.forecast import forecast
from firecaffe.plan.modes import Mode, modes_of
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.workload import Workload
from firecaffe.synchrony.config import SynchronyConfig


def cluster(bandwidth: float = 1e15) -> Cluster:
    shipped = load_cluster("cpu-host")
    device = replace(shipped.device, jitter=0.0, memory_bytes_per_s=1e15, overhead_s=1e-6)
    link = Link("wire", 0.0, bandwidth)
    return replace(shipped, device=device, links=(link,), most_devices=0, devices_per_node=1)


def work(num_micro_batches: int) -> Workload:
    return workload_of_model(ModelConfig("lenet"), (1, 28, 28), 64 * num_micro_batches, 64)


def modes(
    num_micro_batches: int, on: Cluster, exchange: str = "tree", **words: Any
) -> dict[str, Mode]:
    made = work(num_micro_batches)
    row = forecast(made, on, 4, exchange)
    found = modes_of(made, on, row, SynchronyConfig(**words))
    return {each.words: each for each in found}


ONE_SLOW: dict[str, Any] = {"speeds": "one_slow", "slow_factor": 2.0}


def test_workers_of_one_speed_gain_nothing() -> None:
    found = modes(32, cluster(), backup_workers=0, local_steps=4, replicas=4)
    assert found["every_step"].gain == 1.0
    for each in found.values():
        assert each.gain == pytest.approx(1, abs=0.02)
        assert each.idle == pytest.approx(0, abs=0.03)
        assert not each.dropped


def test_one_of_four_at_half_the_speed() -> None:
    """They are worth 3.5 fast ones; equal shares make them 2."""
    found = modes(56, cluster(), max_staleness=4, local_steps=8, **ONE_SLOW)
    assert found["every_step, measured shares"].gain == pytest.approx(3.5 / 2, rel=0.01)
    assert found["asynchronous"].gain == pytest.approx(3.5 / 2, rel=0.01)
    # All are held to the pace of the slow one, but for a few micro-batches at the beginning.
    assert found["stale, s = 4"].gain == pytest.approx(1, abs=0.02)
    # The exchange costs nothing; whoever is slow is waited for at the end of a round.
    assert found["local, H = 8"].gain == pytest.approx(1, abs=0.02)
    assert found["every_step"].idle == pytest.approx(3 / 8, abs=0.01)


def test_what_is_given_up_does_not_count() -> None:
    """Four micro-batches a step, one of each worker, the slowest of which is not waited for."""
    found = modes(4, cluster(), backup_workers=1, **ONE_SLOW)["backup, 3 + 1"]
    assert found.dropped == pytest.approx(1 / 4)
    assert found.gain == pytest.approx(2 * 3 / 4, rel=0.02)


def test_a_server_s_port_bounds_the_asynchronous_rate() -> None:
    """Weights of three workers go out one after the other; the fourth has the server in it."""
    on = cluster(bandwidth=1e6)
    found = modes(16, on)["asynchronous"]
    sent_s = work(16).parameter_bytes / 1e6
    rate = 64 / sent_s  # of those at the other end of a wire; what the fourth does comes to it
    own = work(16).global_batch_size / found.step_s - rate
    assert own > 0
    assert found.idle > 0.5
    alone = forecast(work(16), on, 1, "tree")
    assert own == pytest.approx(alone.images_per_s, rel=0.1)


def test_a_rare_average_hides_a_slow_network() -> None:
    on = cluster(bandwidth=1e7)
    found = modes(16, on, local_steps=32, replicas=4)
    exchange_s = forecast(work(16), on, 4, "tree").exchange_s
    saved_s = found["every_step"].step_s - found["local, H = 32"].step_s
    assert saved_s == pytest.approx(exchange_s * 31 / 32, rel=0.2)
