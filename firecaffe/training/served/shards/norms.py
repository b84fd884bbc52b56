"""Norms of parameters, which owners tell each other before an update is clipped."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from firecaffe.training.served.shards.cut import Shard
from firecaffe.transport.lane import Line

UNUSED = -1.0
"""The norm of what has no gradient."""


class NormsOfOwners:
    """An owner's end. All owners make the same updates in the same order."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        own: Shard,
        others: Mapping[int, Shard],
        lines: Mapping[int, Line],
    ) -> None:
        """named: all parameters. own, others: those that owners have whole. lines: to the others,
        by rank.
        """
        self._named, self._own, self._others, self._lines = named, own, others, lines

    def __call__(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The norms of all parameters that were used, in the network's order; norms: of the owner's
        own ones. Raises: PeerLostError.
        """
        mine = torch.tensor(
            [float(norms[name]) if name in norms else UNUSED for name in self._own.pieces],
            dtype=torch.float64,
        )
        theirs = {
            rank: torch.zeros(len(shard.pieces), dtype=torch.float64)
            for rank, shard in self._others.items()
        }
        waits = [line.begin_send(mine.view(torch.uint8)) for line in self._lines.values()]
        for rank, line in self._lines.items():
            waits.append(line.begin_receive(theirs[rank].view(torch.uint8)))
        for wait in waits:
            wait()
        told = dict(zip(self._own.pieces, mine, strict=True))
        for rank, shard in self._others.items():
            told |= zip(shard.pieces, theirs[rank], strict=True)
        return {
            name: told[name].to(each.dtype)
            for name, each in self._named.items()
            if name in told and told[name] != UNUSED
        }
