"""Which parameters are averaged together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.errors import RecipeError
from firecaffe.synchrony.rounds import cut_fragments


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30), fragments=st.integers(1, 30))
def test_each_parameter_is_in_one_fragment_and_all_are_about_as_large(
    sizes: list[int], fragments: int
) -> None:
    fragments = min(fragments, len(sizes))
    found = cut_fragments(sizes, fragments)
    assert sorted(place for places in found for place in places) == list(range(len(sizes)))
    assert all(places == sorted(places) and places for places in found)
    held = [sum(sizes[place] for place in places) for places in found]
    # Else its last parameter, no larger than the others there, had gone to the lightest.
    for places, total in zip(found, held, strict=True):
        assert total - min(sizes[place] for place in places) <= min(held)


def test_the_largest_goes_first() -> None:
    assert cut_fragments([3, 8, 1, 1, 5, 2], 2) == [[1, 5], [0, 2, 3, 4]]
    assert cut_fragments([4, 4, 4], 1) == [[0, 1, 2]]


def test_fewer_parameters_than_fragments() -> None:
    with pytest.raises(RecipeError, match=r"fragments is 3, but the network has 2 parameters"):
        cut_fragments([1, 2], 3)
