"""Exchange of texts among ranks, checks that all agree, and SHA-256 digests of named tensors."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from typing_extensions import Buffer

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost, waiting
from firecaffe.errors import AgreementError
from firecaffe.schema import checked

T = TypeVar("T")

NamedTensors = Iterable[tuple[str, Tensor]]


def digest(tensors: NamedTensors) -> str:
    """Return the SHA-256 of named tensors in hex; names and order count, memory layout does not."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor_bytes(tensor))
    return sha.hexdigest()


def digest_each(tensors: NamedTensors) -> dict[str, str]:
    return {name: digest([(name, tensor)]) for name, tensor in tensors}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's elements in row-major order, as bytes."""
    return memoryview(cast(Buffer, as_bytes(tensor.cpu()).numpy()))


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor's elements in row-major order as one row of bytes; copy if they are strided."""
    # The stride of a single element may be 0 (of expand), of which torch makes no bytes.
    elements = tensor.detach().contiguous().unsqueeze(-1)
    return elements.view(torch.uint8).reshape(-1)


POLL_S = 0.1
"""Seconds between two checks, while waiting, for a rank that the watch has lost."""

SIZE_BYTES = 8


def gather_text(world: Group, text: str) -> list[str]:
    """Return the texts of all ranks, in rank order."""
    return [_text(data) for data in gather_bytes(world, _bytes(text))]


def gather_json(world: Group, value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order. They travel as JSON."""
    return [json.loads(text) for text in gather_text(world, json.dumps(value))]


def gather_as(world: Group, value: T, kind: type[T]) -> list[T]:
    """Return the values of all ranks, in rank order: dataclasses, or lists of some, of a kind."""
    return [checked(words, kind) for words in gather_json(world, msgspec.to_builtins(value))]


def gather_bytes(world: Group, data: bytes) -> list[bytes]:
    """Return the bytes of all ranks, in rank order; only digests are sent if all are equal."""
    if world.group is None:
        return [data]
    header = hashlib.sha256(data).digest() + len(data).to_bytes(SIZE_BYTES, "big")
    stated = _gather_rows(world, header, len(header))
    if all(of_rank == header for of_rank in stated):
        return [data] * world.world_size
    sizes = [int.from_bytes(of_rank[-SIZE_BYTES:], "big") for of_rank in stated]
    rows = _gather_rows(world, data, max(sizes))
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def broadcast_text(world: Group, text: str) -> str:
    """Return rank 0's text on all ranks; the others' texts are ignored."""
    if world.group is None:
        return text
    data = bytearray(_bytes(text))
    size = torch.tensor([len(data)])
    broadcast(world, size)
    if not world.is_first:
        data = bytearray(int(size))
    if data:
        broadcast(world, torch.frombuffer(data, dtype=torch.uint8))
    return _text(data)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")  # the name of a file may not be UTF-8


def _text(data: bytes | bytearray) -> str:
    return data.decode(errors="surrogateescape")


def broadcast(world: Group, tensor: Tensor, source: int = 0) -> None:
    """Give all ranks the contents of one rank's tensor. Raises: PeerLostError."""
    finish(world, partial(dist.broadcast, tensor, group_src=source, group=world.group))


def _gather_rows(world: Group, data: bytes, length: int) -> list[bytes]:
    tensor = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    rows = torch.empty(world.world_size, length, dtype=torch.uint8)
    finish(world, partial(dist.all_gather, list(rows), tensor, group=world.group))
    return [row.numpy().tobytes() for row in rows]


def finish(world: Group, start: Callable[..., Work | None]) -> None:
    """Start an operation of the main group with `async_op` and await it. Raises: PeerLostError."""
    with waiting(world), peers_may_be_lost(world):
        work = start(async_op=True)
        while work is not None:
            try:
                work.wait(timedelta(seconds=POLL_S))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it ended meanwhile, or with its own error
                    return
            world.watch.check()  # the group may keep waiting for a lost rank


def differing_ranks(texts: list[str]) -> list[int]:
    """Return the ranks whose text is not the most frequent one; in a tie, the first one counts."""
    counts = Counter(texts)
    most = max(counts.values())
    common = next(text for text in texts if counts[text] == most)
    return [rank for rank, text in enumerate(texts) if text != common]


def ranks_that_differ(world: Group, text: str) -> list[int]:
    """Return the `differing_ranks` of all ranks' texts, on all ranks."""
    return differing_ranks(gather_text(world, text))


def agree(world: Group, facts: dict[str, str]) -> None:
    """Check that all ranks state the same facts. Raises: AgreementError, on all."""
    stated = gather_json(world, facts)
    for what in facts:
        values = [str(by_rank.get(what)) for by_rank in stated]
        if different := differing_ranks(values):
            first = different[0]
            other = next(rank for rank in range(len(values)) if rank not in different)
            raise AgreementError(
                f"rank {', '.join(map(str, different))} differs from the others in {what}: "
                f"{_shorten(values[first])} on rank {first}, {_shorten(values[other])} on rank "
                f"{other}; start all ranks with the same code, recipe and data"
            )


def copy_from_first(world: Group, tensors: Mapping[str, Tensor]) -> list[int]:
    """Give all ranks rank 0's values, in place; return who differed. Raises: PeerLostError."""
    if world.group is None:
        return []
    digests = gather_text(world, digest(tensors.items()))  # all have the same names
    different = [rank for rank, text in enumerate(digests) if text != digests[0]]
    for tensor in tensors.values() if different else ():
        # On the CPU, because NCCL has no wait that can check the watch meanwhile.
        dense = tensor.detach().cpu().contiguous()
        broadcast(world, dense)
        tensor.detach().copy_(dense)
    return different


def _shorten(text: str) -> str:
    return text if len(text) <= 120 else text[:119] + "…"
