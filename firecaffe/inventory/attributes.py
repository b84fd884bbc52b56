"""What modules keep beside parameters and buffers: numbers, tensors and generators in attributes.

No checkpoint has them, no other worker gets them, and nothing puts them back after a micro-batch.
One that a forward writes before it reads it (a cache, the last attention) does no harm. One that is
carried over (a count of calls, a hidden state, a generator) does: it has another value after the
same micro-batch if another came between.
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
"""The attributes that every module has."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEEPEST = 6
"""Containers within containers that are looked into."""

Digests = dict[str, str]
"""The digest of each attribute by its path, as in `encoder.layers[0].seen`."""


def attributes_of(network: nn.Module) -> Digests:
    """The digests of all attributes whose values can be told apart."""
    known = {id(each) for each in network.modules()}
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
        if id(value) not in known:  # a network in a list is none of torch's children
            known.add(id(value))
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield f"{path}.{name}", tensor
            for name, each in value.named_modules():
                known.add(id(each))
                yield from _of_module(f"{path}.{name}" if name else path, each, known)
    elif isinstance(value, (list, tuple, deque)) and depth:
        yield f"len({path})", len(value)
        for place, each in enumerate(value):
            yield from _leaves(f"{path}[{place}]", each, known, depth - 1)
    elif isinstance(value, dict) and depth:
        yield f"len({path})", len(value)
        for key, each in list(value.items()):
            yield from _leaves(f"{path}[{key!r}]", each, known, depth - 1)
    elif _is_known(value):
        yield path, value


def _is_known(value: Any) -> bool:
    kinds = (Tensor, np.ndarray, torch.Generator, random.Random, np.random.Generator)
    return isinstance(value, (*PLAIN, *kinds, np.random.RandomState, np.generic))


def _digest(value: Any) -> str:
    """What tells two values apart."""
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
        told = numbers["key"].tobytes() + repr((numbers["pos"], state)).encode()
        return hashlib.sha256(told).hexdigest()
    return repr(value)


def tensor_digest(tensor: Tensor) -> str:
    """The digest of a tensor of any kind; of one without values, its shape and type."""
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    if not is_plain:
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    return digest([("", tensor.resolve_conj().resolve_neg())])
