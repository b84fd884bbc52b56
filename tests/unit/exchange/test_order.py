"""Which algorithm adds in tree order at which world size: its rule, an argument, and the proof."""

from collections.abc import Callable

import pytest

from firecaffe.exchange import ALGORITHMS, EXCHANGES, NATIVE
from firecaffe.exchange.proof import prove
from firecaffe.exchange.route import adds_in_tree_order, keeps_tree_order

WORLD_SIZES = range(1, 41)


def at_every_size(p: int) -> bool:
    """All parts meet at one owner, or level by level of the very tree."""
    return p >= 1


def two_at_most(p: int) -> bool:
    """A chain, or an unknown order. Of three ranks, one chunk of the ring starts at rank 1."""
    return p <= 2


def three_at_most(p: int) -> bool:
    """One fold of a rank and its two children. Of four ranks, the second tree brings the parts of
    ranks 0 and 3 to rank 0 first.
    """
    return p <= 3


def pairs_fill_the_left(p: int) -> bool:
    """Where pairing up the first 2 r of p = q + r ranks leaves the tree as it is.

    The tree splits p ranks into the first q and the other r. Doubling splits the q active ranks
    into halves of q / 2, each a pair or a single rank: the left half holds q ranks only if there
    are no singles in it, so r is at least q / 2 (or 0: no pairs at all); and the right half, of
    r ranks in q / 2 groups, must be right in itself.
    """
    q = 1
    while 2 * q <= p:
        q *= 2
    r = p - q
    return r == 0 or (2 * r >= q and pairs_fill_the_left(r))


IN_TREE_ORDER: dict[str, Callable[[int], bool]] = {
    "parameter_server": at_every_size,
    "sharded_parameter_server": at_every_size,
    "tree": at_every_size,
    "pipelined_tree": at_every_size,
    "double_tree": three_at_most,
    "ring": two_at_most,
    "recursive_doubling": pairs_fill_the_left,
    "halving_doubling": pairs_fill_the_left,
    NATIVE: two_at_most,
}


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_tree_order(algorithm: str) -> None:
    argued = [p for p in WORLD_SIZES if IN_TREE_ORDER[algorithm](p)]
    assert [p for p in WORLD_SIZES if adds_in_tree_order(algorithm, p)] == argued


def test_pairing_up_suits_ones_followed_by_zeros() -> None:
    """The same world sizes in closed form, 2^a - 2^b; powers of two are 2^(b + 1) - 2^b."""
    closed = {2**a - 2**b for a in range(1, 8) for b in range(a)}
    assert {p for p in range(1, 100) if pairs_fill_the_left(p)} == {p for p in closed if p < 100}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_rule_is_what_the_proof_finds(algorithm: str) -> None:
    for world_size in (*range(1, 34), 48, 60, 64):
        schedule = ALGORITHMS[algorithm](world_size, 4 * world_size)
        proof = prove(schedule)
        assert proof.complete
        assert proof.in_tree_order == schedule.in_tree_order


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tree_order_holds_for_every_length(algorithm: str) -> None:
    """What is asked of a vector of 4 p elements holds for the vectors of a real run."""
    for world_size in range(1, 18):
        for num_elements in (world_size, 1009, 12345):
            found = prove(ALGORITHMS[algorithm](world_size, num_elements)).in_tree_order
            assert found == adds_in_tree_order(algorithm, world_size)


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_made_for_tree_order(algorithm: str) -> None:
    assert keeps_tree_order(algorithm) == (algorithm not in ("ring", "double_tree", NATIVE))
