"""Vectors whose sum is known: is it their sum, is it exact, does a wrong sum show?"""

import torch

from firecaffe.exchange.route import find_route
from firecaffe.measure.known_sum import checks_bits, difference, summand, true_sum

LONG = 70_000
"""Longer than the pattern's period."""


def test_true_sum_is_the_sum_in_integers() -> None:
    for world_size in [2, 3, 7, 16]:
        for num_elements in [0, 1, 5, 1009, LONG]:
            summands = [summand(rank, world_size, num_elements) for rank in range(world_size)]
            expected = torch.stack(summands).to(torch.int64).sum(0)
            assert true_sum(world_size, num_elements).shape == (num_elements,)
            assert torch.equal(true_sum(world_size, num_elements).to(torch.int64), expected)
            assert all(torch.equal(vector, vector.round()) for vector in summands)


def test_every_sum_of_some_ranks_is_exact_in_float32() -> None:
    world_size = 2193
    assert true_sum(world_size, LONG).max() < 2**24
    assert min(summand(rank, world_size, LONG).min() for rank in (0, 1, 2192)) >= 1


def test_a_rank_that_is_missing_or_counted_twice_shows() -> None:
    for world_size in [2, 3, 4, 8]:
        vectors = [summand(rank, world_size, 1009) for rank in range(world_size)]
        right = true_sum(world_size, 1009)
        for missing in range(world_size):
            assert not torch.any(right - vectors[missing] == right)
            for twice in range(world_size):
                wrong = right - vectors[missing] + vectors[twice]
                assert (twice == missing) == torch.equal(wrong, right)


def test_difference_is_of_bits() -> None:
    zero = torch.tensor([1.0, 0.0, 2.0])
    assert difference(zero, zero.clone()) == ""
    assert difference(torch.tensor([1.0, -0.0, 5.0]), zero) == "element 1 of 3 is -0 instead of 0"
    assert "element 0 of 1 is nan instead of 1" in difference(
        torch.tensor([torch.nan]), torch.ones(1)
    )


def test_bits_are_checked_where_the_tree_is_kept_and_small() -> None:
    assert checks_bits(find_route("tree", None, 4), 2**18)
    assert not checks_bits(find_route("tree", None, 4), 2**18 + 1)
    assert not checks_bits(find_route("ring", None, 4), 8)
    assert not checks_bits(find_route("native", None, 3), 8)
