"""How many vectors are under way at once, held to what the schedules send."""

from collections import Counter

import pytest

from firecaffe.exchange import ALGORITHMS, NATIVE, useful_lanes

RANKS, ELEMENTS = 8, 840


def ports_are_alike(algorithm: str) -> bool:
    """Whether all ranks send and receive equally much in each round."""
    schedule = ALGORITHMS[algorithm](RANKS, ELEMENTS)
    for transfers in schedule.rounds:
        sent, arrived = Counter[int](), Counter[int]()
        for transfer in transfers:
            sent[transfer.source] += transfer.num_elements
            arrived[transfer.destination] += transfer.num_elements
        if len({*sent.values(), *arrived.values()}) > 1 or len(sent) < RANKS:
            return False
    return True


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_second_vector_goes_where_a_direction_of_a_link_is_idle(algorithm: str) -> None:
    assert useful_lanes(algorithm) == (1 if ports_are_alike(algorithm) else 2)


def test_by_hosts_the_total_comes_down_a_tree() -> None:
    assert useful_lanes("hierarchical(tree,ring)") == 2


def test_a_library_tells_vectors_apart_by_their_order() -> None:
    assert useful_lanes(NATIVE) == 1
