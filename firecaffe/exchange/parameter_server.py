"""Parameter server: all ranks send the whole vector to rank 0, which sends the sum back.

Two rounds of p - 1 messages, all through one port: 2 (p - 1) (α + n β) + (p - 1) n γ. The server is
one of the workers; FireCaffe counts one direction and p workers next to the server: p n β. The root
adds in tree order, since all parts arrive in one round. Source: Li et al., OSDI 2014; Iandola et
al. 2016 (FireCaffe).
"""

from collections.abc import Iterator
from functools import partial

from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer

ROOT = 0


def schedule(world_size: int, num_elements: int) -> Schedule:
    return Schedule(
        "parameter_server",
        world_size,
        num_elements,
        partial(_rounds, world_size, num_elements),
        num_rounds=2,
        num_messages=2 * (world_size - 1),
        sent_elements=2 * (world_size - 1) * num_elements,
        in_tree_order=True,
        busiest=[ROOT],
    )


def _rounds(p: int, n: int, rank: int) -> Iterator[OwnRound]:
    workers = [other for other in range(p) if other != ROOT] if rank == ROOT else [rank]
    yield 0, [Transfer(worker, ROOT, 0, n, reduce=True) for worker in workers]
    yield 1, [Transfer(ROOT, worker, 0, n, reduce=False) for worker in workers]
