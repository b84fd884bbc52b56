"""Named tensors of all ranks, on rank 0 one at a time: nobody ever holds them all."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World, peers_may_be_lost, waiting


@dataclass(frozen=True)
class Held:
    """A tensor, and the rank from which it is taken."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int


def list_tensors(world: World, tensors: Mapping[str, Tensor]) -> list[Held]:
    """The tensors of all ranks, the same list on all; what several hold, the first of them gives.

    Raises: PeerLostError.
    """
    own = [[name, list(each.shape), str(each.dtype)] for name, each in tensors.items()]
    held: dict[str, Held] = {}
    for rank, text in enumerate(gather_text(world, json.dumps(own))):
        for name, shape, dtype in json.loads(text):
            kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
            held.setdefault(name, Held(name, tuple(shape), kind, rank))
    return list(held.values())


def collect(
    world: World, listed: Sequence[Held], tensors: Mapping[str, Tensor]
) -> Iterator[Tensor]:
    """On rank 0 the listed tensors, in order, on the CPU; the others give theirs and get none.

    All ranks have to go through it to the end. tensors: this rank's own. Raises: PeerLostError.
    """
    for each in listed:
        if world.rank not in (0, each.rank):
            continue
        if world.rank == each.rank:
            tensor = tensors[each.name].cpu().contiguous()
        else:
            tensor = torch.empty(each.shape, dtype=each.dtype)
        if each.rank != 0:
            with peers_may_be_lost(world), waiting(world):
                if world.is_first:
                    dist.recv(tensor, group_src=each.rank, group=world.group)
                else:
                    dist.send(tensor, group_dst=0, group=world.group)
        if world.is_first:
            yield tensor
