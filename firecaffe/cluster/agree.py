"""Ranks tell each other texts, and find out who differs before training starts."""

import json
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.world import World, peers_may_be_lost, waiting
from firecaffe.errors import AgreementError


def gather_text(world: World, text: str) -> list[str]:
    """The texts of all ranks, in rank order."""
    return [data.decode() for data in gather_bytes(world, text.encode())]


def gather_bytes(world: World, data: bytes) -> list[bytes]:
    """What all ranks bring, in rank order."""
    if world.group is None:
        return [data]
    own = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
    own_size = torch.tensor([own.numel()])
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.world_size)]
    with peers_may_be_lost(world), waiting(world):
        dist.all_gather(sizes, own_size, group=world.group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: own.numel()] = own
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world.world_size)]
    with peers_may_be_lost(world), waiting(world):
        dist.all_gather(rows, padded, group=world.group)
    return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def differing_ranks(texts: list[str]) -> list[int]:
    """The ranks whose text is not the most frequent one (rank 0's, where there is a tie)."""
    counts = Counter(texts)
    most = max(counts.values())
    common = next(text for text in texts if counts[text] == most)
    return [rank for rank, text in enumerate(texts) if text != common]


def agree(world: World, facts: dict[str, str]) -> None:
    """Checks that all ranks state the same facts.

    Raises: AgreementError, on every rank, naming the first fact that differs, who differs, and
    both values.
    """
    stated = [json.loads(text) for text in gather_text(world, json.dumps(facts))]
    for what in facts:
        values = [str(by_rank.get(what)) for by_rank in stated]
        different = differing_ranks(values)
        if different:
            first = different[0]
            other = next(rank for rank in range(len(values)) if rank not in different)
            ranks = ", ".join(str(rank) for rank in different)
            raise AgreementError(
                f"rank {ranks} differs from the others in {what}: "
                f"{_shorten(values[first])} on rank {first}, "
                f"{_shorten(values[other])} on rank {other}; "
                "start all ranks with the same code, recipe and data"
            )


def take_from_first(world: World, tensors: list[Tensor]) -> None:
    """Gives every rank the values of rank 0's tensors, in place."""
    if world.group is None:
        return
    for tensor in tensors:
        dense = tensor.contiguous()
        with peers_may_be_lost(world), waiting(world):
            dist.broadcast(dense, group_src=0, group=world.group)
        tensor.copy_(dense)


def _shorten(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
