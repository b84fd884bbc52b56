"""When replicas are averaged: what holds of all plans, and the rules of those who gave them."""

from itertools import pairwise
from math import floor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.errors import RecipeError
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.rounds import Round, Rounds, cut_fragments, plan_rounds


def plan(steps: int, synchronous: int = 0, rate: Any = lambda _: 0.1, **words: Any) -> Rounds:
    return plan_rounds(SynchronyConfig("local", **words), synchronous, steps, rate)


def all_of(rounds: Rounds, steps: int) -> list[Round]:
    return [each for done in range(1, steps + 1) for each in rounds.taken(done)]


@given(
    steps=st.integers(1, 60),
    local_steps=st.integers(1, 20),
    synchronous=st.integers(0, 59),
    overlap_steps=st.integers(0, 19),
    fragments=st.integers(1, 20),
)
def test_every_step_is_in_one_round_of_each_fragment_or_synchronous(
    steps: int, local_steps: int, synchronous: int, overlap_steps: int, fragments: int
) -> None:
    synchronous, fragments = min(synchronous, steps - 1), min(fragments, local_steps)
    overlap_steps = min(overlap_steps, local_steps // fragments - 1)
    words = {"local_steps": local_steps, "overlap_steps": overlap_steps, "fragments": fragments}
    rounds = plan(steps, synchronous, **words)
    found = all_of(rounds, steps)
    for fragment in range(fragments):
        first, *others = (each for each in found if each.fragment == fragment)
        offset = local_steps * (fragment + 1) // fragments
        assert (first.first, first.stop) == (synchronous, min(steps, synchronous + offset))
        for last, each in pairwise([first, *others]):
            assert each.first == last.stop
            assert each.stop == min(steps, last.stop + local_steps)
        assert [first, *others][-1].stop == steps
    for each in found:
        assert each.applied == min(steps, each.stop + overlap_steps)
    # An average has come before the next one is taken, and the state is whole when it has.
    for one, following in pairwise(found):
        assert one.applied < following.stop or following.stop == steps
    whole = [done for done in range(1, steps + 1) if rounds.is_whole(done)]
    assert whole == [*range(1, synchronous + 1), *sorted({one.applied for one in found})]
    for before, done in zip([0, *whole], whole, strict=False):
        assert rounds.last_whole(done) == before
    together = [done for done in whole if rounds.are_together(done)]
    ends = [*range(synchronous + local_steps, steps, local_steps), steps]
    none_goes_on = fragments == 1 and not overlap_steps
    assert together == [*range(1, synchronous + 1), *(ends if none_goes_on else [steps])]
    stops = [synchronous, *(each.stop for each in found)]
    assert rounds.longest_gap == max(after - one for one, after in pairwise(stops))


def test_fragments_take_turns() -> None:
    rounds = plan(steps=19, local_steps=8, fragments=3, overlap_steps=1)
    taken = {done: [each.fragment for each in rounds.taken(done)] for done in range(20)}
    turns = {2: [0], 5: [1], 8: [2], 10: [0], 13: [1], 16: [2], 18: [0], 19: [0, 1, 2]}
    assert {done: each for done, each in taken.items() if each} == turns
    assert (rounds.longest_gap, rounds.mean_cycle, rounds.averages(18)) == (3, 6, 6)
    assert (Rounds(7).longest_gap, Rounds(7).taken(7)) == (0, [])


def test_the_quadratic_rule() -> None:
    """H = max(H_base, floor((c / rate)^2)) with the rate of the round's first step."""

    def halving(step: int) -> float:
        return 0.4 * 0.5 ** (step // 20)

    taken = all_of(plan(80, rate=halving, local_steps=2, growth_coefficient=0.65), 80)
    for each in taken:
        expected = max(2, floor((0.65 / halving(each.first)) ** 2))
        assert each.stop == min(80, each.first + expected)
    assert [each.steps for each in taken if each.first in (0, 20)] == [2, 10]
    # As long as the rate rises its highest counts: as after the warm-up, which the rule's authors
    # set for it.
    words = {"local_steps": 2, "growth_coefficient": 0.65}
    rises = plan(40, 0, lambda step: 0.2 * min(1, (step + 1) / 10), **words)
    assert all_of(rises, 40)[0].steps == floor((0.65 / 0.2) ** 2) == 10
    none = plan(40, 30, lambda _: 0.0, local_steps=2, growth_coefficient=0.6, fragments=2)
    assert all_of(none, 40) == [Round(0, 30, 40, 40), Round(1, 30, 40, 40)]


def test_a_cycle_has_the_length_of_its_first_step_for_all_fragments() -> None:
    """Of 4 steps, then, once the rate has fallen in the third one, of 16."""
    words = {"local_steps": 4, "growth_coefficient": 0.8, "fragments": 4}
    rounds = plan(40, 0, lambda step: 0.4 if step < 10 else 0.2, **words)
    stops = [each.stop for each in all_of(rounds, 40)]
    assert stops == [*range(1, 13), 16, 20, 24, 28, 32, 36, *[40] * 4]
    assert rounds.mean_cycle == 8


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30), fragments=st.integers(1, 30))
def test_each_parameter_is_in_one_fragment_all_as_large(sizes: list[int], fragments: int) -> None:
    fragments = min(fragments, len(sizes))
    cut = cut_fragments(sizes, fragments)
    assert len(cut) == fragments
    assert sorted(place for places in cut for place in places) == list(range(len(sizes)))
    assert all(places == sorted(places) and places for places in cut)
    held = [sum(sizes[place] for place in places) for places in cut]
    # Else its last parameter, no larger than the others there, had gone to the lightest.
    for places, total in zip(cut, held, strict=True):
        assert total - min(sizes[place] for place in places) <= min(held)


def test_the_largest_goes_first() -> None:
    assert cut_fragments([3, 8, 1, 1, 5, 2], 2) == [[1, 5], [0, 2, 3, 4]]
    with pytest.raises(RecipeError, match=r"fragments is 3, but the network has 2 parameters"):
        cut_fragments([1, 2], 3)
