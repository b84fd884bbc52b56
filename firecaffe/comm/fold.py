"""The exchange for unequal shares: all-to-all, addition in tree order, all-gather.

A worker whose share of micro-batches is no subtree holds several nodes of the tree. Every rank
becomes the owner of one shard of the vector, receives that shard of all nodes of all ranks, goes
on with the tree where the workers stopped, and gives the total of its shard to everybody. With one
node a rank this moves the bytes of a ring; only stock collectives are used, which copy and never
add, so the order is ours on every backend.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.comm.world import World
from firecaffe.exchange.leaves import Node, TreeSum, largest_nodes, leaf_share


def fold_nodes(
    nodes: list[tuple[Node, Tensor]], num_leaves: int, total: Tensor, world: World
) -> None:
    """total becomes the root over all ranks' nodes; see `Exchange.fold`."""
    group = world.exchange_group
    ranks = world.world_size
    shard = total.numel() // ranks
    nodes_of_rank = [
        largest_nodes(num_leaves, leaf_share(num_leaves, ranks, rank)) for rank in range(ranks)
    ]
    # Row d of the outgoing matrix is shard d of each of this rank's nodes.
    outgoing = torch.stack([vector.view(ranks, shard) for _, vector in nodes], dim=1).reshape(-1)
    counts = [len(owned) * shard for owned in nodes_of_rank]
    incoming = total.new_empty(sum(counts))
    dist.all_to_all_single(incoming, outgoing, counts, [len(nodes) * shard] * ranks, group=group)
    counter: TreeSum[Tensor] = TreeSum(num_leaves, lambda left, right: left.add_(right))
    in_tree_order = (node for owned in nodes_of_rank for node in owned)
    for node, part in zip(in_tree_order, incoming.view(-1, shard), strict=True):
        counter.push(node, part)
    dist.all_gather_single(total, counter.total(), group=group)
