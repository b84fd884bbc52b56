"""Measuring over real process groups: what is measured, and what is refused before it is."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import pytest
import torch

from firecaffe.cluster.world import World, join
from firecaffe.errors import NotIdenticalError
from firecaffe.exchange import ALGORITHMS, EXCHANGES, ring
from firecaffe.exchange.schedule import Schedule, from_rounds
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.measure.exchange_times import NodePerRank, Timing, make_encoders, time_exchanges
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.link import MeasuredLink, measure_link
from firecaffe.transport.local_ranks import meet_local_ranks
from tests.world import Ranks


def links() -> list[MeasuredLink]:
    """From rank 0 to 2, from 1 to 0, and one of which there is no time, which would hold up the
    start of a training.
    """
    with join("cpu") as world:
        with pytest.raises(ValueError, match=r"two ends.*rank 0 and rank 0"):
            measure_link(world, 0, 0)
        found = [measure_link(world, *ends, least_stream_s=0.001) for ends in ((0, 2), (1, 0))]
        return [*found, measure_link(world, 0, 1, least_stream_s=0.0, most_s=0.0)]


def test_all_ranks_learn_what_the_first_end_measured(ranks: Ranks) -> None:
    found, *others = ranks.shared(3, links)
    assert others == [found, found]
    assert [(link.first, link.second) for link in found] == [(0, 2), (1, 0), (0, 1)]
    for link, samples, streams in zip(found, (100, 100, 1), (5, 5, 1), strict=True):
        assert len(link.latency_samples_s) == samples
        assert len(link.bandwidth_samples_bytes_per_s) == streams
        assert min(link.latency_samples_s + link.bandwidth_samples_bytes_per_s) > 0


Encoders = Mapping[str, Callable[[World, int], NodePerRank]]
WRONG_ENCODERS: Encoders = {}


def timings(
    algorithms: list[str], sizes_bytes: list[int], repetitions: int, codecs: str = ""
) -> list[Timing]:
    """codecs: "all", "wrong" or none."""
    encoders = {"all": make_encoders(list(COMPRESSORS)), "wrong": WRONG_ENCODERS, "": {}}[codecs]
    with join("cpu") as world:
        return time_exchanges(world, algorithms, sizes_bytes, repetitions, encoders=encoders)


def turns_and_times() -> tuple[list[str], list[Timing]]:
    """Whose turn it was, and what is told where rank r takes r + 1 seconds for each."""
    turns = []

    def time_once(world: World, exchange: Exchange, vector: torch.Tensor) -> float:
        turns.append(exchange.route.algorithm)
        exchange.all_reduce(vector)
        return world.rank + 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firecaffe.measure.exchange_times._time_once", time_once)
        found = timings(["native", "tree", "ring"], [8, 64], 3)
    return turns, found


def test_exchanges_take_turns_and_the_slowest_rank_counts(ranks: Ranks) -> None:
    forth, back = ["native", "tree", "ring"], ["ring", "tree", "native"]
    for turns, found in ranks.shared(2, turns_and_times):
        assert turns == 2 * [*back, *forth, *back, *forth]  # the first of each size warms up
        assert {t.samples_s for t in found} == {(2.0, 2.0, 2.0)}


def forgetful_ring(world_size: int, num_elements: int) -> Schedule:
    """A ring whose last round is missing: one shard of every rank is not the sum."""
    whole = ring.schedule(world_size, num_elements)
    return from_rounds(whole.algorithm, world_size, num_elements, whole.rounds[:-1])


class WrongLater(Exchange):
    """Right when it is checked, and then wrong on the last rank."""

    calls = 0

    def all_reduce(self, vector: torch.Tensor, lane: int = 0, divide_by: int = 1) -> None:
        super().all_reduce(vector, lane, divide_by)
        # One for the check, another while it is timed.
        WrongLater.calls += self.route.algorithm == "ring"
        if WrongLater.calls > 2 and self.world.rank == self.world.world_size - 1:
            vector[-1] += 1


def timings_in_memory(local_world_size: int, algorithms: list[str], size: int) -> list[Timing]:
    """As if every host had so many ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % local_world_size)
    with join("cpu") as world:
        local = meet_local_ranks(world, 300.0)
        assert local is not None
        found = time_exchanges(world, algorithms, [4, size], 2, local=local)
        local.close()
    return found


HOSTS: dict[str, tuple[int, dict[str, tuple[str, int | None]]]] = {
    "one host": (4, {"native": ("group", None), "tree": ("memory", 0), "ring": ("group", 60000)}),
    "two hosts": (2, {"tree": ("both", 40000), "hierarchical(tree,ring)": ("both", 40000)}),
}
"""Of four ranks, so many on a host; what each goes through, and its bytes on the wire, of 40000."""


@pytest.mark.parametrize(("local", "ways"), HOSTS.values(), ids=HOSTS)
def test_sums_in_shared_memory_are_checked_and_timed_too(
    ranks: Ranks, local: int, ways: dict[str, tuple[str, int | None]]
) -> None:
    first, *others = ranks.shared(4, timings_in_memory, local, list(ways), 40000)
    assert others == [first] * 3
    of_size = [timing for timing in first if timing.size_bytes == 40000]
    assert {t.algorithm: (t.through, t.wire_bytes) for t in of_size} == ways
    assert [t.bits_checked for t in of_size] == [name not in ("native", "ring") for name in ways]
    assert min(min(t.samples_s) for t in first) > 0


def test_every_compressor_is_timed_beside_every_exchange(ranks: Ranks) -> None:
    sizes, names = (4, 3 * 262144), (*EXCHANGES, *COMPRESSORS)
    first, *others = ranks.shared(3, timings, list(EXCHANGES), list(sizes), 2, "all")
    assert others == [first] * 2
    assert [(t.size_bytes, t.algorithm) for t in first] == [*product(sizes, names)]
    assert all(t.is_encoded == (t.algorithm in COMPRESSORS) for t in first)
    assert {(t.world_size, len(t.samples_s)) for t in first} == {(3, 2)}
    assert min(min(t.samples_s) for t in first) > 0
    wire_bytes = {t.algorithm: t.wire_bytes for t in first[len(names) :]}
    # 196608 elements are 768 rows. To each of two others a third of them, and so much of the total.
    elements, rows = 196608, 768
    assert wire_bytes["float16"] == wire_bytes["bfloat16"] == 4 * (elements // 3) * 2
    assert wire_bytes["int8"] == 4 * (rows // 3) * 260
    # To two others one payload: the tensor's length, and what the codec's file says.
    assert wire_bytes["one_bit"] == 2 * (4 + 8 + elements // 8)
    assert wire_bytes["top_k"] == 2 * (4 + 8 * (elements // 64))
    # Two factors of rank 16 of a matrix of 384 x 512, as float32.
    # A rank sends all shards but its own of a factor, and twice its own of the total.
    factors = [16 * 384, 16 * 512]
    assert wire_bytes["power_sgd"] == sum(4 * (each + -(-each // 3)) for each in factors)
    assert 2 * (8 + 4 + 4) <= (wire_bytes["threshold"] or 0) < elements


def halve(vector: torch.Tensor) -> None:
    vector.mul_(0.5)


def nudge(vector: torch.Tensor) -> None:
    vector[0] = torch.nextafter(vector[0], torch.tensor(torch.inf))


@dataclass(frozen=True)
class WrongEncoder:
    """Makes int8, whose sums are changed from one of them on, on the last rank or on all."""

    change: Callable[[torch.Tensor], None]
    first: int = 0
    on_all: bool = True

    def __call__(self, world: World, num_elements: int) -> NodePerRank:
        encoder, sums = NodePerRank("int8", world, num_elements), count()
        all_reduce = encoder.all_reduce

        def changed(vector: torch.Tensor, lane: int = 0, divide_by: int = 1) -> None:
            all_reduce(vector)
            if next(sums) >= self.first and (self.on_all or world.rank == world.world_size - 1):
                self.change(vector)

        vars(encoder)["all_reduce"] = changed
        return encoder


def nothing_is_added(*_: object, **__: object) -> None:
    """In place of a sum in memory."""


WRONG: dict[str, tuple[int, str, Any, Callable[[], object], list[str]]] = {
    "a round is missing": (
        *(2, "ring", forgetful_ring),
        lambda: timings(["native", "tree", "ring"], [4000], 3),
        ["ring over 2 ranks, 4000 bytes: the sum is wrong: element ", " on rank 0;"],
    ),
    "another order of additions": (
        *(4, "firecaffe.exchange.route.adds_in_tree_order", lambda *_: True),
        lambda: timings(["tree", "ring"], [4000], 3),
        ["ring over 4 ranks, 4000 bytes: the bits are not the tree's: element "],
    ),
    "later": (
        *(2, "firecaffe.measure.exchange_times.Exchange", WrongLater),
        lambda: timings(["native", "ring"], [4000], 3),
        [
            "ring over 2 ranks, 4000 bytes: element 999 of 1000 is ",
            "on rank 1, after a first sum that was right",
        ],
    ),
    "in memory": (
        *(2, "firecaffe.transport.exchange.SharedVector.sum_in_place", nothing_is_added),
        lambda: timings_in_memory(2, ["native", "tree"], 40000),
        ["tree over 2 ranks, 4 bytes: the sum is wrong: element 0 of 1 "],
    ),
    **{
        parts[0]: (
            *(3, f"{__name__}.WRONG_ENCODERS", {"int8": encoder}),
            lambda: timings(["native"], [4000], 2, "wrong"),
            ["int8 over 3 ranks, 4000 bytes: ", *parts],
        )
        for encoder, parts in (
            (WrongEncoder(halve), ["the sum is off by ", "in the L2 norm", " on rank 0"]),
            (WrongEncoder(nudge, on_all=False), ["rank 2 ended in other bits than most on rank 0"]),
            (WrongEncoder(nudge, 1, on_all=False), ["rank 2 ended", "after a first sum that was"]),
            (WrongEncoder(nudge), ["the bits are not those of one process: element 0 of 1000"]),
        )
    },
}
"""On how many ranks, what is patched with what, what is measured, and what is said."""


def refusal(name: str) -> str:
    _, place, wrong, measure, _ = WRONG[name]
    with pytest.MonkeyPatch.context() as patch:
        if place in ALGORITHMS:
            patch.setitem(ALGORITHMS, place, wrong)
        else:
            patch.setattr(place, wrong)
        with pytest.raises(NotIdenticalError) as caught:
            measure()
    return str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sum_is_refused_on_every_rank(ranks: Ranks, name: str) -> None:
    workers, *_, parts = WRONG[name]
    [said] = set(ranks.shared(workers, refusal, name))
    assert said.startswith(parts[0])
    assert all(part in said for part in parts)
    assert said.endswith("no time of a wrong sum is shown")
