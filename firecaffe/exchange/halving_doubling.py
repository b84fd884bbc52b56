"""Halving-doubling: swap halves, then quarters, …; then gather the pieces the way back.

The way down is a reduce-scatter: in round k a rank and the one 2^k away split the slice that
they share, each sends the half that it gives up and adds the half that it keeps. The way up is
the same rounds backwards, copying. 2 lg p rounds, 2 (p - 1) / p · n elements, the least
possible. Distance 1 comes first (recursive distance doubling), so that additions are in tree
order. Other world sizes pair up first (`power_of_two`).

Source: Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005.
"""

from firecaffe.exchange.power_of_two import active_ranks, hand_on, pair_up
from firecaffe.exchange.schedule import Schedule, Transfer, make_schedule


def schedule(world_size: int, num_elements: int) -> Schedule:
    active = active_ranks(world_size)
    slices = [(0, num_elements) for _ in active]
    down: list[list[Transfer]] = []
    up: list[list[Transfer]] = []
    distance = 1
    while distance < len(active):
        kept = [_half(slices[i], upper=bool(i & distance)) for i in range(len(active))]
        partner = [i ^ distance for i in range(len(active))]
        # What a rank gives up is what its partner keeps, for both share one slice.
        down.append(
            [
                Transfer(rank, active[partner[i]], *kept[partner[i]], reduce=True)
                for i, rank in enumerate(active)
            ]
        )
        up.append(
            [
                Transfer(rank, active[partner[i]], *kept[i], reduce=False)
                for i, rank in enumerate(active)
            ]
        )
        slices = kept
        distance *= 2
    rounds = [
        pair_up(world_size, num_elements),
        *down,
        *reversed(up),
        hand_on(world_size, num_elements),
    ]
    return make_schedule("halving_doubling", world_size, num_elements, rounds)


def _half(slice_: tuple[int, int], upper: bool) -> tuple[int, int]:
    start, stop = slice_
    middle = (start + stop) // 2
    return (middle, stop) if upper else (start, middle)
