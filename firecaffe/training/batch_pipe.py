"""A batch sent over a pipe to another process: a pickled outline, then the bytes of each tensor.

Bytes are not copied in Python. Pickled tensors would cost the rank several times as much.
"""

import os
import pickle
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Buffer

from firecaffe.data.dataset import Batch, Leaf


def send_batch(pipe: Connection, batch: Batch) -> None:
    outline = tree_map(_outline, batch)
    content = pickle.dumps((True, outline))  # before anything is sent, because it may fail
    pipe.send_bytes(content)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            _all(os.writev, pipe.fileno(), leaf.detach().cpu().contiguous())


def receive_batch(pipe: Connection, outline: Any) -> Batch:
    """Receive what `send_batch` sends after its outline. Raises: EOFError if the sender is gone."""

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
    # The tensor is contiguous.
    if not tensor.numel():
        return
    left = memoryview(cast(Buffer, tensor.reshape(-1).view(torch.uint8).numpy()))
    while left:
        moved = move(descriptor, [left])
        if not moved:
            raise EOFError
        left = left[moved:]
