"""Pictures of schedules against pictures drawn by hand."""

import re
from itertools import permutations

import pytest

from firecaffe.exchange import ALGORITHMS, find_schedule
from firecaffe.exchange.draw import LEGEND, draw
from firecaffe.exchange.schedule import from_rounds
from tests.kit.exchange import add, copy

HALVING_DOUBLING = """
rank     0   1   2   3
         │   │   │   │
round 1  ◄═══►   ◄═══►  n/2
         │   │   │   │
round 2  ◄═══╪═══►   │  n/4
         │   ◄═══╪═══►
         │   │   │   │
round 3  ◄───┼───►   │  n/4
         │   ◄───┼───►
         │   │   │   │
round 4  ◄───►   ◄───►  n/2
"""


EVERYBODY = """
rank     0   1   2   3   4
         │   │   │   │   │
round 1  ◄══ all pairs ══►  n/5
         │   │   │   │   │
round 2  ◄── all pairs ──►  n/5
"""

NODES = """
rank        0   1   2   3   4   5
            │   │   │   │   │   │
round 1     ◄═══╡   ◄═══╡   ◄═══╡  n
            │   │   │   │   │   │
rounds 2-3  ╞═══╪═══►   │   │   │  n/3
            │   │   ╞═══╪═══►   │
            ◄═══╪═══╪═══╪═══╡   │
            │   │   │   │   │   │
rounds 4-5  ├───┼───►   │   │   │  n/3
            │   │   ├───┼───►   │
            ◄───┼───┼───┼───┤   │
            │   │   │   │   │   │
round 6     ├───►   ├───►   ├───►  n
"""


ODD = """
rank     0   1   2
         │   │   │
round 1  ◄───┤   │  1 to 5 elements
         ╞═══►   │
         │   ◄═══╡
         │   ◄═══╡
         │   │   │
round 2  ├───┼───►  7 elements
"""

TAKING_TURNS = """
rank                 0   1   2
                     │   │   │
rounds 1, 3, ..., 7  ╞═══►   │  n/8
                     │   ◄═══►
                     ╞═══╪═══►
                     │   │   │
rounds 2, 4, ..., 8  ◄───┤   │  n/8
                     │   ◄───►
                     ◄───┼───┤
"""

BY_HAND = {
    ("halving_doubling", 4, 8): HALVING_DOUBLING,
    ("sharded_parameter_server", 5, 10): EVERYBODY,
    ("double_tree", 3, 8 * 32_768): TAKING_TURNS,
    ("hierarchical(tree,ring)", 6, 12): NODES,
}


@pytest.mark.parametrize(("algorithm", "world_size", "num_elements"), BY_HAND)
def test_by_hand(algorithm: str, world_size: int, num_elements: int) -> None:
    picture = draw(find_schedule(algorithm, 2)(world_size, num_elements))
    by_hand = BY_HAND[algorithm, world_size, num_elements]
    assert picture == f"{LEGEND}\n{by_hand}".removesuffix("\n")


def test_kinds_and_lengths_are_not_mixed_up() -> None:
    """An addition and an overwrite between two ranks are two arrows; a repeated one is two."""
    round_ = (add(0, 1, 0, 4), copy(1, 0, 4, 9), add(2, 1, 4, 6), add(2, 1, 6, 7))
    picture = draw(from_rounds("by hand", 3, 9, (round_, (copy(0, 2, 0, 7),))))
    assert picture == f"{LEGEND}\n{ODD}".removesuffix("\n")


def test_all_pairs_of_two_kinds_are_drawn_one_by_one() -> None:
    pairs = permutations(range(5), 2)
    round_ = tuple((copy if a + b == 7 else add)(a, b, 0, 9) for a, b in pairs)
    picture = draw(from_rounds("by hand", 5, 9, (round_,)))
    assert "all pairs" not in picture
    assert picture.count("►") - LEGEND.count("►") == 10


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_transfer_has_a_head(algorithm: str) -> None:
    for world_size in range(2, 17):
        schedule = ALGORITHMS[algorithm](world_size, 48 * world_size)
        picture = draw(schedule)
        assert all(len(line) <= 100 for line in picture.splitlines())
        heads = 0
        for line in picture.splitlines()[3:]:
            if name := re.match("rounds? [0-9-, .]+", line):
                times = len(numbers_of(name[0]))
            all_pairs = world_size * (world_size - 1)
            here = all_pairs if "all pairs" in line else line.count("◄") + line.count("►")
            heads += here and here * times
        assert heads == len(list(schedule.transfers()))


def numbers_of(name: str) -> range:
    """The rounds that a name stands for: round 1, rounds 2-5, or rounds 2, 4, ..., 8."""
    first, *others = map(int, re.findall(r"\d+", name))
    step = others[0] - first if "," in name else 1
    return range(first, (others or [first])[-1] + 1, step)


LOOKS = {
    "a": ["round 1"],
    "aab": ["rounds 1-2", "round 3"],
    "abab": ["rounds 1, 3", "rounds 2, 4"],
    "xababab": ["round 1", "rounds 2, 4, 6", "rounds 3, 5, 7"],
    "ababababa": ["rounds 1, 3, ..., 7", "rounds 2, 4, ..., 8", "round 9"],
    "abcabc": [f"round {number}" for number in range(1, 7)],
    "aabb": ["rounds 1-2", "rounds 3-4"],
}


@pytest.mark.parametrize(("looks", "names"), LOOKS.items())
def test_rounds_that_look_alike_or_take_turns_are_drawn_once(looks: str, names: list[str]) -> None:
    rounds = tuple((add(0, "xabc".index(look) + 1, 0, 1),) for look in looks)
    lines = draw(from_rounds("by hand", 5, 1, rounds)).splitlines()
    assert [line[: line.index("╞")].rstrip() for line in lines if line.startswith("round")] == names


def test_what_does_not_fit_and_nothing_to_draw_are_one_line() -> None:
    """Spacing shrinks before that."""
    for width, row in ((73, "round 1  ◄═══╡   ◄═══╡   ◄"), (58, "round 1  ◄══╡  ◄══╡  ◄")):
        lines = draw(ALGORITHMS["tree"](16, 16), width).splitlines()
        assert lines[4].startswith(row)
        assert max(map(len, lines)) <= width
    for world_size, width in ((16, 57), (1024, 100), (4, 20)):
        picture = draw(ALGORITHMS["tree"](world_size, 16), width)
        assert picture.startswith(f"tree, {world_size} ranks: ")
        assert str(width) in picture
        assert "\n" not in picture
    assert draw(ALGORITHMS["ring"](3, 0)) == "ring, 3 ranks: nothing is sent"
    assert draw(ALGORITHMS["tree"](1, 16)) == "tree, 1 rank: nothing is sent"
