"""`explain` finds the slow rank that was put into the numbers, and none where there is none; which
ranks of a run hold one model together, by its recipe.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from scipy.stats import false_discovery_control

import firecaffe
from firecaffe.api.explanation import lines
from firecaffe.cluster.links import links_of
from firecaffe.errors import RunError
from firecaffe.runs.rank_shares import row_of
from firecaffe.runs.rank_times import ALPHA, Explanation, explain, holm
from firecaffe.runs.run_folder import RECIPE

STEPS = 120


def write_rows(folder: Path, by_name: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Files of timings."""
    (folder / "timings").mkdir(parents=True, exist_ok=True)
    for name, rows in by_name.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"timings/{name}.jsonl").write_text(text)


def write_run(
    folder: Path,
    compute_s: Callable[[int, int], float],
    trip_s: Callable[[int, int], float] = lambda _, __: 0.001,
    ranks: int = 4,
    steps: int = STEPS,
    in_host: Callable[[int, int], bool] = lambda _, __: False,
    linked: Callable[[int], Sequence[int]] | None = None,
    stages: int = 0,
    more: Callable[[int], Mapping[str, Any]] = lambda _: {},
) -> Path:
    """compute_s: by rank and step. trip_s, in_host: by the two ends. linked: those with which a
    rank has a round trip in a step. stages: of the network, one behind the other in each row of
    ranks. more: what else a rank's rows say.
    """
    slowest = [max(compute_s(r, step) for r in range(ranks)) for step in range(1, steps + 1)]
    for rank in range(ranks):
        rows, trips = [], []
        for step in range(1, steps + 1):
            took_s = compute_s(rank, step)
            waits = slowest[step - 1] - took_s + 0.01
            row = {"step": step, "data_s": 0.0, "compute_s": took_s, "exchange_s": waits}
            row |= {"exposed_communication_s": waits, "update_s": 0.001}
            if stages:
                row |= {"stage": rank % stages, "idle_s": waits, "micro_batches": 6}
            rows.append({**row, "step_s": took_s + waits + 0.001, **more(rank)})
            peers = [(rank + step) % ranks] if linked is None else linked(rank)
            for peer in {*peers} - {rank}:
                trip = {"step": step, "peer": peer, "in_host": in_host(rank, peer)}
                trips.append(trip | {"round_trip_s": trip_s(rank, peer)})
        write_rows(folder, {f"rank-{rank}": rows, f"round-trips-{rank}": trips})
    return folder


def noise(seed: int) -> Callable[[int, int], float]:
    """The same for a rank and a step whenever it is asked; neighboring steps are alike."""

    @cache
    def at(rank: int, step: int) -> float:
        slowly = random.Random(f"{seed} {rank} {step // 5}").gauss(0, 0.05)
        return 0.1 * (1 + slowly + random.Random(f"{seed} {rank} {step}").gauss(0, 0.05))

    return at


def slow_of(explanation: Explanation) -> list[tuple[int, str]]:
    return [(slow.rank, slow.cause) for slow in explanation.slow]


def test_a_rank_that_computes_longer_is_named(tmp_path: Path) -> None:
    base = noise(0)
    found = explain(write_run(tmp_path, lambda r, step: base(r, step) * (1.3 if r == 2 else 1)))
    assert slow_of(found) == [(2, "computes")]
    assert found.slow[0].factor == pytest.approx(1.3, rel=0.1)
    assert found.slow[0].p_value < ALPHA
    assert "rank 2 computes longer than the others" in lines(found)[0]
    waits = [rank.parts_s["exposed_communication_s"] for rank in found.ranks]
    assert min(waits) == waits[2]  # the others wait for it


def test_a_slow_link_is_told_apart_from_ways_inside_a_host(tmp_path: Path) -> None:
    slow = write_run(tmp_path / "a", noise(1), lambda a, b: 0.08 if 1 in (a, b) else 0.002)
    found = explain(slow)
    assert slow_of(found) == [(1, "link")]
    assert (found.slow[0].own_s, found.slow[0].others_s) == (0.08, 0.002)
    assert "rank 1 has a slow link" in lines(found)[0]

    def in_host(a: int, b: int) -> bool:
        return {a, b} == {0, 1}

    def trip_s(a: int, b: int) -> float:
        return 0.0001 if in_host(a, b) else 0.002

    assert explain(write_run(tmp_path / "b", noise(6), trip_s, in_host=in_host)).slow == []


@pytest.mark.parametrize("slow", [0, 3, 5, 15])
def test_who_is_linked_with_a_slow_rank_is_not_slow(slow: int, tmp_path: Path) -> None:
    """3 is linked with 15, and 5 with 12, which have two links alone."""
    base = random.Random(slow)

    def trip_s(one: int, other: int) -> float:
        return (0.01 if slow in (one, other) else 0.002) * (1 + abs(base.gauss(0, 0.3)))

    hosts = [f"host{rank}" for rank in range(16)]
    linked = {rank: links_of(rank, hosts).ranks for rank in range(16)}
    run = write_run(tmp_path, noise(8), trip_s, ranks=16, linked=linked.__getitem__)
    assert slow_of(explain(run)) == [(slow, "link")]


def test_links_whose_delays_come_in_waves_are_not_named(tmp_path: Path) -> None:
    named = 0
    for seed in range(30):
        waves = [random.Random(f"{seed} {i}").expovariate(500) for i in range(100)]
        delays = iter([0.001 + wave for wave in waves for _ in range(30)])
        run = write_run(tmp_path / str(seed), noise(7), lambda _, __, d=delays: next(d))  # type: ignore[misc]
        named += "link" in dict(slow_of(explain(run))).values()
    assert named <= 2


def test_noise_names_nobody_more_often_than_alpha(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), noise(seed + 100)) for seed in range(40)]
    named = sum(bool(explain(run).slow) for run in runs)
    assert named <= 3  # 0.4 expected; more than 3 has a probability below 0.001


def test_a_stage_with_more_work_is_no_slow_rank(tmp_path: Path) -> None:
    """Of 2 x 2 ranks those of stage 1 have twice the work, and rank 3 is slow for it."""
    at = noise(9)

    def compute_s(rank: int, step: int) -> float:
        return at(rank, step) * (2 if rank % 2 else 1) * (1.3 if rank == 3 else 1)

    found = explain(write_run(tmp_path / "four", compute_s, stages=2))
    assert slow_of(found) == [(3, "computes")]
    assert 1.2 < found.slow[0].factor < 1.4
    found = explain(write_run(tmp_path / "two", compute_s, ranks=2, stages=2))
    assert (found.slow, found.shares) == ([], None)
    assert [stage.stage for stage in found.stages] == [0, 1]
    assert found.stages[1].own_s == pytest.approx(2 * found.stages[0].own_s, rel=0.05)
    assert found.stages[0].idle == pytest.approx(0.52, abs=0.03)
    most, equal, not_tested, _ = lines(found)  # the last one is of links
    assert most.startswith("stages: stage 1 has the most work")
    assert "2 of equal work, with 6 micro-batches a step" in equal
    assert equal.endswith("idle for 14% each")  # 1 / (6 + 1)
    assert not_tested.startswith("not tested: each stage has one rank")


def test_too_little_to_say(tmp_path: Path) -> None:
    """Few steps; one rank; and of two ranks that have one link, computing alone."""
    found = explain(write_run(tmp_path / "short", noise(3), steps=50))
    assert (found.slow, "too few" in found.not_tested[0]) == ([], True)
    found = explain(write_run(tmp_path / "alone", noise(4), ranks=1))
    assert found.slow == []
    assert [line.startswith("not tested: one rank") for line in lines(found)] == [True]
    base = noise(2)
    run = write_run(tmp_path / "two", lambda r, step: base(r, step) * (1.5 if r else 1), ranks=2)
    found = explain(run)
    assert slow_of(found) == [(1, "computes")]
    assert "two ranks have one link" in found.not_tested[0]
    path = run / "timings/rank-1.jsonl"  # whose last line is cut short
    path.write_text(path.read_text()[:-20])
    assert [rank.steps for rank in explain(run).ranks] == [STEPS, STEPS - 1]


def test_a_run_whose_hosts_changed_is_explained_by_the_steps_of_the_last(tmp_path: Path) -> None:
    run = write_run(tmp_path, lambda r, step: 0.1 if step > 40 else 0.3, ranks=3)
    gone = run / "timings/rank-2.jsonl"
    gone.write_text("".join(gone.read_text().splitlines(keepends=True)[:40]))
    (run / "result.json").write_text("{}")
    lost = {"kind": "killed", "line": "rank 2 was killed", "then": "restart 1 of 3"}
    came = {"kind": "preempted", "line": "rank 0 was asked to stop", "then": "this attempt ended"}
    (run / "fault.json").write_text(json.dumps({**came, "earlier": [lost]}))
    found = firecaffe.explain(run)
    assert found.lines[-1] == "fault: rank 2 was killed (restart 1 of 3)"
    assert isinstance(found.explanation, Explanation)
    assert [(rank.rank, rank.steps) for rank in found.explanation.ranks] == [(0, 80), (1, 80)]
    assert all(rank.parts_s["compute_s"] == 0.1 for rank in found.explanation.ranks)
    assert "2 ranks made the steps after 40" in found.lines[0]


def test_what_is_no_timing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no timings"):
        explain(tmp_path)
    (tmp_path / "timings").mkdir()
    for content in ("null\n", "[]\n", '{"step": 1}\n' * 3, "{\n", '{"step": "x"}\n'):
        (tmp_path / "timings/rank-0.jsonl").write_text(content)
        with pytest.raises(RunError):
            explain(tmp_path)


def test_holm_is_never_below_what_is_less_strict() -> None:
    p_values = {0: 0.001, 1: 0.02, 2: 0.03, 3: 0.9}
    corrected = holm(p_values)
    assert corrected == pytest.approx({0: 0.004, 1: 0.06, 2: 0.06, 3: 0.9})
    less_strict = false_discovery_control(list(p_values.values()))
    assert all(corrected[i] >= less_strict[i] - 1e-12 for i in p_values)


@pytest.mark.parametrize(
    ("counts", "words", "saved"),
    [
        # 16 of a fast one's micro-batches before, 10 then, beside some waiting and the update.
        ([8, 8, 8, 8], "synchrony.shares = measured would give ranks", 6 / 16),
        ([8, 10, 10, 4], "ranks computed 8, 10, 10, 4 micro-batches; one takes ", 0.0),
    ],
)
def test_a_slow_rank_is_told_what_measured_shares_would_bring(
    tmp_path: Path, counts: list[int], words: str, saved: float
) -> None:
    """Rank 3 takes twice as long for a micro-batch."""
    at = noise(3)
    run = write_run(
        tmp_path,
        lambda r, s: at(r, s) * counts[r] * (2 if r == 3 else 1),
        more=lambda rank: {"micro_batches": counts[rank]},
    )
    found = explain(run)
    assert found.shares is not None
    assert len([line for line in lines(found) if line.startswith(words)]) == 1
    assert found.shares.balanced[3] in (4, 5)
    assert found.shares.saved == pytest.approx(saved, abs=0.05)


def test_a_split_network_waits_for_activations_and_for_gradients(tmp_path: Path) -> None:
    """Each step is 111 ms, 10 of them waits."""
    whole = explain(write_run(tmp_path / "whole", lambda *_: 0.1, ranks=2))
    assert whole.ranks[0].waits_s == {}
    assert not [line for line in lines(whole) if line.startswith("split layers")]
    more = {"activations_s": 0.007}
    found = explain(write_run(tmp_path / "split", lambda *_: 0.1, ranks=2, more=lambda _: more))
    assert found.ranks[1].waits_s == pytest.approx({"activations": 0.007, "gradients": 0.003})
    (line,) = (line for line in lines(found) if line.startswith("split layers"))
    assert "activations 7.0 ms (6%), for gradients 3.0 ms (3%)" in line


SPLIT = {"head": "neurons"}


@pytest.mark.parametrize(
    ("words", "size", "at_a_time"),
    [
        ({}, 1, 1),
        ({"model": 3, "split": SPLIT}, 3, 1),
        ({"model": 2, "scheme": "one_weird_trick"}, 2, 2),
        ({"stages": ["a", "b"]}, 3, 1),
        ({"stages": ["a", "b"], "model": 3}, 3, 1),
        ({"stages": ["a", "b"], "model": 2, "split": SPLIT}, 6, 1),
    ],
)
def test_a_row(tmp_path: Path, words: dict[str, Any], size: int, at_a_time: int) -> None:
    (tmp_path / RECIPE).write_text(tomli_w.dumps({"parallel": words}))
    row = row_of(tmp_path)
    assert (row.size, row.at_a_time) == (size, at_a_time)
