"""The simulated clock: who is done when, what that comes to, and that it goes on from its state."""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from firecaffe.errors import RecipeError
from firecaffe.synchrony.clock import SimulatedClock, seconds_of
from firecaffe.synchrony.config import LIMITS, SERVED, SynchronyConfig
from firecaffe.synchrony.events import Event, Tally, to_row
from firecaffe.synchrony.log import Ledger
from firecaffe.synchrony.server_policies import Leaves, make_policy

LEAVES = Leaves(0, 30, 10, per_step=8, per_epoch=80)


def clock(mode: str, **words: Any) -> SimulatedClock:
    config = SynchronyConfig(mode, clock="simulated", **words)
    policy = make_policy(config, LEAVES, config.learners)
    return SimulatedClock(policy, seconds_of(config, 7))


def events_of(clock: SimulatedClock) -> list[Event]:
    events = []
    while True:
        try:
            events.append(clock.next())
        except IndexError:
            return events


def tally(events: list[Event]) -> Tally:
    made, ledger = Tally(), Ledger()
    for event in events:
        ledger.take(event)
        made.take(event)
    return made


def run(mode: str, **words: Any) -> Tally:
    return tally(events_of(clock(mode, **words)))


def test_equal_speeds() -> None:
    """8 learners, 240 leaves: 30 rounds; a gradient is 7 updates old, after the first round."""
    counts = run("asynchronous", learners=8)
    assert (counts.time_s, counts.updates) == (30, 240)
    assert counts.staleness == {**dict.fromkeys(range(7), 1), 7: 233}
    assert counts.row["idle_by_learner"] == {str(learner): 0.0 for learner in range(8)}


def test_one_slow_learner_and_who_waits_for_it() -> None:
    """Four learners, one at a third of the speed, 240 leaves."""
    words: dict[str, Any] = {"learners": 4, "speeds": "one_slow", "slow_factor": 3.0}
    for mode in ("asynchronous", "stale"):  # the others are never more than two steps ahead
        assert run(mode, max_staleness=2, **words).time_s == pytest.approx(240 / (3 + 1 / 3), abs=3)
    bound = run("stale", max_staleness=2, **{**words, "slow_factor": 40.0})
    # While it computes one leaf, the others come to the end of the second step after that.
    assert bound.time_s == pytest.approx(30 / 3 * 40, abs=40)
    idle = bound.row["idle_by_learner"]
    assert idle["1"] > 0.7
    assert idle["0"] == pytest.approx(0, abs=0.02)
    backup = run("backup", backup_workers=1, **words)
    assert backup.dropped == 30
    # 7 of 8 leaves, by three learners who do not wait for the fourth.
    assert backup.time_s == pytest.approx(30 * 3, abs=3)


def test_gamma_has_the_mean_and_the_spread_that_were_asked_for() -> None:
    config = SynchronyConfig(speeds="gamma", spread=0.5)
    seconds, again, other = seconds_of(config, 3), seconds_of(config, 3), seconds_of(config, 4)
    times = [seconds(learner, count) for learner in range(20) for count in range(200)]
    assert fmean(times) == pytest.approx(1, abs=0.03)
    assert stdev(times) == pytest.approx(0.5, abs=0.03)
    assert [again(19, count) for count in range(200)] == times[-200:]
    assert other(0, 0) != seconds(0, 0)


def line(compute_s: str) -> bytes:
    return f'{{"compute_s": {compute_s}}}\n'.encode()


def measured(path: object) -> SynchronyConfig:
    return SynchronyConfig(speeds="measured", speeds_from=str(path))


def test_measured_times_are_drawn_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(line("0.25") + line("0.5"))
    seconds = seconds_of(measured(path), 3)
    assert {seconds(learner, 0) for learner in range(20)} == {0.25, 0.5}


NO_FILE = r"cannot be read .*must be the timings of a run"
NO_TIMES = r"synchrony\.speeds_from"
WRONG = {
    **dict.fromkeys([b"", b"{}\n", b"7\n", b"[" * 99999], NO_TIMES),
    **dict.fromkeys(map(line, ("0", "-1", "true", "NaN", "1e308")), NO_TIMES),
    **dict.fromkeys([b"\x0eR\rA\xda\xde\n", line("9" * 400), b"\0" * 200 + b"\n"], NO_FILE),
}


def test_what_is_no_file_of_times_is_told_in_a_line(tmp_path: Path) -> None:
    cases = {"/dev/zero": f"/dev/zero: {NO_FILE}", "/none": "/none: No such file"}
    for number, (data, said) in enumerate(WRONG.items()):
        path = tmp_path / str(number)
        path.write_bytes(data)
        cases[str(path)] = said
    for name, said in cases.items():
        with pytest.raises(RecipeError, match=said) as caught:
            seconds_of(measured(name), 3)
        assert str(caught.value).isprintable()
        assert "\\x" not in str(caught.value)


@pytest.mark.parametrize("end", [0, 1], ids=["least", "most"])
def test_speeds_at_their_limits(end: int) -> None:
    """Times that can be added up, and written as JSON."""
    for speeds, word in (("gamma", "spread"), ("one_slow", "slow_factor")):
        words: dict[str, Any] = {"speeds": speeds, word: float(LIMITS[word][end])}
        counts = run("asynchronous", learners=4, **words)
        assert json.dumps(counts.row, allow_nan=False)
        assert counts.time_s > 1


GOES_ON: list[dict[str, Any]] = [{"mode": mode} for mode in SERVED]
GOES_ON += [{"mode": "backup", "dropped": "again"}]
GOES_ON += [{"mode": "asynchronous", "gradients_per_update": 3}]


@pytest.mark.parametrize("mode_words", GOES_ON, ids=str)
def test_it_goes_on_from_its_state(mode_words: dict[str, Any]) -> None:
    """After a hundred events, with the state as JSON: with the events of one run."""
    words: dict[str, Any] = {"learners": 5, "speeds": "gamma", "spread": 0.6, **mode_words}
    whole = events_of(clock(**words))
    first, second = clock(**words), clock(**words)
    counted, goes_on = Tally(), Tally()
    for _ in range(100):
        counted.take(first.next())
    state = json.loads(json.dumps([first.state_dict(), counted.state_dict()]))
    second.load_state_dict(state[0])
    goes_on.load_state_dict(state[1])
    rest = events_of(second)
    assert [to_row(event) for event in rest] == [to_row(event) for event in whole[100:]]
    for event in rest:
        goes_on.take(event)
    assert goes_on.row == tally(whole).row


def test_it_goes_on_from_a_state_of_version_0_2() -> None:
    """Five learners have work at the start; of two of them no time of computing was known."""
    words: dict[str, Any] = {"learners": 5, "speeds": "gamma", "spread": 0.6}
    whole = events_of(clock("asynchronous", **words))
    first, second = clock("asynchronous", **words), clock("asynchronous", **words)
    for _ in range(5):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    known = [[end_s, learner, 1] for end_s, learner in state["ends"] if learner < 3]
    state["ends"] = [[0.0, 3, 0], [0.0, 4, 0], *known]
    state["counts"] = [[learner, int(learner < 3)] for learner in range(5)]
    second.load_state_dict({**state, "free_at": {}})
    assert [to_row(event) for event in events_of(second)] == [to_row(event) for event in whole[5:]]
