"""A compressor's memory as a part of the training state."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost, waiting
from firecaffe.gradients.compressors.codec import Compressor
from firecaffe.transport.collect import HeldPart


class CodecMemory:
    """A compressor's memory by NODE.PARAMETER; what is equal on all ranks is saved once."""

    held_by_all = False
    is_result = False

    def __init__(self, compressor: Compressor, own_nodes: Collection[int]) -> None:
        self._compressor, self._own_nodes = compressor, own_nodes

    def parts(self) -> dict[str, HeldPart]:
        return {name: HeldPart(tensor) for name, tensor in self._compressor.state().items()}

    def load(self, stored: Mapping[str, Tensor]) -> None:
        self._compressor.load_state(stored, self._own_nodes)

    def move(self, group: Group, before: Sequence[range], after: Sequence[range]) -> None:
        """Send memory to the new owners of nodes. All ranks call it. Raises PeerLostError."""
        state = self._compressor.state()
        self._own_nodes = after[group.rank]
        here = {name: tensor for name, tensor in state.items() if self._is_here(name)}
        for source, target in product(range(len(before)), range(len(after))):
            nodes = set(before[source]).intersection(after[target])
            if source == target or not nodes or group.rank not in (source, target):
                continue
            if group.rank == source:
                sent = {
                    name: tensor.cpu().clone() for name, tensor in state.items() if _of(name, nodes)
                }
                _send(group, target, save(sent))
            else:
                here |= load(_receive(group, source))
        self._compressor.load_state(here, self._own_nodes)

    def _is_here(self, name: str) -> bool:
        return not name.partition(".")[0].isdecimal() or _of(name, self._own_nodes)


def _of(name: str, nodes: Collection[int]) -> bool:
    node = name.partition(".")[0]
    return node.isdecimal() and int(node) in nodes


def _send(group: Group, target: int, data: bytes) -> None:
    """Send without checking the watch: Gloo closes a pair whose message is late."""
    with waiting(group), peers_may_be_lost(group):
        dist.send(torch.tensor([len(data)]), group=group.group, group_dst=target)
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.send(whole, group=group.group, group_dst=target)


def _receive(group: Group, source: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    with waiting(group), peers_may_be_lost(group):
        dist.recv(length, group=group.group, group_src=source)
        received = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(received, group=group.group, group_src=source)
    return received.numpy().tobytes()
