"""The simulated clock: who is done when, what that comes to, and that it goes on from its state."""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from firecaffe.errors import RecipeError
from firecaffe.synchrony.clock import Costs, SimulatedClock, seconds_of
from firecaffe.synchrony.config import LIMITS, SERVED, SynchronyConfig
from firecaffe.synchrony.events import Event, Pull, to_row
from firecaffe.synchrony.leaf_queue import Leaves
from firecaffe.synchrony.log import Ledger
from firecaffe.synchrony.server_policies import make_policy
from firecaffe.synchrony.tally import Tally

LEAVES = Leaves(0, 30, 10, per_step=8, per_epoch=80)


def clock(mode: str, costs: Costs | None = None, **words: Any) -> SimulatedClock:
    config = SynchronyConfig(mode, clock="simulated", **words)
    policy = make_policy(config, LEAVES, config.learners)
    return SimulatedClock(policy, seconds_of(config, 7), costs)


def run(made: SimulatedClock) -> list[Event]:
    events = []
    while True:
        try:
            events.append(made.next())
        except IndexError:
            return events


def tally(events: list[Event]) -> Tally:
    made, ledger = Tally(), Ledger()
    for event in events:
        ledger.take(event)
        made.take(event)
    return made


def test_equal_speeds() -> None:
    """8 learners, 240 leaves: 30 rounds; a gradient is 7 updates old, after the first round."""
    found = tally(run(clock("asynchronous", learners=8)))
    assert found.time_s == 30
    assert found.updates == 240
    assert found.staleness == {**dict.fromkeys(range(7), 1), 7: 233}
    assert found.row["idle_by_learner"] == {str(learner): 0.0 for learner in range(8)}


def test_one_slow_learner_and_who_waits_for_it() -> None:
    """Four learners, one at a third of the speed, 240 leaves."""
    words: dict[str, Any] = {"learners": 4, "speeds": "one_slow", "slow_factor": 3.0}
    for mode in ("asynchronous", "stale"):  # the others are never more than two steps ahead
        free = tally(run(clock(mode, max_staleness=2, **words)))
        assert free.time_s == pytest.approx(240 / (3 + 1 / 3), abs=3)
    bound = tally(run(clock("stale", max_staleness=2, **{**words, "slow_factor": 40.0})))
    # While it computes one leaf, the others come to the end of the second step after that.
    assert bound.time_s == pytest.approx(30 / 3 * 40, abs=40)
    idle = bound.row["idle_by_learner"]
    assert idle["1"] > 0.7
    assert idle["0"] == pytest.approx(0, abs=0.02)
    backup = tally(run(clock("backup", backup_workers=1, **words)))
    assert backup.dropped == 30
    # 7 of 8 leaves, by three learners who do not wait for the fourth.
    assert backup.time_s == pytest.approx(30 * 3, abs=3)


def test_a_port_serves_one_pull_at_a_time() -> None:
    """Five workers, one with the server in it: it computes a leaf in the time of a pull, the others
    share the port, so that one of them is done in that time, too.
    """
    costs = Costs(pull=1.0, push=0.25, workers=5)
    found = tally(run(clock("asynchronous", costs, learners=5)))
    assert found.time_s == pytest.approx(240 / 2, abs=3)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_server_in_parts_uses_all_ports(workers: int) -> None:
    """Each leaf goes through its worker's port but for its own part, both ways, and as much through
    the others' ports: all W of them carry 2 (W - 1) / W of a leaf in each direction.
    """
    costs = Costs(pull=4.0, push=4.0, workers=workers, is_sharded=True)
    found = tally(run(clock("asynchronous", costs, learners=6 * workers)))
    a_leaf = 4.0 * 2 * (workers - 1) / workers / workers
    assert found.time_s == pytest.approx(240 * a_leaf, rel=0.1)


def test_owners_share_the_work_of_an_update() -> None:
    costs = Costs(take=2.0, workers=4, is_sharded=True)
    assert tally(run(clock("asynchronous", costs, learners=8))).time_s == pytest.approx(120, abs=2)


def test_a_server_takes_one_gradient_at_a_time() -> None:
    found = tally(run(clock("asynchronous", Costs(take=0.5), learners=8)))
    assert found.time_s == pytest.approx(240 * 0.5, abs=2)


@pytest.mark.parametrize(("in_flight", "a_leaf"), [(1, 1.5), (2, 1.0)])
def test_a_second_micro_batch_hides_pull_and_push(in_flight: int, a_leaf: float) -> None:
    """Two workers, the first beside the server; two learners of one worker compute in turns."""
    costs = Costs(pull=0.25, push=0.25, workers=2)
    found = tally(run(clock("asynchronous", costs, learners=2 * in_flight)))
    rate = 1 + 1 / a_leaf
    assert found.time_s == pytest.approx(240 / rate, abs=3)


def test_gamma_has_the_mean_and_the_spread_that_were_asked_for() -> None:
    seconds = seconds_of(SynchronyConfig(speeds="gamma", spread=0.5), 3)
    times = [seconds(learner, count) for learner in range(20) for count in range(200)]
    assert fmean(times) == pytest.approx(1, abs=0.03)
    assert stdev(times) == pytest.approx(0.5, abs=0.03)
    again = seconds_of(SynchronyConfig(speeds="gamma", spread=0.5), 3)
    assert [again(19, count) for count in range(200)] == times[-200:]
    other = seconds_of(SynchronyConfig(speeds="gamma", spread=0.5), 4)
    assert other(0, 0) != seconds(0, 0)


def line(compute_s: str) -> str:
    return f'{{"compute_s": {compute_s}}}\n'


def test_measured_times_are_drawn_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text(line("0.25") + line("0.5"))
    config = SynchronyConfig(speeds="measured", speeds_from=str(path))
    seconds = seconds_of(config, 3)
    assert {seconds(learner, 0) for learner in range(20)} == {0.25, 0.5}
    for text in ("", "{}\n", "7\n", *map(line, ("0", "-1", "true", "NaN", "1e308")), "[" * 99999):
        path.write_text(text)
        with pytest.raises(RecipeError, match=r"synchrony\.speeds_from"):
            seconds_of(config, 3)
    path.unlink()
    with pytest.raises(RecipeError, match="No such file"):
        seconds_of(config, 3)


def test_what_is_no_file_of_times_is_told_in_one_line_of_text(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    config = SynchronyConfig(speeds="measured", speeds_from=str(path))
    for data in (
        b"\x0eR\rA\xda\xde\n",
        b'{"compute_s": ' + b"9" * 400 + b"}\n",
        b"\0" * 200 + b"\n",
    ):
        path.write_bytes(data)
        with pytest.raises(
            RecipeError, match=r"cannot be read .*must be the timings of a run"
        ) as caught:
            seconds_of(config, 3)
        assert str(caught.value).isprintable()
        assert "\\x" not in str(caught.value)


def test_a_file_of_times_is_regular() -> None:
    """Another may have no end."""
    config = SynchronyConfig(speeds="measured", speeds_from="/dev/zero")
    with pytest.raises(RecipeError, match=r"/dev/zero: cannot be read .*must be the timings"):
        seconds_of(config, 3)


@pytest.mark.parametrize("end", [0, 1], ids=["least", "most"])
def test_speeds_at_their_limits(end: int) -> None:
    """Times that can be added up, and written as JSON."""
    for speeds, word in (("gamma", "spread"), ("one_slow", "slow_factor")):
        words: dict[str, Any] = {"speeds": speeds, word: float(LIMITS[word][end])}
        events = run(clock("asynchronous", learners=4, **words))
        assert json.dumps(tally(events).row, allow_nan=False)
        assert tally(events).time_s > 1


@pytest.mark.parametrize("mode", SERVED)
def test_it_goes_on_from_its_state(mode: str) -> None:
    words: dict[str, Any] = {"learners": 5, "speeds": "gamma", "spread": 0.6}
    whole = run(clock(mode, **words))
    first = clock(mode, **words)
    counted = Tally()
    for _ in range(100):
        counted.take(first.next())
    state = json.loads(json.dumps([first.state_dict(), counted.state_dict()]))
    second, goes_on = clock(mode, **words), Tally()
    second.load_state_dict(state[0])
    goes_on.load_state_dict(state[1])
    rest = run(second)
    assert [to_row(event) for event in rest] == [to_row(event) for event in whole[100:]]
    for event in rest:
        goes_on.take(event)
    assert goes_on.row == tally(whole).row


def test_random_speeds_spread_the_leaves_unevenly() -> None:
    events = run(clock("asynchronous", learners=4, speeds="gamma", spread=1.0))
    pulls = [event.work.learner for event in events if isinstance(event, Pull)]
    shares = sorted(pulls.count(learner) for learner in range(4))
    assert shares[0] < 60 < shares[-1]
    found = tally(events)
    assert found.mean_staleness == pytest.approx(3, abs=0.2)
    assert max(found.staleness) > 5
