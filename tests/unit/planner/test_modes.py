"""What modes of synchrony make of the rate: what ports and servers cost, in closed forms; modes on
a cluster whose links cost nothing; a run's forecast in them, and what is kept of it.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from firecaffe.models import ModelConfig
from firecaffe.planner.cluster import Cluster, Link, load_cluster
from firecaffe.planner.compute_time import data_s, micro_batch, update_s
from firecaffe.planner.forecast import forecast
from firecaffe.planner.library_rates import PLAIN
from firecaffe.planner.modes import PlannedMode, alternatives, forecast_mode, modes_of
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.server_costs import Costs, ServedClock, _SharedPort
from firecaffe.planner.workload import Workload
from firecaffe.synchrony.clock import SimulatedClock, seconds_of
from firecaffe.synchrony.config import SERVED, SynchronyConfig
from firecaffe.synchrony.events import Event, Push, to_row
from firecaffe.synchrony.rounds import Rounds, plan_rounds
from firecaffe.synchrony.server_policies import Leaves, make_policy


def clock(mode: str, costs: Costs, kind: type[SimulatedClock] = ServedClock, **words: Any) -> Any:
    """Of 30 steps of 8 leaves."""
    config = SynchronyConfig(mode, **words)
    leaves = Leaves(0, 30, 30, 8, 240)
    made = make_policy(config, leaves, config.learners), seconds_of(config, 7)
    return kind(*made) if kind is SimulatedClock else ServedClock(*made, costs)


def events_of(clock: SimulatedClock) -> list[Event]:
    events = []
    with suppress(IndexError):
        while True:
            events.append(clock.next())
    return events


def sharded(workers: int) -> tuple[Costs, int, float, float]:
    """Each leaf goes through its worker's port but for its own part, both ways, and as much through
    the others' ports: all W of them carry 2 (W - 1) / W of a leaf in each direction.
    """
    costs = Costs(pull=4.0, push=4.0, workers=workers, is_sharded=True)
    a_leaf = 4.0 * 2 * (workers - 1) / workers / workers
    return costs, 6 * workers, a_leaf, 24 * a_leaf


COSTS: dict[str, tuple[Costs, int, float, float]] = {
    # Five workers, one with the server in it, which computes a leaf in 1. The others pull together
    # in 4, compute in 1, and push together in 1.
    "a port has one rate for all pulls": (Costs(1.0, 0.25, workers=5), 5, 1 / (1 + 4 / 6), 3),
    **{f"a server in parts uses all {workers} ports": sharded(workers) for workers in (2, 3, 4)},
    # Of four leaves each worker computes one, in 1, and makes its part of four updates, in 2.
    "owners share an update": (Costs(take=2.0, workers=4, is_sharded=True), 8, 3 / 4, 2),
    # Worker 0 makes an update of each leaf in 0.25, and computes in what is left: a fifth of what
    # each of the three others does.
    "updates take a worker's time": (Costs(take=0.25, workers=4), 8, 1 / 3.2, 3),
    # Two workers, the first with the server; two learners of one worker compute in turns.
    "pull and push are waited for": (Costs(0.25, 0.25, workers=2), 2, 1 / (1 + 1 / 1.5), 3),
    "a second micro-batch hides them": (Costs(0.25, 0.25, workers=2), 4, 1 / 2, 3),
}
"""Learners, and the seconds of each of 240 leaves, to so many seconds of all."""


@pytest.mark.parametrize(("costs", "learners", "a_leaf", "to_s"), COSTS.values(), ids=COSTS)
def test_what_ports_and_servers_cost(
    costs: Costs, learners: int, a_leaf: float, to_s: float
) -> None:
    last = events_of(clock("asynchronous", costs, learners=learners))[-1]
    assert last.time_s == pytest.approx(240 * a_leaf, abs=to_s)


def test_transfers_under_way_share_a_port_and_a_version_is_pulled_once() -> None:
    """Workers beside one with the server, which gets none; an update in each step.

    Steps of two leaves, of two workers: both pull at once, in twice the time of one, and then push
    so: 2 + 1 + 2. With one after the other the first would push while the second pulls, and a step
    would take 4. Steps of four leaves, of one worker: one pull, then a push of each leaf.
    """
    for learners, leaves, costs, step_s, moved in (
        (2, 2, Costs(pull=1.0, push=1.0), 5.0, (20, 20)),
        (1, 4, Costs(pull=1.0, push=0.5), 1.0 + 4 * 1.5, (10, 40)),
    ):
        config = SynchronyConfig("backup", backup_workers=0, learners=learners)
        plan = Leaves(0, 10, 10, leaves, 10 * leaves)
        served = ServedClock(make_policy(config, plan, learners), lambda *_: 1.0, costs)
        pushes = [event for event in events_of(served) if isinstance(event, Push) and event.update]
        assert [event.time_s for event in pushes] == pytest.approx(
            [step_s * step for step in range(1, 11)]
        )
        assert (served.pulls, served.pushes) == moved


def test_a_transfer_that_begins_later_waits_for_what_is_in_the_queue() -> None:
    """One of 10 from 0, and one of 4 from 2, on a port with 3 of each transfer in its queue.

    Until 5 the first alone is served; then both are, equally: the second ends at 5 + 2 * 4, and the
    first has the port alone for the last 1.
    """
    port = _SharedPort(3.0)
    port.add(0.0, 10.0, (0, 0))
    assert port.next_s == 10.0
    port.add(2.0, 4.0, (1, 0))
    assert port.next_s == 13.0
    assert port.end(13.0) == (1, 0)
    assert port.next_s == 14.0
    assert port.end(14.0) == (0, 0)
    assert not port.is_busy


def test_a_queue_keeps_two_owners_in_phase() -> None:
    """If both pull and then both push, each direction carries one transfer at a time: 2 + 1 + 2."""
    costs = Costs(pull=4.0, push=4.0, workers=2, is_sharded=True)
    words: dict[str, Any] = {"learners": 2, "speeds": "gamma", "spread": 0.5}
    queued, shared = (
        events_of(clock("asynchronous", replace(costs, queued=queued), **words))[-1].time_s
        for queued in (1.0, 0.0)
    )
    assert queued == pytest.approx(120 * 5, rel=0.1)
    assert shared > 1.1 * queued


@pytest.mark.parametrize("mode", SERVED)
def test_without_costs_it_is_the_simulated_clock(mode: str) -> None:
    words: dict[str, Any] = {"learners": 5, "speeds": "gamma", "spread": 0.6}
    served, simulated = (
        events_of(clock(mode, Costs(), kind, **words)) for kind in (ServedClock, SimulatedClock)
    )
    assert [to_row(event) for event in served] == [to_row(event) for event in simulated]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firecaffe.planner.modes.STEPS", 120)


def cluster(bandwidth: float = 1e15) -> Cluster:
    shipped = load_cluster("cpu-host")
    rates: Any = {"efficiency": 0.35, "memory_bytes_per_s": 1e15, "overhead_s": 1e-6, "jitter": 0.0}
    device = replace(shipped.device, library=PLAIN, **rates)
    link = Link("wire", 0.0, bandwidth)
    return replace(shipped, device=device, links=(link,), most_devices=0, devices_per_node=1)


def work(num_micro_batches: int) -> Workload:
    return workload_of_model(ModelConfig("lenet"), (1, 28, 28), 64 * num_micro_batches, 64)


def modes(
    made: Workload | int, on: Cluster, codec: str = "none", **words: Any
) -> dict[str, PlannedMode]:
    """By their words, of four workers; a workload by its micro-batches."""
    made = work(made) if isinstance(made, int) else made
    row = forecast(made, on, 4, "tree", codec)
    return {mode.words: mode for mode in modes_of(made, on, row, SynchronyConfig(**words))}


ONE_SLOW: dict[str, Any] = {"speeds": "one_slow", "slow_factor": 2.0}


def test_workers_of_one_speed_gain_nothing() -> None:
    planned = modes(32, cluster(), backup_workers=0, local_steps=4, replicas=4)
    assert planned["every_step"].gain == 1.0
    for mode in planned.values():
        assert (mode.gain, mode.idle) == pytest.approx((1, 0), abs=0.03)
        assert not mode.dropped


def test_one_of_four_at_half_the_speed() -> None:
    """They are worth 3.5 fast ones; equal shares make them 2."""
    planned = modes(56, cluster(), max_staleness=4, local_steps=8, **ONE_SLOW)
    # While the slow one computes a micro-batch, the others do not get four steps further.
    for name in ("every_step, measured shares", "asynchronous", "stale, s = 4"):
        assert planned[name].gain == pytest.approx(3.5 / 2, rel=0.01)
    # The exchange costs nothing; whoever is slow is waited for at the end of a round.
    assert planned["local, H = 8"].gain == pytest.approx(1, abs=0.02)
    assert planned["every_step"].idle == pytest.approx(3 / 8, abs=0.01)


@pytest.mark.parametrize(
    ("dropped", "name", "share", "gain"),
    [("forget", "backup, 3 + 1", 1 / 4, 2 * 3 / 4), ("again", "backup, 3 + 1, again", 0, 3 / 2)],
)
def test_what_is_given_up_does_not_count(
    dropped: str, name: str, share: float, gain: float
) -> None:
    """Four micro-batches a step, one of each worker, the slowest of which is not waited for. If it
    is computed again, it is late each time, so the other three do all.
    """
    mode = modes(4, cluster(), backup_workers=1, dropped=dropped, **ONE_SLOW)[name]
    assert mode.dropped == pytest.approx(share)
    assert mode.gain == pytest.approx(gain, rel=0.02)


def test_ports_of_a_server_in_parts_bound_the_asynchronous_rate() -> None:
    """Of W = 4 workers, W² / (2 (W - 1)) micro-batches in the time of one over a port."""
    on = cluster(bandwidth=1e6)
    mode = modes(16, on, server="sharded", in_flight=4)["asynchronous, sharded"]
    sent_s = work(16).parameter_bytes / 1e6
    assert 16 / mode.step_s == pytest.approx(16 / 6 / sent_s, rel=0.1)
    whole = 16 * 2 * work(16).parameter_bytes  # to and from the learners of all
    assert mode.bytes_per_step == pytest.approx(3 / 4 * whole, rel=0.01)


@pytest.mark.parametrize(
    ("server", "codec", "share"),
    [
        ("first", "float16", 1 / 2),
        ("first", "int8", 65 / 256),
        ("first", "top_k", 1 / 32),
        ("sharded", "float16", 1 / 2),
        ("sharded", "int8", 65 / 256),
    ],
)
def test_a_codec_shortens_pushes_alone(server: str, codec: str, share: float) -> None:
    """Pulls and pushes are of as many bytes, so half of each push is a quarter of all. Without a
    lock nothing is encoded.
    """
    name = "asynchronous, sharded" if server == "sharded" else "asynchronous"
    fast, coded, slow, faster = (
        modes(8, cluster(rate), used, server=server)[name + suffix]
        for rate in (1e11, 1e8)
        for used, suffix in (("none", ""), (codec, f", {codec}"))
    )
    assert coded.bytes_per_step == pytest.approx((1 + share) / 2 * fast.bytes_per_step, rel=0.03)
    assert faster.step_s < slow.step_s
    if (server, codec) == ("first", "float16"):
        assert "asynchronous, no lock" in modes(8, cluster(1e6), codec, lock="none")


@pytest.mark.parametrize(("level", "micro_batches", "replicas"), [(0, 5, 2), (1, 3, 1), (2, 2, 1)])
def test_a_codec_sends_each_node_of_its_level(
    level: int, micro_batches: int, replicas: int
) -> None:
    """Of 18 micro-batches, and of 6 replicas, a worker of four has so many nodes at most."""
    made = replace(work(18), compressor_level=level)
    words: Any = {"mode": "local", "replicas": 6, "local_steps": 8}
    planned = modes(made, cluster(), "float16", **words)
    half = made.parameter_bytes / 2
    assert planned["every_step"].bytes_per_step == pytest.approx(micro_batches * half)
    assert planned["local, H = 8"].bytes_per_step == pytest.approx(replicas * half / 8)
    assert "every_step, measured shares" not in planned  # no recipe has both
    if level == 0:
        plain = modes(made, cluster(), **words)  # in which a worker sends one sum
        assert plain["every_step"].bytes_per_step == made.parameter_bytes
        assert plain["local, H = 8"].bytes_per_step == made.parameter_bytes / 8


def test_a_server_s_port_bounds_the_asynchronous_rate_but_without_a_lock_nothing_travels() -> None:
    """Weights of three workers go out one after the other; the fourth has the server in it. Without
    a lock four workers have four times the rate of one, however slow the network is.
    """
    on = cluster(bandwidth=1e6)
    alone = forecast(work(1), on, 1, "tree")  # who makes an update of each micro-batch, too
    mode = modes(16, on)["asynchronous"]
    rate = 64 / (work(16).parameter_bytes / 1e6)  # of those at the other end of a wire
    fourth = work(16).global_batch_size / mode.step_s - rate
    assert fourth > 0
    assert mode.idle > 0.5
    assert fourth == pytest.approx(alone.images_per_s, rel=0.1)
    mode = modes(16, on, lock="none")["asynchronous, no lock"]
    assert mode.bytes_per_step == 0
    assert mode.images_per_s == pytest.approx(4 * alone.images_per_s, rel=0.02)


def test_fragments_make_workers_wait_for_each_other_more_often() -> None:
    """With as many as steps, after each of these, as in every_step; the exchange costs nothing."""
    words: dict[str, Any] = {"speeds": "gamma", "spread": 0.5, "local_steps": 8, "replicas": 4}
    often, rarely = (modes(4, cluster(), fragments=count, **words) for count in (8, 1))
    every_step_s = often["every_step"].step_s
    assert often["local, H = 8, 8 fragments"].step_s == pytest.approx(every_step_s, rel=0.01)
    assert rarely["local, H = 8"].step_s < 0.9 * every_step_s


def test_computing_beside_an_exchange_is_slowed_down_in_modes_too() -> None:
    """By a half as much again: every_step is the forecast's, and local steps beside an average
    compute two thirds of what they would while it is under way.
    """
    on = cluster(1e8)
    config: dict[str, Any] = {"local_steps": 8, "replicas": 4}
    on = replace(on, device=replace(on.device, exchange_slowdown=0.5))
    unslowed = modes(32, cluster(1e8), **config)
    slowed = modes(32, on, **config)
    row = forecast(work(32), on, 4, "tree")
    assert slowed["every_step"].step_s == pytest.approx(row.step_s, rel=0.01)
    assert slowed["local, H = 8"].step_s == unslowed["local, H = 8"].step_s  # nothing is beside it
    name, config = "local, H = 8, 2 steps beside", {**config, "overlap_steps": 2}
    added_s = modes(32, on, **config)[name].step_s - modes(32, cluster(1e8), **config)[name].step_s
    assert added_s == pytest.approx(row.exchange_s / 3 / 8, rel=0.01)


def test_alternatives_are_of_workers_that_were_measured() -> None:
    """One of four takes twice as long: as above, but by seconds that are given."""
    made, on = work(56), cluster()
    row = forecast(made, on, 4, "tree")
    words = SynchronyConfig("local", local_steps=8)
    first, *others = alternatives(made, on, row, words, [2.0, 1.0, 1.0, 1.0])
    assert (first.words, first.gain) == ("local, H = 8", 1.0)
    gains = {mode.words: mode.gain for mode in others}
    assert first.step_s == pytest.approx(28, rel=0.02)  # 14 micro-batches of the slow one
    for name in ("asynchronous", "every_step, measured shares"):
        assert gains[name] == pytest.approx(3.5 / 2, rel=0.02)
    made, twice = work(4), SynchronyConfig("asynchronous", in_flight=2)
    row = forecast(made, on, 4, "tree")
    gains |= {mode.words: mode.gain for mode in alternatives(made, on, row, twice, [1.0] * 4)}
    assert not any("in_flight" in name for name in gains)


def test_two_in_flight_hide_a_slow_link() -> None:
    """All three workers beside the server's pull at once, and push so, 0.3 s each."""
    made = work(16)
    on = cluster(bandwidth=made.parameter_bytes / 0.1)
    row = forecast(made, on, 4, "tree")
    first, *others = alternatives(made, on, row, SynchronyConfig("asynchronous"), [1.0] * 4)
    gains = {mode.words: mode.gain for mode in others}
    # A worker takes 1.2 s for a micro-batch if the others' transfers are at other times, and 1.6 if
    # they are at the same. Rank 0 has no link to itself. With two in flight a worker takes 1.
    assert 16 / (1 + 3 / 1.2) < first.step_s < 16 / (1 + 3 / 1.6)
    assert gains["asynchronous with in_flight 2"] == pytest.approx(first.step_s / 4, rel=0.03)


STEPS = 64


def forecast_in(leaves: int, bandwidth: float = 1e15, **words: Any) -> dict[str, Any]:
    made, on, config = work(leaves), cluster(bandwidth), SynchronyConfig(**words)
    rounds = Rounds(STEPS)
    if config.mode == "local":
        rounds = plan_rounds(config, config.warm_steps, STEPS, lambda _: 0.1)
    return forecast_mode(made, on, forecast(made, on, 4, "tree"), config, rounds)


def taken(leaves: int) -> tuple[float, float]:
    """Seconds of a micro-batch, and of an update."""
    made, device = work(leaves), cluster().device
    leaf_s = micro_batch(made, device, made.micro_batch_size).compute_s + data_s(made, device)
    return leaf_s, update_s(made, device)


def test_nobody_waits_for_a_server_that_costs_nothing() -> None:
    row = forecast_in(32, mode="asynchronous", warm_steps=5)
    leaf_s, _ = taken(32)
    assert row["step_s"] == pytest.approx(32 / 4 * leaf_s, rel=0.02)
    assert row["staleness"] == pytest.approx(3, abs=0.05)  # a learner for each of 4 workers
    assert row["bytes_per_step"] == pytest.approx(2 * 24 * work(32).parameter_bytes, rel=0.01)
    assert (row["after_step"], row["mode_in_words"]) == (5, "asynchronous")
    error = cluster().device.error
    band = row["step_low_s"] / row["step_s"], row["step_high_s"] / row["step_s"]
    assert band == pytest.approx((1 - error, 1 + error), rel=0.01)
    row = forecast_in(32, mode="asynchronous", in_flight=2)
    assert row["staleness"] == pytest.approx(7, abs=0.2)


@pytest.mark.parametrize(("local_steps", "mean"), [(8, 8), (10, 9)])
def test_replicas_wait_once_a_round(local_steps: int, mean: int) -> None:
    """64 steps are rounds of 8, or six of 10 and one of 4, 9.1 on average; ahead are 0."""
    row = forecast_in(32, 1e7, mode="local", local_steps=local_steps, replicas=8)
    leaf_s, update = taken(32)
    exchange_s = forecast(work(32), cluster(1e7), 4, "tree").exchange_s
    work_s, waits_s = 8 * leaf_s + 2 * update, exchange_s / mean
    # The band is that of the device and of the link.
    compute, link = cluster().device.error, cluster().links[0].error
    assert compute != link
    for word, sign in (("step_low_s", -1), ("step_s", 0), ("step_high_s", 1)):
        expected = (1 + sign * compute) * work_s + (1 + sign * link) * waits_s
        assert row[word] == pytest.approx(expected, rel=0.01)
    assert row["average_s"] == pytest.approx(exchange_s)
    assert row["mode_in_words"] == f"local, H = {mean}"
    if mean == 8:
        assert forecast_in(32, mode="local", warm_steps=6)["after_step"] == 6
        # Of six replicas, four workers host 2, 2, 1 and 1, of four micro-batches each.
        leaf_s, update = taken(24)
        step_s = forecast_in(24, mode="local", replicas=6)["step_s"]
        assert step_s == pytest.approx(8 * leaf_s + 2 * update, rel=0.01)


def test_fragments_are_averaged_one_by_one() -> None:
    """LeNet's largest parameter has 93 % of its bytes: it is a fragment, and bounds the peak. In
    all a cycle sends as much; what is under way beside a step is short enough, or not.
    """
    words = {"mode": "local", "local_steps": 8, "replicas": 8, "overlap_steps": 1}
    whole, parts = (forecast_in(32, 1e7, fragments=count, **words) for count in (1, 4))
    assert parts["bytes_per_step"] == whole["bytes_per_step"]
    assert parts["average_s"] == pytest.approx(whole["average_s"] / 4)
    assert whole["average_bytes"] == work(32).parameter_bytes
    sizes = sorted(work(32).tensors_bytes)
    assert parts["average_bytes"] == pytest.approx(sizes[-1])
    assert sizes[-1] > sum(sizes[:-1])
    leaf_s, update = taken(32)
    step_s, exchange_s = 8 * leaf_s + 2 * update, whole["average_s"]
    largest_s = exchange_s * sizes[-1] / sum(sizes)
    assert (exchange_s - largest_s) < step_s < largest_s  # one of four takes longer than a step
    assert parts["step_s"] == pytest.approx(step_s + (largest_s - step_s) / 8, rel=0.01)
    assert whole["step_s"] == pytest.approx(step_s + (exchange_s - step_s) / 8, rel=0.01)
    assert parts["mode_in_words"] == "local, H = 8, 4 fragments, 1 steps beside"
