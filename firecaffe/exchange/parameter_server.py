"""Parameter server: everybody sends the whole vector to rank 0, which sends the sum back.

Two rounds of p - 1 messages, all through one port: 2 (p - 1) (α + n β) + (p - 1) n γ. The
server is one of the workers. FireCaffe counts one direction and p workers beside the server:
p n β. The sum at the root is taken in tree order, since all parts are there at once.

Source: Li et al., OSDI 2014; Iandola et al. 2016 (FireCaffe).
"""

from firecaffe.exchange.schedule import Schedule, Transfer, make_schedule

ROOT = 0


def schedule(world_size: int, num_elements: int) -> Schedule:
    workers = [rank for rank in range(world_size) if rank != ROOT]
    push = [Transfer(rank, ROOT, 0, num_elements, reduce=True) for rank in workers]
    pull = [Transfer(ROOT, rank, 0, num_elements, reduce=False) for rank in workers]
    return make_schedule("parameter_server", world_size, num_elements, [push, pull])
