"""Binomial reduction tree, the exchange of FireCaffe: sums go up the tree, the total comes down.

In round k of the way up, rank j + 2^k sends its partial sum to rank j, for every j that is a
multiple of 2^(k + 1). After ceil(lg p) rounds rank 0 holds the total; the way down is the same
rounds backwards. 2 ceil(lg p) rounds of the whole vector: 2 lg p (α + n β) + lg p · n γ.

Source: Iandola et al. 2016 (FireCaffe); Thakur, Rabenseifner, Gropp 2005.
"""

from firecaffe.exchange.schedule import Schedule, Transfer, make_schedule


def schedule(world_size: int, num_elements: int) -> Schedule:
    up = []
    distance = 1
    while distance < world_size:
        parents = range(0, world_size - distance, 2 * distance)
        up.append([Transfer(j + distance, j, 0, num_elements, reduce=True) for j in parents])
        distance *= 2
    down = [
        [Transfer(t.destination, t.source, t.start, t.stop, reduce=False) for t in round_]
        for round_ in reversed(up)
    ]
    return make_schedule("tree", world_size, num_elements, up + down)
