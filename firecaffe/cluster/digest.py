"""SHA-256 of named tensors: names, types, shapes and every byte."""

import hashlib
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from typing_extensions import Buffer

NamedTensors = Iterable[tuple[str, Tensor]]


def digest(tensors: NamedTensors) -> str:
    """SHA-256 of named tensors, 64 hex digits. Order and names count; memory layout does not."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor_bytes(tensor))
    return sha.hexdigest()


def digest_each(tensors: NamedTensors) -> dict[str, str]:
    """The digest of each tensor by its name, in the order given."""
    return {name: digest([(name, tensor)]) for name, tensor in tensors}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in row-major order, as bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(cast(Buffer, flat.view(torch.uint8).numpy()))
