"""Sharded parameter server: rank r is the server of shard r; all ports work at once.

Everybody sends shard r to rank r, which adds the p parts in tree order and sends the sum back
to everybody: two rounds of p - 1 messages at each rank, 2 (p - 1) / p · n elements, the least
possible. The receivers of one message all wait for the same p - 1 senders (incast), so each
rank starts with its right-hand neighbor.

Source: Li et al., OSDI 2014; the same transfers as a direct reduce-scatter and all-gather.
"""

from firecaffe.exchange.schedule import Schedule, Transfer, make_schedule, shards


def schedule(world_size: int, num_elements: int) -> Schedule:
    shard = shards(num_elements, world_size)
    pairs = [
        (rank, (rank + distance) % world_size)
        for distance in range(1, world_size)
        for rank in range(world_size)
    ]
    push = [Transfer(a, b, *shard[b], reduce=True) for a, b in pairs]
    pull = [Transfer(a, b, *shard[a], reduce=False) for a, b in pairs]
    return make_schedule("sharded_parameter_server", world_size, num_elements, [push, pull])
