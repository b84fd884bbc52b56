"""Digests of numbers, tensors and generators that modules keep in plain attributes.

No checkpoint and no other worker has these. A value that forward carries over from micro-batch to
micro-batch (a count of calls, a hidden state, a generator) thus breaks the promise; one that it
writes before it reads it (a cache) does not.
"""

import hashlib
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import digest

OF_TORCH = frozenset(vars(nn.Module()))

PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEEPEST = 6
"""The number of nested containers that are searched."""

Digests = dict[str, str]
"""The digest of each attribute by its path, for example `encoder.layers[0].seen`."""


def attributes_of(network: nn.Module) -> Digests:
    """Digest every attribute whose values can be compared."""
    known = {id(module) for module in network.modules()}
    return {
        path: _digest(value)
        for name, module in network.named_modules()
        for path, value in _of_module(name, module, known)
    }


def _of_module(prefix: str, module: nn.Module, known: set[int]) -> Iterator[tuple[str, Any]]:
    for word, value in list(vars(module).items()):
        if word not in OF_TORCH:
            path = f"{prefix}.{word}" if prefix else word
            yield from _leaves(path, value, known, DEEPEST)


def _leaves(path: str, value: Any, known: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        if id(value) not in known:  # torch does not know networks in lists
            known.add(id(value))
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield f"{path}.{name}", tensor
            for name, module in value.named_modules():
                known.add(id(module))
                yield from _of_module(f"{path}.{name}" if name else path, module, known)
    elif isinstance(value, (list, tuple, deque)) and depth:
        yield f"len({path})", len(value)
        for place, item in enumerate(value):
            yield from _leaves(f"{path}[{place}]", item, known, depth - 1)
    elif isinstance(value, dict) and depth:
        yield f"len({path})", len(value)
        for key, item in list(value.items()):
            yield from _leaves(f"{path}[{key!r}]", item, known, depth - 1)
    elif _is_known(value):
        yield path, value


def _is_known(value: Any) -> bool:
    kinds = (Tensor, np.ndarray, torch.Generator, random.Random, np.random.Generator)
    return isinstance(value, (*PLAIN, *kinds, np.random.RandomState, np.generic))


def _digest(value: Any) -> str:
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, np.ndarray):
        content = value.tobytes() if value.dtype != object else repr(value).encode()
        return f"{value.dtype} {value.shape} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, torch.Generator):
        return tensor_digest(value.get_state())
    if isinstance(value, random.Random):
        return hashlib.sha256(repr(value.getstate()).encode()).hexdigest()
    if isinstance(value, np.random.Generator):
        return hashlib.sha256(repr(value.bit_generator.state).encode()).hexdigest()
    if isinstance(value, np.random.RandomState):
        state = value.get_state(legacy=False)
        numbers = state.pop("state")
        state_bytes = numbers["key"].tobytes() + repr((numbers["pos"], state)).encode()
        return hashlib.sha256(state_bytes).hexdigest()
    return repr(value)


def tensor_digest(tensor: Tensor) -> str:
    """Digest a tensor; one that is sparse, quantized or meta gives only its type and shape."""
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    if not is_plain:
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    return digest([("", tensor.resolve_conj().resolve_neg())])
