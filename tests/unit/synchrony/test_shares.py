"""Balanced shares, against all shares that there are."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.exchange.leaves import Shares, equal_shares, largest_nodes
from firecaffe.synchrony.shares import GAIN, TOLERANCE, balanced_shares, longest_s, next_shares

SECONDS = st.sampled_from([0.5, 1.0, 1.01, 1.5, 2.0, 3.0]) | st.floats(0.01, 10)


@st.composite
def measured(draw: st.DrawFn) -> tuple[int, list[float]]:
    """Micro-batches of a step, and the seconds of each of up to four workers."""
    seconds = draw(st.lists(SECONDS, min_size=1, max_size=4))
    return draw(st.integers(len(seconds), 11)), seconds


def all_shares(num_leaves: int, world_size: int) -> Iterator[Shares]:
    for cuts in combinations(range(1, num_leaves), world_size - 1):
        yield tuple(range(a, b) for a, b in pairwise((0, *cuts, num_leaves)))


def nodes(num_leaves: int, shares: Shares) -> tuple[int, int]:
    """The most of one worker, and those of all."""
    counts = [len(largest_nodes(num_leaves, share)) for share in shares]
    return max(counts), sum(counts)


@settings(max_examples=200)
@given(measured())
def test_no_shares_are_faster_and_none_as_fast_has_fewer_nodes(
    case: tuple[int, list[float]],
) -> None:
    num_leaves, seconds = case
    shares = balanced_shares(num_leaves, seconds)
    every = list(all_shares(num_leaves, len(seconds)))
    limit = min(longest_s(other, seconds) for other in every) * (1 + TOLERANCE)
    fast = [other for other in every if longest_s(other, seconds) <= limit]
    assert shares in fast
    assert nodes(num_leaves, shares) == min(nodes(num_leaves, other) for other in fast)


@settings(max_examples=100)
@given(measured(), st.data())
def test_shares_change_for_a_gain_alone(case: tuple[int, list[float]], data: st.DataObject) -> None:
    num_leaves, seconds = case
    current = data.draw(st.sampled_from(list(all_shares(num_leaves, len(seconds)))))
    found = next_shares(num_leaves, seconds, current)
    if found == current:
        best = longest_s(balanced_shares(num_leaves, seconds), seconds)
        assert best >= (1 - GAIN) * longest_s(current, seconds)
    else:
        assert longest_s(found, seconds) < (1 - GAIN) * longest_s(current, seconds)
        assert next_shares(num_leaves, seconds, found) == found


@pytest.mark.parametrize("said", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_says_nothing_is_that_of_the_fastest(said: float) -> None:
    equal = equal_shares(8, 2)
    assert next_shares(8, [1.0, said], equal) == equal
    assert next_shares(8, [said, said], equal) == equal


def test_many_workers_are_no_burden() -> None:
    """A thousand micro-batches on 64 workers of all speeds: about a second's work at most."""
    seconds = [1.0 + (rank * 37 % 64) / 64 for rank in range(64)]
    shares = balanced_shares(1024, seconds)
    assert sum(map(len, shares)) == 1024
    assert longest_s(shares, seconds) < 1.1 * 1024 / sum(1 / each for each in seconds)
    with pytest.raises(ValueError, match="3 workers for 2 micro-batches"):
        balanced_shares(2, [1.0, 1.0, 1.0])
