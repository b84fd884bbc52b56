"""Plain attributes of networks, losses and data sets: what they carry over from call to call.

No checkpoint and no other worker has them. So a value that forward carries over from micro-batch to
micro-batch (a count of calls, a hidden state, a generator) breaks the promise. A value that is
always written before it is read (a cache) does not.
"""

import hashlib
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import digest

HOOKS = {"_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"}
"""Members of modules with functions of a user, which may keep something."""

OF_TORCH = frozenset(vars(nn.Module())) - HOOKS

PLAIN = (bool, int, float, complex, str, bytes, type(None), itertools.count)
CONTAINERS = (list, tuple, deque, set, dict)
DEEPEST = 6
"""The most levels of nested containers that are searched."""

LIBRARIES = (*sys.stdlib_module_names, "torch", "numpy", "firecaffe")
"""Packages whose objects are not inspected."""

OURS = ("dataset", "items", "collate")
"""Members of our own data sets that hold a user's object."""

FEW = 16
"""The most items of a container in a data set that are inspected one by one."""

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


def attributes_of_loss(loss: Any) -> Digests:
    """Digest a loss's attributes: a module's, an object's or its method's, a function's closure."""
    if isinstance(loss, nn.Module):
        buffers = {name: _digest(buffer) for name, buffer in loss.named_buffers()}
        return {
            f"loss.{path}": content for path, content in (attributes_of(loss) | buffers).items()
        }
    return {path: _digest(value) for path, value in _leaves("loss", loss, set(), DEEPEST)}


def attributes_of_data(dataset: Any) -> Digests:
    """Digest the numbers and generators of a user's data set, and the lengths of its containers.

    This includes wrapped data sets and transforms; items of long containers are not inspected.
    """
    return {path: _digest(value) for path, value in _kept("", dataset, set(), DEEPEST)}


def _kept(path: str, value: Any, known: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if _is_known(value):
        if not isinstance(value, Tensor | np.ndarray):
            yield path, value
        return
    if isinstance(value, CONTAINERS):
        length = _kind(value).__len__(value)
        yield f"len({path})", length
        items = _items(path, value) if length <= FEW else []
    elif type(value).__module__.startswith("firecaffe."):
        items = [(path, getattr(value, word)) for word in OURS if hasattr(value, word)]
    else:
        is_torchs = type(value).__module__.startswith("torch.utils.data")
        members = vars(value).items() if is_torchs else _inside(value)
        items = [(f"{path}.{word}" if path else word, v) for word, v in members]
    if depth and id(value) not in known:
        known.add(id(value))
        for inner, item in items:
            yield from _kept(inner, item, known, depth - 1)


def _of_module(prefix: str, module: nn.Module, known: set[int]) -> Iterator[tuple[str, Any]]:
    for word, value in list(vars(module).items()):
        if word not in OF_TORCH:
            path = f"{prefix}.{word}" if prefix else word
            kept = list(value.values()) if word in HOOKS else value  # not by torch's number
            yield from _leaves(path, kept, known, DEEPEST)
    for word, parameter in module.named_parameters(prefix, recurse=False):
        for member in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = (getattr(parameter, member) or {}).values()
            theirs = [hook for hook in hooks if not _is_of_probe(hook)]
            yield from _leaves(f"{word}.{member}", theirs, known, DEEPEST)


def _is_of_probe(hook: Any) -> bool:
    """Whether our probe has registered a hook, which its second backward no longer has."""
    used = hook.func if isinstance(hook, partial) else None
    return isinstance(used, FunctionType) and used.__module__.startswith("firecaffe.")


def _leaves(path: str, value: Any, known: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        if id(value) not in known:  # torch does not know networks in lists
            known.add(id(value))
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield f"{path}.{name}", tensor
            for name, module in value.named_modules():
                known.add(id(module))
                yield from _of_module(f"{path}.{name}" if name else path, module, known)
    elif isinstance(value, CONTAINERS) and depth:
        items = _items(path, value)
        yield f"len({path})", len(items)
        for inner, item in items:
            yield from _leaves(inner, item, known, depth - 1)
    elif _is_known(value):
        yield path, value
    elif isinstance(value, MethodType):
        yield from _leaves(path, value.__self__, known, depth)
    elif depth and id(value) not in known:
        known.add(id(value))
        for word, item in _inside(value):
            yield from _leaves(f"{path}.{word}", item, known, depth - 1)


def _kind(container: Any) -> Any:
    """Return the built-in type of a container, whose methods a user's type may not have."""
    return next(kind for kind in CONTAINERS if isinstance(container, kind))


def _items(path: str, container: Any) -> list[tuple[str, Any]]:
    kind = _kind(container)
    inside = dict.items(container) if kind is dict else enumerate(kind.__iter__(container))
    return [(f"{path}[{key!r}]", item) for key, item in inside]


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
    """Return what a user's function or object (such as a counter) holds; nothing of a library's."""
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    home = value if isinstance(value, FunctionType) else type(value)
    if isinstance(value, type) or (home.__module__ or "").partition(".")[0] in LIBRARIES:
        return []
    if not isinstance(value, FunctionType):
        state: Any = object.__getstate__(value)  # its __dict__, or the pair of that and its slots
        parts = state if isinstance(state, tuple) else (state,)
        return [item for part in parts if part for item in part.items()]
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    bound = [(word, cell.cell_contents) for word, cell in cells if _is_bound(cell)]
    return [*bound, ("defaults", value.__defaults__), ("defaults", value.__kwdefaults__)]


def _is_bound(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


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


def carried_over(begun: Digests, after: Digests, again: Digests) -> list[str]:
    """Return the attributes that calls change, and that differ after the same call again."""
    return [path for path, v in after.items() if begun.get(path) != v and again.get(path) != v]
