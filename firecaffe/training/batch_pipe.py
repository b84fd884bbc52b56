"""A batch over a pipe between two processes: what it is, pickled, then the bytes of each tensor.

The bytes go from one tensor's memory into the other's, without a copy in between that Python would
hold: pickled tensors cost the rank several times as much.
"""

import os
import pickle
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Buffer

from firecaffe.data.layout import Batch, Leaf


def send_batch(pipe: Connection, batch: Batch) -> None:
    """Sends a batch; what is no tensor in it goes as it is."""
    outline = tree_map(_outline, batch)
    content = pickle.dumps((True, outline))  # before anything is sent, for it may fail
    pipe.send_bytes(content)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            _all(os.writev, pipe.fileno(), leaf.detach().cpu().contiguous())


def receive_batch(pipe: Connection, outline: Any) -> Batch:
    """Receives what `send_batch` sends after its outline. Raises: EOFError if the other is gone."""

    def received(leaf: Any) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        _all(os.readv, pipe.fileno(), tensor)
        return tensor

    batch: Batch = tree_map(received, outline)
    return batch


def _outline(leaf: Any) -> Any:
    return Leaf(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _all(move: Any, descriptor: int, tensor: Tensor) -> None:
    """Moves all bytes of a tensor that lies in one piece."""
    if not tensor.numel():
        return
    left = memoryview(cast(Buffer, tensor.reshape(-1).view(torch.uint8).numpy()))
    while left:
        moved = move(descriptor, [left])
        if not moved:
            raise EOFError
        left = left[moved:]
