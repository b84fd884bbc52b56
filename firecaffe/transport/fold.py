"""The exchange that keeps nodes apart: all-to-all, addition in tree order, all-gather.

A worker may hold several nodes of the tree: because its share of micro-batches is no subtree, or
because nodes are encoded one by one. Every rank becomes the owner of one shard of the vector,
receives that shard of all nodes of all ranks, goes on with the tree where the workers stopped, and
gives the total of its shard to everybody. With one node a rank this moves the bytes of a ring; only
stock collectives are used, which copy and never add, so the order is ours on every backend.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.exchange.leaves import Node, TreeSum


def as_is(vector: Tensor) -> Tensor:
    return vector


@dataclass(frozen=True)
class Coding:
    """How vectors travel. Rows (the first dimension of what is encoded) stand alone."""

    encode: Callable[[Tensor], Tensor] = as_is
    decode: Callable[[Tensor], Tensor] = as_is


PLAIN = Coding()


def fold_nodes(
    nodes_of_rank: Sequence[Sequence[Node]],
    vectors: Sequence[Tensor],
    num_leaves: int,
    world: Group,
    coding: Coding = PLAIN,
) -> Tensor:
    """The root over all ranks' nodes, the same bits on all ranks.

    nodes_of_rank: each rank's nodes; those of all ranks, in order, are the whole tree. vectors:
    this rank's, one for each of its nodes, which may be changed; encoded, their number of rows
    must be a multiple of the number of ranks. With a coding other than plain every node and the
    total are encoded and decoded, also on one rank. Raises: PeerLostError.
    """
    group, ranks = world.exchange_group, world.world_size
    encoded = [coding.encode(vector) for vector in vectors]
    shape = encoded[0].shape
    shard_rows = shape[0] // ranks
    in_tree_order = [node for owned in nodes_of_rank for node in owned]
    if group is None:
        incoming = encoded
    else:
        # Row d of the outgoing matrix is shard d of each of this rank's nodes.
        by_rank = [rows.reshape(ranks, -1) for rows in encoded]
        outgoing = torch.stack(by_rank, dim=1).reshape(-1)
        shard = by_rank[0].shape[1]
        counts = [len(owned) * shard for owned in nodes_of_rank]
        arrived = outgoing.new_empty(sum(counts))
        sent = [len(vectors) * shard] * ranks
        world.traffic.add((ranks - 1) * sent[0] * outgoing.itemsize)
        with peers_may_be_lost(world):
            dist.all_to_all_single(arrived, outgoing, counts, sent, group=group)
        incoming = list(arrived.view(len(in_tree_order), shard_rows, *shape[1:]))
    counter: TreeSum[Tensor] = TreeSum(num_leaves, lambda left, right: left.add_(right))
    for node, rows in zip(in_tree_order, incoming, strict=True):
        counter.push(node, coding.decode(rows))
    own = coding.encode(counter.total())
    if group is None:
        return coding.decode(own)
    world.traffic.add((ranks - 1) * own.nbytes)
    total = own.new_empty(shape)
    with peers_may_be_lost(world):
        dist.all_gather_single(total, own, group=group)
    return coding.decode(total)
