"""Sums and gathers the nodes of one level of the micro-batch tree, which all ranks hold."""

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.exchange.leaves import Node, Shares, equal_shares
from firecaffe.transport.fold import NodeSum, RowCoding


class NodeWire:
    """The nodes of one level as leaves of the tree above them, shared out like micro-batches.

    Used by one thread at a time; all ranks call the same methods in the same order.
    """

    def __init__(self, world: Group, num_nodes: int) -> None:
        self.world = world
        self.num_nodes = num_nodes
        self.share_out(equal_shares(num_nodes, world.world_size))

    def share_out(self, shares: Shares) -> None:
        """Gives ranks other nodes. All ranks call it between the same two sums."""
        self.shares = shares
        self._nodes_of_rank = [[Node(0, index) for index in share] for share in shares]
        self._sum = NodeSum(self.world, self._nodes_of_rank, self.num_nodes)

    @property
    def own_nodes(self) -> list[int]:
        """The numbers of this rank's nodes."""
        return list(self.shares[self.world.rank])

    def sum_nodes(self, vectors: list[Tensor]) -> Tensor:
        """The sum over all nodes of all ranks, in tree order. vectors: this rank's nodes'."""
        return self._sum(vectors)

    def sum_rows(self, vectors: list[Tensor], codec: RowCoding) -> Tensor:
        """The sum with nodes and total encoded on the way, by rows that stand alone."""
        num_elements = vectors[0].numel()
        missing = -num_elements % codec.row_elements
        if missing:
            vectors = [torch.nn.functional.pad(vector, (0, missing)) for vector in vectors]
        return self._sum(vectors, codec)[:num_elements]

    def gather(self, payloads: list[Tensor]) -> list[Tensor]:
        """All nodes' payloads (uint8, of any length) in node order, from this rank's."""
        group = self.world.exchange_group
        if group is None:
            return payloads
        device = payloads[0].device
        counts = [len(nodes) for nodes in self._nodes_of_rank]
        own_lengths = torch.zeros(max(counts), dtype=torch.int64, device=device)
        for index, payload in enumerate(payloads):
            own_lengths[index] = payload.numel()
        rows = [torch.empty_like(own_lengths) for _ in counts]
        with peers_may_be_lost(self.world):
            dist.all_gather(rows, own_lengths, group=group)
        lengths = [row[:count].tolist() for row, count in zip(rows, counts, strict=True)]
        longest = max(sum(of_rank) for of_rank in lengths)
        own = torch.zeros(longest, dtype=torch.uint8, device=device)
        torch.cat(payloads, out=own[: sum(p.numel() for p in payloads)])
        gathered = [torch.empty_like(own) for _ in counts]
        with peers_may_be_lost(self.world):
            dist.all_gather(gathered, own, group=group)
        # In a ring every rank sends on all but one, all at the length of the longest.
        sent_bytes = own_lengths.nbytes + own.nbytes
        self.world.traffic.add((self.world.world_size - 1) * sent_bytes)
        return [
            payload
            for row, of_rank in zip(gathered, lengths, strict=True)
            for payload in row[: sum(of_rank)].split_with_sizes(of_rank)
        ]
