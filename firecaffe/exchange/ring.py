"""Ring: the vector is cut into p chunks that travel around, first gathering sums, then as sums.

In each of 2 (p - 1) rounds every rank sends one chunk to its right-hand neighbor, so every port
carries 2 (p - 1) / p · n elements in all, the least possible. Each chunk is summed along the
ring from another starting rank: one after the other, not in tree order.

Source: Patarasuk and Yuan 2009; Thakur, Rabenseifner, Gropp 2005.
"""

from firecaffe.exchange.schedule import Schedule, Transfer, make_schedule, shards


def schedule(world_size: int, num_elements: int) -> Schedule:
    p = world_size
    chunk = shards(num_elements, p)

    def one_round(offset: int, reduce: bool) -> list[Transfer]:
        return [
            Transfer(rank, (rank + 1) % p, *chunk[(rank + offset) % p], reduce) for rank in range(p)
        ]

    scatter = [one_round(-step, reduce=True) for step in range(p - 1)]
    gather = [one_round(1 - step, reduce=False) for step in range(p - 1)]
    return make_schedule("ring", p, num_elements, scatter + gather)
