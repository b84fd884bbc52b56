"""What rank 0 knows, on all ranks of a benchmark."""

from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def from_first(value: Value) -> Value:
    """Rank 0's value."""
    said = [value]
    dist.broadcast_object_list(said, src=0)
    return said[0]
