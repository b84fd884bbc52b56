"""Recursive doubling: in round k every rank swaps its whole vector with the rank 2^k away.

lg p rounds, the fewest possible, of the whole vector: lg p (α + n β + n γ). For small vectors.
After round k each rank holds the sum of its aligned block of 2^(k + 1) ranks: tree order.
Other world sizes pair up first (`power_of_two`).

Source: Thakur, Rabenseifner, Gropp 2005.
"""

from firecaffe.exchange.power_of_two import active_ranks, hand_on, pair_up
from firecaffe.exchange.schedule import Schedule, Transfer, make_schedule


def schedule(world_size: int, num_elements: int) -> Schedule:
    active = active_ranks(world_size)
    rounds = [pair_up(world_size, num_elements)]
    distance = 1
    while distance < len(active):
        rounds.append(
            [
                Transfer(rank, active[i ^ distance], 0, num_elements, reduce=True)
                for i, rank in enumerate(active)
            ]
        )
        distance *= 2
    rounds.append(hand_on(world_size, num_elements))
    return make_schedule("recursive_doubling", world_size, num_elements, rounds)
