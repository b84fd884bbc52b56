"""What modes of synchrony make of the rate: closed forms on a cluster whose links cost nothing."""

from dataclasses import replace
from typing import Any

import pytest

from firecaffe.models.config import ModelConfig
from firecaffe.plan.cluster import Cluster, Link, load_cluster
from firecaffe.plan.forecast import forecast
from firecaffe.plan.modes import Mode, alternatives, modes_of
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
    # While the slow one computes a micro-batch, the others do not get four steps further.
    assert found["stale, s = 4"].gain == pytest.approx(3.5 / 2, rel=0.01)
    # The exchange costs nothing; whoever is slow is waited for at the end of a round.
    assert found["local, H = 8"].gain == pytest.approx(1, abs=0.02)
    assert found["every_step"].idle == pytest.approx(3 / 8, abs=0.01)


def test_what_is_given_up_does_not_count() -> None:
    """Four micro-batches a step, one of each worker, the slowest of which is not waited for."""
    found = modes(4, cluster(), backup_workers=1, **ONE_SLOW)["backup, 3 + 1"]
    assert found.dropped == pytest.approx(1 / 4)
    assert found.gain == pytest.approx(2 * 3 / 4, rel=0.02)


def test_what_is_computed_again_is_not_given_up() -> None:
    """The slow one is late each time, so the other three do all."""
    words = {"backup_workers": 1, "dropped": "again", **ONE_SLOW}
    found = modes(4, cluster(), **words)["backup, 3 + 1, again"]
    assert found.dropped == 0
    assert found.gain == pytest.approx(3 / 2, rel=0.02)


def test_ports_of_a_server_in_parts_bound_the_asynchronous_rate() -> None:
    """Of W = 4 workers, W² / (2 (W - 1)) micro-batches in the time of one over a port."""
    on = cluster(bandwidth=1e6)
    found = modes(16, on, server="sharded", in_flight=4)["asynchronous, sharded"]
    sent_s = work(16).parameter_bytes / 1e6
    assert 16 / found.step_s == pytest.approx(16 / 6 / sent_s, rel=0.1)
    whole = 16 * 2 * work(16).parameter_bytes  # to and from the learners of all
    assert found.bytes_per_step == pytest.approx(3 / 4 * whole, rel=0.01)


def test_a_codec_shortens_pushes_alone() -> None:
    """Pulls and pushes are of as many bytes, so half of each push is a quarter of all. So it
    is with a server in parts, and without a lock nothing is encoded.
    """
    on, made = cluster(bandwidth=1e6), work(16)

    def found(compressor: str, **words: Any) -> dict[str, Mode]:
        row = forecast(made, on, 4, "tree", compressor)
        rows = modes_of(made, on, row, SynchronyConfig("asynchronous", **words))
        return {each.words: each for each in rows}

    whole = found("none")["asynchronous"].bytes_per_step
    for compressor, share in (("float16", 1 / 2), ("int8", 65 / 256), ("top_k", 1 / 32)):
        bytes_per_step = found(compressor)[f"asynchronous, {compressor}"].bytes_per_step
        assert bytes_per_step == pytest.approx((1 + share) / 2 * whole, rel=0.02)
    plain = found("none", server="sharded")["asynchronous, sharded"]
    for compressor, share in (("float16", 1 / 2), ("int8", 65 / 256)):
        coded = found(compressor, server="sharded")[f"asynchronous, sharded, {compressor}"]
        assert coded.bytes_per_step == pytest.approx(
            (1 + share) / 2 * plain.bytes_per_step, rel=0.02
        )
        assert coded.step_s < plain.step_s
    assert "asynchronous, no lock" in found("float16", lock="none")


@pytest.mark.parametrize(("level", "micro_batches", "replicas"), [(0, 5, 2), (1, 3, 1), (2, 2, 1)])
def test_a_codec_sends_each_node_of_its_level(
    level: int, micro_batches: int, replicas: int
) -> None:
    """Of 18 micro-batches, and of 6 replicas, a worker of four has so many nodes at most."""
    made = replace(work(18), compressor_level=level)
    row = forecast(made, cluster(), 4, "tree", "float16")
    words = SynchronyConfig("local", replicas=6, local_steps=8)
    found = {each.words: each for each in modes_of(made, cluster(), row, words)}
    half = made.parameter_bytes / 2
    assert found["every_step"].bytes_per_step == pytest.approx(micro_batches * half)
    assert found["local, H = 8"].bytes_per_step == pytest.approx(replicas * half / 8)
    assert "every_step, measured shares" not in found  # no recipe has both


def test_without_a_codec_a_worker_sends_one_sum() -> None:
    found = modes(18, cluster(), replicas=6, local_steps=8)
    assert found["every_step"].bytes_per_step == work(18).parameter_bytes
    assert found["local, H = 8"].bytes_per_step == work(18).parameter_bytes / 8


def test_without_a_lock_nothing_travels() -> None:
    """Four workers have four times the rate of one, however slow the network is."""
    on = cluster(bandwidth=1e6)
    found = modes(16, on, lock="none")["asynchronous, no lock"]
    assert found.bytes_per_step == 0
    alone = forecast(work(1), on, 1, "tree")  # who makes an update of each micro-batch, too
    assert found.images_per_s == pytest.approx(4 * alone.images_per_s, rel=0.02)


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


def test_fragments_make_workers_wait_for_each_other_more_often() -> None:
    """With as many as steps, after each of these, as in every_step; the exchange costs nothing."""
    words: dict[str, Any] = {"speeds": "gamma", "spread": 0.5, "local_steps": 8, "replicas": 4}
    often, rarely = (modes(4, cluster(), fragments=count, **words) for count in (8, 1))
    every_step_s = often["every_step"].step_s
    assert often["local, H = 8, 8 fragments"].step_s == pytest.approx(every_step_s, rel=0.01)
    assert rarely["local, H = 8"].step_s < 0.9 * every_step_s


def test_alternatives_are_of_workers_that_were_measured() -> None:
    """One of four takes twice as long: as above, but by seconds that are told."""
    made, on = work(56), cluster()
    row = forecast(made, on, 4, "tree")
    words = SynchronyConfig("local", local_steps=8)
    own, *others = alternatives(made, on, row, words, [2.0, 1.0, 1.0, 1.0])
    assert (own.words, own.gain) == ("local, H = 8", 1.0)
    gains = {each.words: each.gain for each in others}
    assert own.step_s == pytest.approx(28, rel=0.02)  # 14 micro-batches of the slow one
    assert gains["asynchronous"] == pytest.approx(3.5 / 2, rel=0.02)
    assert gains["every_step, measured shares"] == pytest.approx(3.5 / 2, rel=0.02)
    assert not any("in_flight" in each for each in gains)
    twice = SynchronyConfig("asynchronous", in_flight=2)
    found = alternatives(made, on, row, twice, [1.0] * 4)
    assert not any("in_flight" in each.words for each in found)


def test_two_in_flight_hide_a_slow_link() -> None:
    """Weights and gradients take as long as a micro-batch, which waits for both with one."""
    made = work(16)
    on = cluster(bandwidth=made.parameter_bytes / 0.1)  # 0.1 s each, of three workers one by one
    row = forecast(made, on, 4, "tree")
    own, *others = alternatives(made, on, row, SynchronyConfig("asynchronous"), [1.0] * 4)
    gains = {each.words: each.gain for each in others}
    # A worker takes 1.2 s for a micro-batch with one, 1 with two; rank 0 has no link to itself.
    assert own.step_s == pytest.approx(16 / (1 + 3 / 1.2), rel=0.03)
    expected = 4 / (1 + 3 / 1.2)
    assert gains["asynchronous with in_flight 2"] == pytest.approx(expected, rel=0.03)
